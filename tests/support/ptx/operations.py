"""What instructions compute from registers alone, found by their whole opcode.

A rule names every modifier that it understands, so that an opcode with another one is unknown and
not half understood.  ``.approx`` functions are computed exactly and rounded once, as a GPU does not
quite.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptx.errors import UnknownInstructionError


class Operation(NamedTuple):
    """Types of result and sources, and the function between their numbers."""

    result: str
    sources: tuple[str, ...]
    function: Callable[..., np.ndarray]


Rule = Callable[[re.Match[str]], Operation]
_RULES: list[tuple[re.Pattern[str], Rule]] = []

_INTEGER = "(?P<kind>[us](?:16|32|64))"
_FLOAT = "(?P<kind>f32|f16|bf16|f16x2|bf16x2|f32x2)"
_SMALLEST_NORMAL = np.float32(2.0**-126)


def operation(opcode: str, sources: int) -> Operation:
    """The meaning of an opcode with so many sources.

    Raises:
        UnknownInstructionError: if it has none here.
    """
    for pattern, rule in _RULES:
        found = pattern.fullmatch(opcode)
        if found and len((meaning := rule(found)).sources) == sources:
            return meaning
    raise UnknownInstructionError(opcode)


def _rule(pattern: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.append((re.compile(pattern), rule))
        return rule

    return add


def _flush(numbers: np.ndarray) -> np.ndarray:
    """``.ftz``: what is subnormal becomes zero, with its sign."""
    return np.where(np.abs(numbers) < _SMALLEST_NORMAL, np.copysign(0, numbers), numbers)


def _flushing(function: Callable[..., np.ndarray], flush: bool) -> Callable[..., np.ndarray]:
    if not flush:
        return function
    return lambda *sources: _flush(function(*map(_flush, sources)))


def _fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` in float64, where the product of float32 is exact; the result is rounded."""
    return x.astype(np.float64) * y + z


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_COMPARE = {
    **{"eq": np.equal, "ne": np.not_equal},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
}
_UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x.astype(np.float64)),
    "ex2.approx": lambda x: np.exp2(x.astype(np.float64)),
    "lg2.approx": lambda x: np.log2(x.astype(np.float64)),
    "rcp.approx": lambda x: 1 / x.astype(np.float64),
}


@_rule(rf"(?P<name>add|sub|mul\.lo)\.{_INTEGER}")
def _integer(found: re.Match[str]) -> Operation:
    kind = found["kind"]
    return Operation(kind, (kind, kind), _ARITHMETIC[found["name"][:3]])


@_rule(r"(?P<name>mul|mad)\.wide\.(?P<kind>[us]32)")
def _wide(found: re.Match[str]) -> Operation:
    """The whole product of two 32-bit integers."""
    kind, wide = found["kind"], found["kind"][0] + "64"
    number = np.uint64 if wide == "u64" else np.int64

    def function(x: np.ndarray, y: np.ndarray, z: np.ndarray | int = 0) -> np.ndarray:
        return x.astype(number) * y.astype(number) + np.asarray(z, number)

    return Operation(wide, (kind, kind) + (wide,) * (found["name"] == "mad"), function)


@_rule(rf"mad\.lo\.{_INTEGER}")
def _multiply_add(found: re.Match[str]) -> Operation:
    return Operation(found["kind"], (found["kind"],) * 3, lambda x, y, z: x * y + z)


