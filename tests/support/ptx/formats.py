"""Types of PTX: from the bits of a register to numbers that NumPy computes with, and back."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """A type's bits, and the numbers they are: ``[threads]``, or ``[threads, 2]`` if packed."""

    bits: type
    decode: Callable[[np.ndarray], np.ndarray]
    encode: Callable[[np.ndarray], np.ndarray]


def _plain(bits: type, numbers: type) -> Format:
    return Format(
        bits,
        lambda array: array.view(numbers),
        lambda array: np.ascontiguousarray(array, numbers).view(bits),
    )


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _to_bf16(numbers: np.ndarray) -> np.ndarray:
    """To nearest, ties to even.

    By way of float32, which is exact for a sum of two: 24 bits are more than twice 8 and 2.
    """
    single = np.ascontiguousarray(numbers, np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FFF, rounded).astype(np.uint16)


def _from_f16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float64)


def _to_f16(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16).view(np.uint16)


def _pair(bits: type, half: Format) -> Format:
    """Two numbers, the low one first."""
    return Format(
        bits,
        lambda array: half.decode(np.ascontiguousarray(array).view(half.bits).reshape(-1, 2)),
        lambda array: np.ascontiguousarray(half.encode(array)).view(bits)[:, 0],
    )


_bf16 = Format(np.uint16, _from_bf16, _to_bf16)
_f16 = Format(np.uint16, _from_f16, _to_f16)
_f32 = _plain(np.uint32, np.float32)
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {16: np.int16, 32: np.int32, 64: np.int64}

FORMATS: dict[str, Format] = {
    "pred": _plain(np.bool_, np.bool_),
    "bf16": _bf16,
    "f16": _f16,
    "f32": _f32,
    "bf16x2": _pair(np.uint32, _bf16),
    "f16x2": _pair(np.uint32, _f16),
    "f32x2": _pair(np.uint64, _f32),
    **{f"{sign}{size}": _plain(kind, kind) for sign in "bu" for size, kind in _UNSIGNED.items()},
    **{f"s{size}": _plain(_UNSIGNED[size], kind) for size, kind in _SIGNED.items()},
}


def immediate(text: str, kind: str) -> np.ndarray:
    """Bits of a constant in an instruction, ``[1]``: an integer, or float32 as ``0fXXXXXXXX``."""
    value = int(text[2:], 16) if text[:2] == "0f" else int(text.rstrip("U"), 0)
    bits = FORMATS[kind].bits
    if bits is np.bool_:
        return np.array([value != 0])
    return np.array([value % (1 << 8 * np.dtype(bits).itemsize)], bits)
