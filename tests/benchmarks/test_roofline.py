"""The roofline of a model's sites: its bounds, and the document that has it."""

import pytest
from serving import document_of

pytest.importorskip("vllm")

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import cpu_stack, roofline
from benchmarks.published import tables


@pytest.mark.parametrize("algorithm", cpu_stack.ALGORITHMS)
def test_bytes_and_multiply_adds_of_full_attnres(algorithm: str) -> None:
    """Two layers: the site before sublayer 2 reads two rows, the last one five."""
    tokens, hidden = 3, 64
    cell = cpu_stack.Cell(hidden, tokens, 1, "float32", layers=2)
    contexts = cpu_stack.contexts_of(cell, algorithm)
    moved, multiply_adds = roofline.work(contexts, cell)
    assert multiply_adds == 2 * (2 + 3 + 4 + 5) * tokens * hidden
    # A site of its own reads the rows before its own and delta, and writes its row and the result.
    vectors = 4 + 5 + 6 + 7
    answers = sum(one.position > 0 for one in contexts)
    assert bool(answers) == (algorithm == "two_phase")
    if algorithm == "two_phase":  # one group of two: 3 finished rows are one answer, written, read
        assert [one.group for one in contexts] == [1, 1, 2, 2]
        vectors += 2 - 4
    queries = 4 * 2 * hidden * 4  # with the norm's weight
    log_sums = 2 * answers * tokens * 4
    phase_1 = answers * hidden * 4  # the query of the later site is read twice
    assert moved == vectors * tokens * hidden * 4 + queries + log_sums + phase_1


def test_the_document_has_what_its_table_tells(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(roofline, "SHAPES", (roofline.Shape(16, 8, 1), roofline.Shape(2, 8, 2)))
    monkeypatch.setattr(roofline, "PRODUCT", 64)
    monkeypatch.setattr(cpu_stack, "PASSING", 1 << 12)
    words = ("--tokens", "1", "128", "--rounds", "2")
    document = document_of(kernels.main, tmp_path / "out.json", capsys, *words)
    assert document["command"].startswith("python -m benchmarks.kernels --tokens 1 128")
    rows = document["results"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        bounds = row["memory_us"], row["arithmetic_us"]
        assert row["ratio"] == pytest.approx(row["us"] / max(bounds)) and min(bounds) > 0
    assert [row["algorithm"] for row in rows] == ["two_phase"] * 4 + ["single_pass"] * 4
    (lines,) = tables.of(document)
    assert lines[2].startswith("| Full, 16 x 8 | decode | 1 | bfloat16 | two-phase | ")
    assert lines[-1].startswith("| Block of 2, 2 x 8 | prefill | 128 | float32 | single pass | ")
