"""Sums of weights over sequences, against numpy on random weights."""

import numpy as np
import pytest

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.tracing.statistics import BINS, of_site, sums

SITES = sites(AttnResSpec.uniform(Layout.of(3), 2, 1e-6))
DIGITS = 1e-5  # six digits of an answer


def drawn(tokens: int, sources: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([0.3] * sources, tokens).astype(np.float32)


@pytest.mark.parametrize("lengths", [[(7, 5)], [(1, 0), (0, 3)], [(9, 2), (64, 1), (3, 33)]])
@pytest.mark.parametrize("site", [SITES[0], SITES[3], SITES[-1]], ids=lambda site: site.name)
def test_equals_numpy(site, lengths):
    """Several sequences, prompt and answer apart, as if all tokens stood in one table."""
    tables = [
        drawn(sum(both), site.num_sources, seed) for seed, both in enumerate(lengths)
    ]  # fmt: skip
    total = sum(sums(table, both[0]) for table, both in zip(tables, lengths, strict=True))
    prefill, decode = np.sum(lengths, axis=0)
    found = of_site(site, total, {"prefill": prefill, "decode": decode})
    assert found.sources == site.sources and found.index == site.index
    parts = {
        "prefill": [table[:prompt] for table, (prompt, _) in zip(tables, lengths, strict=True)],
        "decode": [table[prompt:] for table, (prompt, _) in zip(tables, lengths, strict=True)],
    }
    for name, rows in parts.items():
        phase, own = getattr(found, name), np.concatenate(rows).astype(np.float64)
        if not len(own):
            assert phase is None
            continue
        np.testing.assert_allclose(phase.mean, own.mean(0), rtol=DIGITS)
        np.testing.assert_allclose(phase.second_moment, (own**2).mean(0), rtol=DIGITS)
        entropy = -np.where(own > 0, own * np.log(np.maximum(own, 1e-300)), 0).sum(1)
        assert phase.entropy == pytest.approx(entropy.mean(), rel=DIGITS, abs=1e-12)
        for column, counts in enumerate(phase.histogram):
            np.testing.assert_array_equal(counts, np.histogram(own[:, column], BINS, (0, 1))[0])
        assert np.sum(phase.histogram, 1).tolist() == [len(own)] * site.num_sources


def test_the_ends_of_bins():
    """Zero is in the first one, one in the last, and what stands between two in the upper one."""
    weights = np.array([[0, 1], [1 / 16, 15 / 16], [1, 0]], np.float32)
    found = sums(weights, 3)[0, :, 3:]
    assert found[0].nonzero()[0].tolist() == [0, 1, 15]
    assert found[1].nonzero()[0].tolist() == [0, 15] and found[1][15] == 2


def test_sums_are_wide():
    """A million tokens of 0.1 lose nothing, which a float32 sum would."""
    weights = np.full((10**6, 2), 0.1, np.float32)
    assert sums(weights, 0)[1, 0, 0] == pytest.approx(10**6 * float(np.float32(0.1)), rel=1e-12)
