"""The documents of benchmarks as files: readable by line, with every figure; and intervals."""

import json
from statistics import median

import numpy as np
import pytest

from attnres_serve.bench.ratios import paired_ratios
from benchmarks.common import RESULTS, json_text, median_interval

DOCUMENTS = sorted(RESULTS.glob("*.json"))


def test_an_item_of_a_list_is_a_line():
    document = {
        "hardware": {"cores": 2, "flags": ["a", "b"]},
        "results": [{"rounds": [1.5, 2.5], "shape": {"layers": 3}}, {"rounds": []}],
        "empty": {},
    }
    assert json_text(document).splitlines() == [
        "{",
        ' "hardware": {',
        '  "cores": 2,',
        '  "flags": ["a", "b"]',
        " },",
        ' "results": [',
        '  {"rounds": [1.5, 2.5], "shape": {"layers": 3}},',
        '  {"rounds": []}',
        " ],",
        ' "empty": {}',
        "}",
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_results_are_written_compactly(path):
    text = path.read_text()
    assert text == json_text(json.loads(text)) + "\n"


def noisy(rng: np.random.Generator, ratio: float, rounds: int = 15) -> list[float]:
    """Ratios of two engines, log-normal noise of 3 %, on a machine that slows down threefold."""
    drift = np.linspace(1, 3, rounds)
    noise = np.exp(0.03 * rng.standard_normal((2, rounds)))
    return paired_ratios((ratio * drift * noise[0]).tolist(), (drift * noise[1]).tolist())


def test_the_interval_covers_a_known_ratio_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        ratios = noisy(rng, 1.05)
        low, high = median_interval(ratios, resamples=1000)
        covered.append(low <= 1.05 <= high)
        assert low <= median(ratios) <= high
        assert high - low < 0.15  # the drift, common to both, does not widen it
    # The percentile interval of a median of 15 covers 92 to 97 %; three standard errors around it.
    assert 0.88 < np.mean(covered) < 0.995
