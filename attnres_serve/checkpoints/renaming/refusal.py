"""The error for a checkpoint whose tensors have unknown names.

It suggests ``--rename`` options of ``attnres-serve convert`` as far as they can be guessed.
"""

import shlex
from collections.abc import Collection, KeysView, Mapping, Sequence

from attnres_serve import sentences
from attnres_serve.checkpoints.names import LOOKS_LIKE_ATTNRES
from attnres_serve.checkpoints.renaming.guess import Lack, Open, Spare, guess
from attnres_serve.checkpoints.renaming.likeness import has_name_of_meta, meanings, name_words
from attnres_serve.checkpoints.renaming.patterns import Pattern, patterns
from attnres_serve.checkpoints.renaming.rename import RENAME_OPTION, Rename, new_names
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensors import Stored
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Shape
from attnres_serve.formats.refused import variant

MOST = 40  # renames in a sentence
GROUPS = 4  # ambiguous groups in a sentence
_PARTS = 8  # of a name; a rename may omit the last ones


def refuse_renamed(index: TensorIndex, headers: Mapping[str, Stored], command: str) -> None:
    """Raise CheckpointError if tensors are missing and others have unknown names.

    Args:
        index: an empty index.
        headers: the tensors by the checkpoint's names.
        command: a ``convert`` command, to which a ``--rename`` can be added.

    Raises:
        CheckpointError: names missing tensors and candidates; or a name with a wrapper's prefix,
            or a buffer's name.
    """
    if index.base.quantisation:  # its names and shapes are not those of the model
        return
    held: set[str] = set()
    unknown: list[str] = []
    for stored_name in headers:
        weights = index.weights_of(stored_name)
        held.update(weights)
        if not weights:
            unknown.append(stored_name)
    lacks = _lacks(index, [name for name in index.expected if name not in held])
    if not unknown or not lacks or any(map(_is_of_a_variant, unknown)):
        return
    spares = _spares(
        {stored_name: tuple(headers[stored_name].shape) for stored_name in unknown}, lacks
    )
    pairs, still_open = guess(spares, lacks)
    pairs = dict(sorted(pairs.items(), key=lambda pair: lacks.index(pair[1])))
    raise CheckpointError(_sentence(spares, lacks, pairs, still_open, headers, command))


def _is_of_a_variant(stored_name: str) -> bool:
    """Whether a tensor belongs to another function; that refusal is more specific."""
    return bool(LOOKS_LIKE_ATTNRES.search(stored_name) and variant(stored_name))


def _spares(shapes: Mapping[str, Shape], lacks: Sequence[Lack]) -> list[Spare]:
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    numbers = [lack.pattern.by_numbers.keys() for lack in lacks]
    shaped = [
        (one, shape)
        for shape, names in by_shape.items()
        for pattern in patterns(names)
        for one in _by_module(pattern, numbers)
    ]
    of_stems = {pattern.stem: shape for pattern, shape in shaped}
    return [
        Spare(pattern, shape, name_words(pattern.stem, has_name_of_meta(pattern.stem, of_stems)))
        for pattern, shape in shaped
    ]


def _by_module(pattern: Pattern, numbers: Sequence[KeysView[tuple[str, ...]]]) -> list[Pattern]:
    """A pattern split by numbers that count modules instead of layers or experts."""
    if pattern.by_numbers.keys() in numbers or pattern.text.count("*") < 2:
        return [pattern]
    return [one for part in pattern.split() for one in _by_module(part, numbers)]


