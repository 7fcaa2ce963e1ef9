"""The benchmark of a model's sites on CPU runs, and both algorithms compute the same."""

import torch
from serving import document_of

from benchmarks.kernels import cpu_stack
from benchmarks.published import tables


def test_both_algorithms_leave_the_same_numbers() -> None:
    """Behind all 48 sites, whose outputs are the next rows, in float32."""
    cell = cpu_stack.Cell(48, 5, 1, "float32")
    left = []
    for algorithm in cpu_stack.ALGORITHMS:
        run, x = cpu_stack.calls(cell, algorithm)
        assert len(run) == 2 * cpu_stack.LAYERS
        cpu_stack.timed(run, None)
        left.append(x)
    # Float32 and four rows: some hundred roundings of 2^-24.
    torch.testing.assert_close(*left, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*left)  # in another order


def test_the_document_has_what_its_table_tells(monkeypatch, tmp_path, capsys) -> None:
    cells = (cpu_stack.Cell(32, 3, 1), cpu_stack.Cell(32, 1, 6, cold=True))
    monkeypatch.setattr(cpu_stack, "CELLS", cells)
    monkeypatch.setattr(cpu_stack, "PASSING", 1 << 12)
    threads = torch.get_num_threads()
    document = document_of(cpu_stack.main, tmp_path / "out.json", capsys, "--rounds", "2")
    torch.set_num_threads(threads)
    (lines,) = tables.of(document)
    assert lines[2].startswith("| 32 | 3 | 48 | bfloat16 | warm | ")
    assert lines[3].startswith("| 32 | 1 | 8 | bfloat16 | cold | ")
