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
    """By order: the median of a sample of 27 values is above the 8th of them in 98.7 %, and above
    the 9th in 96.4 %."""
    assert median_interval(range(1, 28)) == (9, 19)