@_rule(r"(?P<name>div|rem)\.(?P<kind>[us]32)")
def _divide(found: re.Match[str]) -> Operation:
    """Towards zero."""
    kind = found["kind"]

    def function(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = np.broadcast_arrays(x.astype(np.int64), y.astype(np.int64))
        remainder = np.fmod(x, y)
        return remainder if found["name"] == "rem" else (x - remainder) // y

    return Operation(kind, (kind, kind), lambda x, y: function(x, y).astype(x.dtype))


@_rule(rf"(?P<name>min|max)\.{_INTEGER}")
def _extreme(found: re.Match[str]) -> Operation:
    kind = found["kind"]
    return Operation(kind, (kind, kind), getattr(np, found["name"] + "imum"))


@_rule(r"(?P<name>min|max)\.f32")
def _float_extreme(found: re.Match[str]) -> Operation:
    """Of a number and NaN the number."""
    return Operation("f32", ("f32", "f32"), getattr(np, "f" + found["name"]))


@_rule(r"(?P<name>min|max)\.f32")
def _float_extreme_of_three(found: re.Match[str]) -> Operation:
    extreme = getattr(np, "f" + found["name"])
    return Operation("f32", ("f32",) * 3, lambda x, y, z: extreme(extreme(x, y), z))


@_rule(r"(?P<name>and|or|xor)\.(?P<kind>pred|b16|b32|b64)")
def _bitwise(found: re.Match[str]) -> Operation:
    kind = found["kind"]
    return Operation(kind, (kind, kind), _BITWISE[found["name"]])


@_rule(r"not\.(?P<kind>pred|b16|b32|b64)")
def _invert(found: re.Match[str]) -> Operation:
    return Operation(found["kind"], (found["kind"],), np.invert)


@_rule(r"neg\.(?P<kind>s16|s32|s64)")
def _negate(found: re.Match[str]) -> Operation:
    return Operation(found["kind"], (found["kind"],), np.negative)


@_rule(r"(?P<name>shl|shr)\.(?P<kind>[bus](?:16|32|64))")
def _shift(found: re.Match[str]) -> Operation:
    """By the width or more: nothing is left but copies of the sign."""
    kind = found["kind"]
    shift = np.left_shift if found["name"] == "shl" else np.right_shift

    def function(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        width = 8 * x.itemsize
        inside = shift(x, np.minimum(by, width - 1).astype(x.dtype))
        filled = inside if kind[0] == "s" else np.zeros_like(inside)
        return np.where(by < width, inside, filled)

    return Operation(kind, (kind, "u32"), function)


@_rule(r"prmt\.b32")
def _permute(found: re.Match[str]) -> Operation:
    """Four bytes, each chosen by a nibble from those of two sources, the first's first."""

    def function(x: np.ndarray, y: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        chosen = chosen.astype(np.uint64)
        both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
        whole = np.uint64(0)
        for place in range(4):
            nibble = chosen >> np.uint64(4 * place) & np.uint64(15)
            byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = (byte >> np.uint64(7)) * np.uint64(255)  # with its highest bit, that of the byte
            byte = np.where(nibble > 7, sign, byte)
            whole = whole | byte << np.uint64(8 * place)
        return whole.astype(np.uint32)

    return Operation("b32", ("b32",) * 3, function)


@_rule(r"bfe\.(?P<kind>[us]32)")
def _extract(found: re.Match[str]) -> Operation:
    """A field of bits, by where it begins and how long it is; ``s32``: with its sign."""
    kind = found["kind"]

    def function(x: np.ndarray, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
        begin, length = begin.astype(np.int64), length.astype(np.int64)
        above = 64 - begin - length
        number = np.int64 if kind == "s32" else np.uint64
        left = x.astype(np.int64).view(number) << above.astype(number)
        return left >> (above + begin).astype(number)

    return Operation(kind, (kind, "u32", "u32"), function)


@_rule(rf"(?P<name>add|sub|mul)(?:\.rn)?(?P<ftz>\.ftz)?\.{_FLOAT}")
def _float(found: re.Match[str]) -> Operation:
    kind = found["kind"]
    function = _flushing(_ARITHMETIC[found["name"]], bool(found["ftz"]))
    return Operation(kind, (kind, kind), function)


@_rule(rf"fma\.rn(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.{_FLOAT}")
def _fma(found: re.Match[str]) -> Operation:
    kind = found["kind"]
    function = _flushing(_fused, bool(found["ftz"]))
    if found["sat"]:
        return Operation(kind, (kind,) * 3, lambda *sources: np.clip(function(*sources), 0, 1))
    return Operation(kind, (kind,) * 3, function)


@_rule(r"fma\.rn\.f32\.(?P<kind>bf16|f16)")
def _fma_of_halves(found: re.Match[str]) -> Operation:
    """Two halves are multiplied, and the product is added in float32."""
    return Operation("f32", (found["kind"], found["kind"], "f32"), _fused)


@_rule(r"div\.(?:full|rn)\.f32")
def _quotient(found: re.Match[str]) -> Operation:
    return Operation("f32", ("f32", "f32"), np.divide)


@_rule(r"(?P<name>neg|abs|(?:rsqrt|ex2|lg2|rcp)\.approx)(?P<ftz>\.ftz)?\.f32")
def _unary(found: re.Match[str]) -> Operation:
    return Operation("f32", ("f32",), _flushing(_UNARY[found["name"]], bool(found["ftz"])))


@_rule(r"mov\.(?P<kind>pred|[bus](?:16|32|64)|f32)")
def _move(found: re.Match[str]) -> Operation:
    return Operation(found["kind"], (found["kind"],), np.copy)


@_rule(r"selp\.(?P<kind>[bus](?:16|32|64)|f32)")
def _select(found: re.Match[str]) -> Operation:
    kind = found["kind"]
    return Operation(kind, (kind, kind, "pred"), lambda x, y, chosen: np.where(chosen, x, y))


@_rule(r"setp\.(?P<how>eq|ne|lt|le|gt|ge)(?P<or_nan>u)?\.(?P<kind>[bus](?:16|32|64)|f32)")
def _compare(found: re.Match[str]) -> Operation:
    compare, kind = _COMPARE[found["how"]], found["kind"]
    # NaN is unequal to all; of the others only those with a u hold.
    holds = bool(found["or_nan"])

    def function(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x) | np.isnan(y), holds, compare(x, y))

    return Operation("pred", (kind, kind), function if kind == "f32" else compare)


@_rule(r"setp\.nan\.f32")
def _is_nan(found: re.Match[str]) -> Operation:
    return Operation("pred", ("f32", "f32"), lambda x, y: np.isnan(x) | np.isnan(y))


@_rule(r"cvt\.(?P<to>[us](?:16|32|64))\.(?P<of>[us](?:8|16|32|64))")
def _convert_integer(found: re.Match[str]) -> Operation:
    """Sign or zeros are put in front, or the front is cut off."""
    return Operation(found["to"], (found["of"],), np.copy)


@_rule(r"cvt\.rn\.(?P<to>f32)\.(?P<of>[us](?:32|64))|cvt\.(?P<wide>f32)\.(?P<half>bf16|f16)")
def _convert_to_float(found: re.Match[str]) -> Operation:
    return Operation("f32", (found["of"] or found["half"],), np.copy)


@_rule(r"cvt\.rn\.(?P<to>bf16|f16)\.f32")
def _round(found: re.Match[str]) -> Operation:
    return Operation(found["to"], ("f32",), lambda x: x.astype(np.float64))


@_rule(r"cvt\.rn\.(?P<to>bf16x2|f16x2)\.f32")
def _round_pair(found: re.Match[str]) -> Operation:
    """The first source is the high half."""

    def function(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return np.stack(np.broadcast_arrays(low, high), axis=-1).astype(np.float64)

    return Operation(found["to"], ("f32", "f32"), function)
