"""Guesses which unknown tensors are those that a checkpoint lacks, by shapes and name parts.

Guesses are only printed, for people who know the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnres_serve.checkpoints.renaming.likeness import Words, best_likeness, contradicts_all
from attnres_serve.checkpoints.renaming.patterns import Pattern
from attnres_serve.families.family import Shape


@dataclass(frozen=True, eq=False)
class Spare:
    """Unknown tensors of one shape, by a pattern of their names."""

    pattern: Pattern
    shape: Shape
    name_words: Words


@dataclass(frozen=True, eq=False)
class Lack:
    """Tensors that a checkpoint lacks, by a pattern of their names in its format.

    Attributes:
        pattern: of the names.
        shapes: allowed shapes of each tensor.
        weights: the house names of the weights in them.
        meanings: possible names, as sets of words.
    """

    pattern: Pattern
    shapes: tuple[Shape, ...]
    weights: frozenset[str]
    meanings: list[Words]

    def may_be(self, spare: Spare) -> bool:
        """Whether shape, numbers and name allow unknown tensors to be these."""
        return (
            spare.shape in self.shapes
            and spare.pattern.by_numbers.keys() == self.pattern.by_numbers.keys()
            and (None in (layers := {spare.pattern.layer, self.pattern.layer}) or len(layers) == 1)
            and not contradicts_all(spare.name_words, self.meanings)
        )


Open = dict[Spare, list[Lack]]


def guess(spares: Iterable[Spare], lacks: Sequence[Lack]) -> tuple[dict[Spare, Lack], Open]:
    """The clear pairs of unknown and lacking tensors, and the ambiguous ones."""
    still_open = {spare: [lack for lack in lacks if lack.may_be(spare)] for spare in spares}
    pairs: dict[Spare, Lack] = {}
    while pair := _clear_pair(still_open):
        spare, lack = pair
        pairs[spare] = lack
        del still_open[spare]
        for other, among in still_open.items():
            still_open[other] = [one for one in among if not one.weights & lack.weights]
    return pairs, {spare: among for spare, among in still_open.items() if among}


def _clear_pair(still_open: Open) -> tuple[Spare, Lack] | None:
    """A pair that is unique by shape, or shares a word that no competing pair shares."""
    for spare, among in still_open.items():
        for lack in among:
            others = [(spare, one) for one in among if one is not lack]
            others += [
                (one, lack) for one, its in still_open.items() if one is not spare and lack in its
            ]
            if all(_is_likelier((spare, lack), pair) for pair in others):
                return spare, lack
    return None


def _is_likelier(pair: tuple[Spare, Lack], other: tuple[Spare, Lack]) -> bool:
    ours, in_common = best_likeness(pair[0].name_words, pair[1].meanings)
    theirs, also_in_common = best_likeness(other[0].name_words, other[1].meanings)
    return ours > theirs and not in_common <= also_in_common
