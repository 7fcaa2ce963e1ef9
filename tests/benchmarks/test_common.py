"""The documents of benchmarks as files: readable by line, with every figure; and intervals."""

import json

import pytest

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


def test_the_interval_of_a_median_is_that_of_95_percent():
    """By its order statistics: the median of a sample lies below the 4th of 15 values in 0.4 %, and
    at most there in 3 %."""
    assert median_interval(range(1, 16)) == (4, 12)
