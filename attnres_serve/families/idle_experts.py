"""The experts that a token does not see, from the names and shapes of a model's tensors."""

from collections import Counter
from collections.abc import Mapping
from math import prod

from attnres_serve.families import experts
from attnres_serve.families.family import Shape


def elements(shapes: Mapping[str, Shape], chosen: int) -> int:
    """Elements of the experts that a token does not see.

    Args:
        shapes: of the tensors of a checkpoint.
        chosen: experts that a token sees in each layer with experts.
    """
    elements: Counter[str] = Counter()
    numbers: dict[str, int] = {}
    for name, mixture, number in experts.counts(shapes):
        elements[mixture] += prod(shapes[name])
        numbers[mixture] = max(numbers.get(mixture, 0), number)
    return sum(
        elements[mixture] - elements[mixture] * min(chosen, number) // number
        for mixture, number in numbers.items()
    )
