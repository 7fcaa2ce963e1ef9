"""Groups of sites that share a phase 1, chosen by the bytes they move.

In vectors of ``T x d`` elements, a group of ``S`` sites whose first has ``n`` finished blocks moves
``(S - 1) (n - 2)`` vectors fewer than as many single passes: each later site reads one answer
instead of ``n`` blocks, and that answer has to be written first (docs/measure/bytes.md).  Blocks
that end inside the group are read by the later sites one by one.  So the sites of one block form a
group, except in the first block, where only the embedding is finished and a group would move more.
Several short blocks form one group together: in Full AttnRes, where every sublayer is a block, a
stage of ``L`` sublayers costs far less than ``L`` vectors a site.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

from attnres_serve.depth.sites import Site

# Memory for the phase-1 answers of a group.  Two groups in a row both hold theirs for a moment.
# The KV cache loses this memory.  A block of 24 sites in five groups still saves 19 of the 23
# reads of its finished blocks.  The last block of an 8B model with eight blocks, with the final
# site, is one group in steps of 8192 tokens.
SCRATCH_BYTES = 640 << 20

Group = tuple[Site, ...]


def phase_1_groups(sites: Sequence[Site], most: int) -> list[Group]:
    """The groups of a pipeline stage's sites that move the fewest bytes.

    Args:
        sites: the mixing sites of the stage, in the order in which they run.
        most: the maximum sites of a group, at least 1, see ``most_sites``.

    Returns:
        The groups, all sites in order.  The sites of a block stay together, except in the first
        block and where they are more than ``most``.
    """
    units = [
        unit
        for number, block in groupby(sites, key=lambda site: site.num_blocks)
        for unit in _cut(tuple(block), most if number > 1 else 1)
    ]
    saved: list[int] = [0]  # by the number of units that are in groups
    groups: list[list[Group]] = [[]]
    for end in range(1, len(units) + 1):
        options = []
        for begin in range(end - 1, -1, -1):
            group = tuple(site for unit in units[begin:end] for site in unit)
            if len(group) > most and begin < end - 1:
                break
            gain = (len(group) - 1) * (group[0].num_blocks - 2)
            options.append((saved[begin] + gain, begin, group))
        best, begin, group = max(options, key=lambda option: option[:2])
        saved.append(best)
        groups.append([*groups[begin], group])
    return groups[-1]


def most_sites(tokens: int, hidden: int, itemsize: int, in_place: bool) -> int:
    """The maximum sites of a group whose answers fit into ``SCRATCH_BYTES``, at least 1.

    Args:
        tokens: the maximum tokens of one step on a worker.
        hidden: hidden size.
        itemsize: bytes of an element of an activation.
        in_place: whether the backend works on a bank.  Then the first site needs no answer, and the
            other answers have the activation dtype.  On separate tensors every site has an answer,
            in float32.
    """
    if in_place:
        return 1 + SCRATCH_BYTES // (tokens * hidden * itemsize)
    return max(1, SCRATCH_BYTES // (tokens * hidden * 4))


def _cut(block: Group, most: int) -> list[Group]:
    """A block in as few pieces as possible, of about equal size."""
    pieces = -(-len(block) // most)
    ends = [len(block) * piece // pieces for piece in range(pieces + 1)]
    return [block[begin:end] for begin, end in pairwise(ends)]
