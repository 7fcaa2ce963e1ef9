"""Block sizes in words, and notes on unusual ones."""

from attnres_serve.depth.spec import AttnResSpec


def size(spec: AttnResSpec) -> str:
    """Block sizes in words, for example ``4 sublayers (2 layers) a block``."""
    sizes = _sizes(spec)
    if len({*sizes[:-1]}) > 1 or sizes[-1] > sizes[0]:
        return f"from {min(sizes)} to {max(sizes)} sublayers a block"
    starts, layers = spec.layout.layer_starts, spec.layout.num_layers
    per_block = starts.index(sizes[0]) if sizes[0] in starts else layers
    are_layers = spec.first_sublayers == starts[::per_block]
    in_layers = f" ({_count(per_block, 'layer')})" if are_layers else ""
    return f"{_count(sizes[0], 'sublayer')}{in_layers} a block"


def notes(spec: AttnResSpec) -> list[str]:
    """Sentences about valid but unusual block sizes."""
    if spec.is_full:
        return []
    sizes, sentences = _sizes(spec), []
    if len(sizes) == 1:
        sentences.append(
            f"one block holds all {spec.num_sublayers} sublayers; is the stated size too large?"
        )
    starts = {*spec.layout.layer_starts}
    if inside := [start for start in spec.first_sublayers if start not in starts]:
        sentences.append(
            f"blocks begin in the middle of layers, at {_listed(inside)}; sizes in sublayers are "
            "usually even"
        )
    return sentences


def _sizes(spec: AttnResSpec) -> list[int]:
    """Sublayers of every block."""
    starts = spec.first_sublayers
    ends = [*starts[1:], spec.num_sublayers]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(starts: list[int]) -> str:
    shown = ", ".join(map(str, starts[:4]))
    more = " and more" if len(starts) > 4 else ""
    return f"sublayer{'' if len(starts) == 1 else 's'} {shown}{more}"
