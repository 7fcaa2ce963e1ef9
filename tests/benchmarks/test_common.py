"""The documents of benchmarks as files: readable by line, with every figure."""

import json

import pytest

from benchmarks.common import RESULTS, json_text

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
