"""Which of the tensors that a checkpoint lacks others may be, by shapes and the words of names.

A guess is never acted on, but printed for whoever knows the model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnres_serve.checkpoints.renaming.likeness import Words, contradict, shared
from attnres_serve.checkpoints.renaming.patterns import Pattern
from attnres_serve.families.family import Shape


@dataclass(frozen=True, eq=False)
class Spare:
    """Tensors of one shape that no format knows, by a pattern of their names."""

    pattern: Pattern
    shape: Shape
    words: Words


@dataclass(frozen=True, eq=False)
class Lack:
    """Tensors that a checkpoint lacks, by a pattern of the names that its format has for them.

    Attributes:
        pattern: of the names.
        shapes: those that each may have.
        weights: the house names of what they hold.
        meanings: what they may be called, in words.
    """

    pattern: Pattern
    shapes: tuple[Shape, ...]
    weights: frozenset[str]
    meanings: list[Words]

    def may_be(self, spare: Spare) -> bool:
        """Whether shape, numbers and words let tensors be these."""
        return (
            spare.shape in self.shapes
            and spare.pattern.by_numbers.keys() == self.pattern.by_numbers.keys()
            and (None in (layers := {spare.pattern.layer, self.pattern.layer}) or len(layers) == 1)
            and not contradict(spare.words, self.meanings)
        )


Open = dict[Spare, list[Lack]]


def guess(spares: Iterable[Spare], lacks: Sequence[Lack]) -> tuple[dict[Spare, Lack], Open]:
    """What tensors are by shapes and names, and for which of them several answers are left."""
    still_open = {spare: [lack for lack in lacks if lack.may_be(spare)] for spare in spares}
    pairs: dict[Spare, Lack] = {}
    while found := _clear_pair(still_open):
        spare, lack = found
        pairs[spare] = lack
        del still_open[spare]
        for other, among in still_open.items():
            still_open[other] = [one for one in among if not one.weights & lack.weights]
    return pairs, {spare: among for spare, among in still_open.items() if among}


def _clear_pair(still_open: Open) -> tuple[Spare, Lack] | None:
    """A pair that is alone in its shape, or alike in a word in which no other pair of its is."""
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
    ours, in_common = shared(pair[0].words, pair[1].meanings)
    theirs, also_in_common = shared(other[0].words, other[1].meanings)
    return ours > theirs and not in_common <= also_in_common
