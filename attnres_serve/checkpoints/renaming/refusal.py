"""The refusal of a checkpoint whose tensors have names that no format knows.

It says the ``--rename`` of ``attnres-serve convert`` that would help, as far as it can be guessed.
"""

import shlex
from collections.abc import Collection, KeysView, Mapping, Sequence

from attnres_serve import sentences
from attnres_serve.checkpoints.names import LOOKS_LIKE_ATTNRES
from attnres_serve.checkpoints.renaming.guess import Lack, Open, Spare, guess
from attnres_serve.checkpoints.renaming.likeness import is_of_meta, meanings, words
from attnres_serve.checkpoints.renaming.patterns import Pattern, patterns
from attnres_serve.checkpoints.renaming.rename import OPTION, Rename, new_names
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensors import Stored
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Shape
from attnres_serve.formats.refused import variant

MOST = 40  # renames in a sentence
GROUPS = 4  # of tensors that could be each other, in a sentence
_PARTS = 8  # of a name, of which a rename may leave out the last ones


def refuse_renamed(index: TensorIndex, headers: Mapping[str, Stored], command: str) -> None:
    """Raise CheckpointError if tensors are missing, and others have names that no format knows.

    Args:
        index: that has taken none of them.
        headers: the tensors by the checkpoint's own names.
        command: of ``convert``, to which a ``--rename`` can be added.

    Raises:
        CheckpointError: with what is missing and what may be it; or a name is a wrapper's or a
            buffer's.
    """
    if index.base.quantisation:  # what its tensors are called and shaped like is no model's
        return
    found: set[str] = set()
    unknown: list[str] = []
    for own in headers:
        weights = index.weights_of(own)
        found.update(weights)
        if not weights:
            unknown.append(own)
    lacks = _lacks(index, [name for name in index.wanted if name not in found])
    if not unknown or not lacks or any(map(_is_of_a_variant, unknown)):
        return
    spares = _spares({own: tuple(headers[own].shape) for own in unknown}, lacks)
    pairs, still_open = guess(spares, lacks)
    pairs = dict(sorted(pairs.items(), key=lambda pair: lacks.index(pair[1])))
    raise CheckpointError(_sentence(spares, lacks, pairs, still_open, headers, command))


def _is_of_a_variant(own: str) -> bool:
    """Whether a tensor is of another function, by whose name the checkpoint is then refused."""
    return bool(LOOKS_LIKE_ATTNRES.search(own) and variant(own))


def _spares(shapes: Mapping[str, Shape], lacks: Sequence[Lack]) -> list[Spare]:
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    numbers = [lack.pattern.by_numbers.keys() for lack in lacks]
    found = [
        (one, shape)
        for shape, names in by_shape.items()
        for pattern in patterns(names)
        for one in _by_module(pattern, numbers)
    ]
    of_stems = {pattern.stem: shape for pattern, shape in found}
    return [
        Spare(pattern, shape, words(pattern.stem, is_of_meta(pattern.stem, of_stems)))
        for pattern, shape in found
    ]


def _by_module(pattern: Pattern, numbers: Sequence[KeysView[tuple[str, ...]]]) -> list[Pattern]:
    """The parts of a pattern in which a number tells modules apart, not layers or experts."""
    if pattern.by_numbers.keys() in numbers or pattern.text.count("*") < 2:
        return [pattern]
    return [one for part in pattern.split() for one in _by_module(part, numbers)]


def _lacks(index: TensorIndex, missing: Sequence[str]) -> list[Lack]:
    """What a checkpoint lacks, by the names that its format has for it.

    Experts stand here as they are on disk, and as they are packed in memory.
    """
    weights: dict[str, list[str]] = {}
    by_shapes: dict[tuple[Shape, ...], list[str]] = {}
    for name in missing:
        own = index.format.own_name(name)
        parts = weights.setdefault(own, [])
        parts.append(name)
        if len(parts) == 1:
            by_shapes.setdefault(index.shapes_of(name), []).append(own)
    for own, held in index.base.packed(missing).items():
        weights[own] = [*held.parts]
        by_shapes.setdefault((held.shape,), []).append(own)
    order = {name: place for place, name in enumerate(index.wanted)}
    found = [
        Lack(
            pattern,
            shapes,
            frozenset(name for own in pattern.members.values() for name in weights[own]),
            meanings(first, weights[first], index.base.layout, index.wanted[weights[first][0]]),
        )
        for shapes, names in by_shapes.items()
        for pattern in patterns(names)
        for first in [next(iter(pattern.members.values()))]
    ]
    return sorted(found, key=lambda lack: min(order[name] for name in lack.weights))


