"""The benchmark of the recurrence runs, and its document has what its page tells."""

import json

import pytest
import torch

from benchmarks.kernels import recurrence


def test_a_row_for_every_cell(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(recurrence, "CELLS", [(2, 16, 1), (4, 8, 3)])
    monkeypatch.setattr(recurrence, "STATE", 2**14)
    threads = torch.get_num_threads()
    assert recurrence.main(["--seconds", "0", "--out", str(tmp_path / "out.json")]) == 0
    assert torch.get_num_threads() == threads
    printed, document = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert json.loads(printed) == document
    first, second = document["results"]
    assert (first["heads"], first["state_bytes"]) == (2, 2 * 16 * 16 * 4)
    assert (second["batch"], second["state_bytes"]) == (3, 4 * 8 * 8 * 3 * 4)
    for row in (first, second):
        assert row["microseconds"].keys() == {"memory", "C++", "torch"}
        low, high = row["ratio"]["quartiles"]
        assert 0 < low <= row["ratio"]["median"] <= high
