"""An n-gram model with interpolated modified Kneser-Ney smoothing (Chen and Goodman, 1998).

It is the demo's yardstick. N-grams are packed into one integer each, so that counting is a sort.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def pack(symbols: Ints, order: int, base: int) -> Ints:
    """Number every window of `order` symbols; the newest symbol is the least significant digit."""
    if base**order >= 2**63:
        raise ValueError(f"{order}-grams over {base} symbols do not fit 63 bits")
    keys = np.zeros(len(symbols) - order + 1, dtype=np.int64)
    for offset in range(order):
        keys = keys * base + symbols[offset : offset + len(keys)]
    return keys


def look_up(keys: Ints, values: NDArray, wanted: Ints) -> NDArray:
    """The values stored for the wanted keys (`keys` are sorted), 0 where there is none."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


class Order:
    """The n-grams of one length, and the probability their contexts leave to shorter ones."""

    def __init__(self, keys: Ints, counts: Ints, base: int) -> None:
        self.keys, self.counts, self.base = keys, counts, base
        n = np.maximum(1.0, np.bincount(np.minimum(counts, 5), minlength=6))
        steps = np.arange(1, 4)
        raw = steps - (steps + 1) * n[1] / (n[1] + 2 * n[2]) * n[2:5] / n[1:4]
        self.discounts = np.insert(np.clip(raw, 0, steps), 0, 0.0)  # of counts 0, 1, 2, 3 or more
        self.contexts, context = np.unique(keys // base, return_inverse=True)
        self.totals = np.bincount(context, weights=counts)
        self.left_over = np.bincount(context, weights=self.discount(counts))

    def discount(self, counts: Ints) -> Floats:
        """What is taken from each count."""
        return self.discounts[np.minimum(counts, 3)]

    def interpolate(self, wanted: Ints, lower: Floats) -> Floats:
        """Probability of the n-grams `wanted`, given the probability from the order below."""
        counts = look_up(self.keys, self.counts, wanted)
        total = look_up(self.contexts, self.totals, wanted // self.base)
        left_over = look_up(self.contexts, self.left_over, wanted // self.base)
        mixed = (counts - self.discount(counts) + left_over * lower) / np.maximum(total, 1)
        return np.where(total > 0, mixed, lower)


class KneserNey:
    """An n-gram model over the symbols 0 .. base-1; below the top, contexts are what it counts."""

    def __init__(self, symbols: Ints, order: int, base: int) -> None:
        self.base = base
        self.orders: list[Order] = []  # from unigrams up
        keys, counts = np.unique(pack(symbols, order, base), return_counts=True)
        for size in range(order, 0, -1):
            self.orders.insert(0, Order(keys, counts, base))
            keys, counts = np.unique(keys % base ** (size - 1), return_counts=True)

    def bits(self, symbols: Ints) -> Floats:
        """Bits the model needs for each symbol, given the ones before it."""
        probability = np.full(len(symbols), 1.0 / self.base)
        for size, order in enumerate(self.orders, start=1):
            known = slice(size - 1, None)  # earlier symbols have too short a history
            wanted = pack(symbols, size, self.base)
            probability[known] = order.interpolate(wanted, probability[known])
        return -np.log2(probability)