def _sentence(
    spares: Sequence[Spare],
    lacks: Sequence[Lack],
    pairs: Mapping[Spare, Lack],
    still_open: Open,
    names: Collection[str],
    command: str,
) -> str:
    spare, lack = next(iter(pairs.items()), (spares[0], lacks[0]))
    if still_open and not pairs:
        spare, (lack, *_) = next(iter(still_open.items()))
    missing = frozenset[str]().union(*(one.weights for one in lacks))
    said = f"the checkpoint lacks {lack.pattern}{_more(len(missing - lack.weights))}; "
    said += f"the file has {spare.pattern}"
    if not pairs and not still_open:
        return (
            f"{said}{_more_of(spares)}, which no format knows, and nothing of that has the shape "
            "of what is missing; the configuration and the weights do not belong together."
        )
    said += " of the same shape, which no format knows"
    said += ": rename it? " if pairs else ". "
    left = [one for one in spares if one not in pairs and one not in still_open]
    if left:
        said += f"{left[0].pattern}{_more_of(left)} fits nothing that is missing. "
    if still_open:
        said += _choices(still_open)
    if not pairs:
        return f"{said}Rename them by `{command} {OPTION} OLD=NEW`."
    found = _renames(pairs, names)
    if len(found) > MOST:
        said += f"Of {len(found)} renames these are the first {MOST}. "
    return f"{said}Rename by `{' '.join([command, *map(_as_option, found[:MOST])])}`."


def _as_option(rename: Rename) -> str:
    """A rename as a shell reads it."""
    return f"{OPTION} {shlex.quote(str(rename))}"


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _more_of(spares: Sequence[Spare]) -> str:
    return _more(sum(len(one.pattern.members) for one in spares[1:]))


def _choices(still_open: Open) -> str:
    """Which tensors could be which, where shapes and names do not tell."""
    alike: dict[str, list[str]] = {}
    for spare, lacks in still_open.items():
        among = sentences.some(lack.pattern.text for lack in lacks)
        alike.setdefault(among, []).append(spare.pattern.text)
    groups = [f"which of {among} is {sentences.some(own)}" for among, own in alike.items()]
    more = f", nor {len(groups) - GROUPS} times more" if groups[GROUPS:] else ""
    told = ", nor ".join(groups[:GROUPS])
    return f"Shape and name do not tell {told}{more}: add a {OPTION} for each. "


def _renames(pairs: Mapping[Spare, Lack], names: Collection[str]) -> list[Rename]:
    """Renames of tensors to what they are taken for, and of no other tensor."""
    wanted = {
        name: lack.pattern.by_numbers[numbers]
        for spare, lack in pairs.items()
        for numbers, name in spare.pattern.by_numbers.items()
    }
    whole = [Rename(spare.pattern.text, lack.pattern.text) for spare, lack in pairs.items()]
    for most in range(_PARTS, -1, -1):
        found = list(dict.fromkeys(_of_modules(one, most) for one in whole))
        found.sort(key=lambda one: -one.old.count("."))  # what is within a module, before it
        try:
            if new_names(names, found) == wanted:
                return found
        except CheckpointError:
            continue
    return [Rename(old, new) for old, new in wanted.items()]


def _of_modules(rename: Rename, most: int) -> Rename:
    """The same rename without the last parts of both names, as far as these are the same.

    Args:
        rename: of tensors.
        most: how many parts may go.
    """
    old, new = rename.old.split("."), rename.new.split(".")
    while most and len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
        old, new, most = old[:-1], new[:-1], most - 1
    return Rename(".".join(old), ".".join(new))
