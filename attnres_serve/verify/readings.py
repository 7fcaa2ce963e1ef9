"""Other readings of a config.json's depth attention.

A number of config.json may count sublayers, layers or blocks, and every project counts differently.
A model with a number in the wrong unit loads and writes fluent text, so only the loss under each
reading reveals it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attnres_serve import formats
from attnres_serve.checkpoints.checked import Checkpoint
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.resolve import with_list_of_architectures

Starts = tuple[int, ...]
_INSIDE = ("attn_res", "text_config")  # objects of a config.json in which formats keep the key


@dataclass(frozen=True)
class Reading:
    """One meaning of a config.json.

    Attributes:
        name: what config.json would have to state, for example ``block_size 4``.
        stated: what it states instead, for example ``2``.
        question: a question about the checkpoint's origin; empty for the served reading.
        starts: the first sublayer of every block.
        final_mix: whether the head reads a mix.
    """

    name: str
    stated: str
    question: str
    starts: Starts
    final_mix: bool


def readings(checkpoint: Checkpoint) -> list[Reading]:
    """The served reading, and then the others that the tensors fit, each once.

    Args:
        checkpoint: a checked checkpoint with depth attention.
    """
    parsed = checkpoint.parsed
    assert parsed is not None and parsed.spec is not None, "the checkpoint has depth attention"
    spec = parsed.spec
    blocks = formats.by_name(parsed.format).blocks
    by_starts = _values(checkpoint.config, parsed.format, spec.num_sublayers)
    value = _stated(checkpoint.config, blocks.key)  # None for a list of starts
    # The key may have no effect, for example in a mode where every sublayer is a block.
    if len(by_starts) < 2:
        value, by_starts = None, {}

    def name(starts: Starts) -> str:
        known = by_starts.get(starts)
        return _described(starts, spec) if known is None else f"{blocks.key} {known}"

    served = name(spec.block_starts) if value is None else f"{blocks.key} {value}"
    stated = "own blocks" if value is None else str(value)
    result = [Reading(served, stated, "", spec.block_starts, spec.final_mix)]
    seen = {spec.block_starts}
    # As the format writes them: a copy after the last sublayer follows from the others.
    closed = {_sublayers(starts, spec): starts for starts in by_starts}
    for starts, question in _other_starts(spec, value, blocks.unit):
        starts = closed.get(starts, starts)
        if starts not in seen:
            seen.add(starts)
            result.append(Reading(name(starts), stated, question, starts, spec.final_mix))
    if spec.final_mix:  # a file without that mix would have no tensors for it
        question = "was it trained without?"
        result.append(Reading("no final mix", "final mix", question, spec.block_starts, False))
    return result


def _other_starts(spec: AttnResSpec, value: int | None, unit: str) -> Iterator[tuple[Starts, str]]:
    """Block starts by other readings of ``value``, and the question for each."""
    if spec.shared_queries == "block":
        return  # the tensors' names say where blocks begin
    layout = spec.layout
    if value is None and not _is_uniform(spec):
        yield from _listed(spec.first_sublayers, layout)
        return
    if value is None:
        value, unit = _size(spec), "sublayers"
    for other in ("sublayers", "layers"):
        if other != unit:
            yield _starts(layout, value, other), f"is the unit {other}?"
    question = f"is {value} the number of blocks?"
    rounded = "are the layers of a block rounded {}?" if unit == "blocks" else question
    yield _starts(layout, value, "blocks"), rounded.format("up")
    yield _starts(layout, max(layout.num_layers // value, 1), "layers"), rounded.format("down")
    if unit != "blocks":
        yield _starts(layout, -(-layout.num_sublayers // value), "sublayers"), question
    if value % 2 == 0:
        yield _starts(layout, value // 2, unit), "was the number doubled?"
    yield _starts(layout, 2 * value, unit), "was the number halved?"


def _listed(starts: Starts, layout: Layout) -> Iterator[tuple[Starts, str]]:
    """Other readings of a list of starts."""
    of_layers = layout.layer_starts
    yield tuple(of_layers[n] for n in starts if n < len(of_layers)), "is the unit layers?"
    if all(start in of_layers for start in starts):
        yield tuple(of_layers.index(start) for start in starts), "is the unit sublayers?"


def _starts(layout: Layout, value: int, unit: str) -> Starts:
    if unit == "sublayers":
        return tuple(range(0, layout.num_sublayers, value))
    if unit == "blocks":
        value = -(-layout.num_layers // value)
    return layout.layer_starts[::value]


def _size(spec: AttnResSpec) -> int:
    """The number of sublayers of the first block."""
    return [*spec.first_sublayers, spec.num_sublayers][1]


def _is_uniform(spec: AttnResSpec) -> bool:
    return spec.first_sublayers == _starts(spec.layout, _size(spec), "sublayers")


def _sublayers(starts: Starts, spec: AttnResSpec) -> Starts:
    """The starts of a reading up to the last sublayer."""
    return tuple(start for start in starts if start < spec.num_sublayers)


def _described(starts: Starts, spec: AttnResSpec) -> str:
    """The name of a reading that config.json cannot state by a number."""
    starts = _sublayers(starts, spec)
    size = [*starts, spec.num_sublayers][1]
    if starts == _starts(spec.layout, size, "sublayers"):
        return f"blocks of {size} sublayers"
    return f"blocks at the sublayers {', '.join(map(str, starts))}"


def _values(config: dict[str, Any], format_name: str, most: int) -> dict[Starts, int]:
    """The smallest number that states block starts in this config.json, by block starts."""
    result: dict[Starts, int] = {}
    checkpoint_format = formats.by_name(format_name)
    key, config = checkpoint_format.blocks.key, with_list_of_architectures(config)
    for value in range(1, most + 1):
        try:
            spec = checkpoint_format.translate(_restated(config, key, value)).spec
        except CheckpointError:
            continue  # not every number is valid
        if spec is not None:
            result.setdefault(spec.block_starts, value)
    return result


def _holder(config: dict[str, Any]) -> str | None:
    """The name of the object within a config.json that states blocks; None for the top level."""
    return next((name for name in _INSIDE if isinstance(config.get(name), dict)), None)


def _stated(config: dict[str, Any], key: str) -> Any:
    holder = _holder(config)
    return (config if holder is None else config[holder]).get(key)


def _restated(config: dict[str, Any], key: str, value: int) -> dict[str, Any]:
    """The config.json with another number, and without a list of starts."""
    holder = _holder(config)
    if holder is None:
        return config | {key: value}
    inside = {name: item for name, item in config[holder].items() if name != "block_starts"}
    return config | {holder: inside | {key: value}}
