"""Groups of sites that share a phase 1, against every partition there is."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres_serve.depth import groups as site_groups
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import Site, sites
from attnres_serve.depth.spec import AttnResSpec


def stage(spec: AttnResSpec, first: int = 0) -> list[Site]:
    return [site for site in sites(spec) if site.index > first and site.mixes]


def vectors(group: tuple[Site, ...]) -> int:
    """What a group reads and writes, counted site by site: see docs/measure/bytes.md."""
    first, *later = group
    # Before the first site: the finished blocks but the one it completes itself.
    earlier = first.num_blocks - first.opens_block
    total = earlier + 4 + len(later)  # old sum, output of the sublayer; new sum, result, answers
    for site in later:
        total += site.num_sources - 1 - first.num_blocks + 5  # blocks since, and its answer
    return total


def blocks_of(chosen: list[Site]) -> list[list[Site]]:
    """Those of the first block one by one."""
    cuts = [i for i, site in enumerate(chosen) if site.opens_block or site.num_blocks == 1]
    cuts = [*{0, *cuts, len(chosen)}]
    cuts.sort()
    return [chosen[begin:end] for begin, end in pairwise(cuts)]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.data())
def test_no_partition_that_keeps_blocks_together_moves_fewer_bytes(
    layers: int, data: st.DataObject
) -> None:
    rest = data.draw(st.sets(st.integers(1, 2 * layers - 1)))
    spec = AttnResSpec(Layout.of(layers), (0, *sorted(rest)), 1e-6)
    chosen = stage(spec, data.draw(st.integers(0, 1)))
    groups = site_groups.phase_1_groups(chosen, most=99)
    assert [site for group in groups for site in group] == chosen
    units = blocks_of(chosen)
    partitions = [
        [
            tuple(site for unit in units[begin:end] for site in unit)
            for begin, end in pairwise((0, *cuts, len(units)))
        ]
        for count in range(len(units))
        for cuts in combinations(range(1, len(units)), count)
    ]
    least = min(sum(map(vectors, partition)) for partition in partitions)
    assert sum(map(vectors, groups)) == least
    for group in groups:
        alone = sum(vectors((site,)) for site in group)
        assert alone - vectors(group) == (len(group) - 1) * (group[0].num_blocks - 2)


def test_the_usual_blocks_are_the_groups() -> None:
    """Eight blocks over 28 layers: as the paper has it."""
    chosen = stage(AttnResSpec(Layout.of(28), tuple(range(0, 56, 7)), 1e-6))
    groups = [list(group) for group in site_groups.phase_1_groups(chosen, 99)]
    assert groups == blocks_of(chosen)
    assert [len(group) for group in groups] == [1] * 6 + [7] * 6 + [8]


@pytest.mark.parametrize("sublayers", [64, 128])
def test_full_attnres_costs_far_less_than_its_depth(sublayers: int) -> None:
    """Not L / 2 vectors a site but about sqrt(L): a phase 1 now and then, and the blocks since."""
    chosen = stage(AttnResSpec(Layout.of(sublayers // 2), tuple(range(sublayers)), 1e-6))
    single = sum(vectors((site,)) for site in chosen)
    groups = site_groups.phase_1_groups(chosen, most=99)
    assert sum(map(vectors, groups)) < single * {64: 0.32, 128: 0.22}[sublayers]
    assert max(map(len, groups)) < 30


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_a_budget_cuts_blocks_into_pieces_of_about_one_size(most: int) -> None:
    chosen = stage(AttnResSpec(Layout.of(12), (0, 1, 8, 20), 1e-6))
    groups = site_groups.phase_1_groups(chosen, most)
    assert [site for group in groups for site in group] == chosen
    assert max(map(len, groups)) <= most
    if most == 5:
        assert sorted(len(group) for group in groups if group[0].num_blocks == 3) == [4, 4, 4]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_budget(in_place: bool) -> None:
    """The answers of a group fit, and one more would not."""
    tokens, hidden = 8192, 4096
    for itemsize in (2, 4):
        most = site_groups.most_sites(tokens, hidden, itemsize, in_place)
        answer = tokens * hidden * (itemsize if in_place else 4)
        assert (most - in_place) * answer <= site_groups.SCRATCH_BYTES
        assert (most - in_place + 1) * answer > site_groups.SCRATCH_BYTES
    assert site_groups.most_sites(1 << 20, hidden, 2, in_place) == 1