def _lacks(index: TensorIndex, missing: Sequence[str]) -> list[Lack]:
    """The tensors that a checkpoint lacks, by their names in its format.

    Experts are listed in their form on disk, and packed as in memory.
    """
    weights: dict[str, list[str]] = {}
    by_shapes: dict[tuple[Shape, ...], list[str]] = {}
    for name in missing:
        stored_name = index.format.stored_name(name)
        parts = weights.setdefault(stored_name, [])
        parts.append(name)
        if len(parts) == 1:
            by_shapes.setdefault(index.shapes_of(name), []).append(stored_name)
    for stored_name, held in index.base.packed(missing).items():
        weights[stored_name] = [*held.parts]
        by_shapes.setdefault((held.shape,), []).append(stored_name)
    order = {name: place for place, name in enumerate(index.expected)}
    lacks = [
        Lack(
            pattern,
            shapes,
            frozenset(
                name for stored_name in pattern.members.values() for name in weights[stored_name]
            ),
            meanings(first, weights[first], index.base.layout, index.expected[weights[first][0]]),
        )
        for shapes, names in by_shapes.items()
        for pattern in patterns(names)
        for first in [next(iter(pattern.members.values()))]
    ]
    return sorted(lacks, key=lambda lack: min(order[name] for name in lack.weights))


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
    message = f"the checkpoint lacks {lack.pattern}{_more(len(missing - lack.weights))}; "
    message += f"the file has {spare.pattern}"
    if not pairs and not still_open:
        return (
            f"{message}{_more_of(spares)}, which no format knows, and nothing of that has the "
            "shape of what is missing; the configuration and the weights do not belong together."
        )
    message += " of the same shape, which no format knows"
    message += ": rename it? " if pairs else ". "
    left = [one for one in spares if one not in pairs and one not in still_open]
    if left:
        message += f"{left[0].pattern}{_more_of(left)} fits nothing that is missing. "
    if still_open:
        message += _choices(still_open)
    if not pairs:
        return f"{message}Rename them by `{command} {RENAME_OPTION} OLD=NEW`."
    renames = _renames(pairs, names)
    if len(renames) > MOST:
        message += f"Of {len(renames)} renames these are the first {MOST}. "
    return f"{message}Rename by `{' '.join([command, *map(_as_option, renames[:MOST])])}`."


def _as_option(rename: Rename) -> str:
    """A rename, quoted for a shell."""
    return f"{RENAME_OPTION} {shlex.quote(str(rename))}"


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _more_of(spares: Sequence[Spare]) -> str:
    return _more(sum(len(one.pattern.members) for one in spares[1:]))


def _choices(still_open: Open) -> str:
    """The sentence about pairs that shapes and names leave ambiguous."""
    alike: dict[str, list[str]] = {}
    for spare, lacks in still_open.items():
        among = sentences.some(lack.pattern.text for lack in lacks)
        alike.setdefault(among, []).append(spare.pattern.text)
    groups = [f"which of {among} is {sentences.some(texts)}" for among, texts in alike.items()]
    more = f", nor {len(groups) - GROUPS} times more" if groups[GROUPS:] else ""
    questions = ", nor ".join(groups[:GROUPS])
    return f"Shape and name do not tell {questions}{more}: add a {RENAME_OPTION} for each. "


def _renames(pairs: Mapping[Spare, Lack], names: Collection[str]) -> list[Rename]:
    """The shortest renames of the paired tensors that rename no other tensor."""
    expected = {
        name: lack.pattern.by_numbers[numbers]
        for spare, lack in pairs.items()
        for numbers, name in spare.pattern.by_numbers.items()
    }
    whole = [Rename(spare.pattern.text, lack.pattern.text) for spare, lack in pairs.items()]
    for most in range(_PARTS, -1, -1):
        renames = list(dict.fromkeys(_of_modules(one, most) for one in whole))
        renames.sort(key=lambda one: -one.old.count("."))  # inner names before their modules
        try:
            if new_names(names, renames) == expected:
                return renames
        except CheckpointError:
            continue
    return [Rename(old, new) for old, new in expected.items()]


def _of_modules(rename: Rename, most: int) -> Rename:
    """The same rename without the common last parts of both names.

    Args:
        rename: of tensors.
        most: the number of parts to omit at most.
    """
    old, new = rename.old.split("."), rename.new.split(".")
    while most and len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
        old, new, most = old[:-1], new[:-1], most - 1
    return Rename(".".join(old), ".".join(new))
