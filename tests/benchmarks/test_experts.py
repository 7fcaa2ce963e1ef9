"""The benchmark of experts on CPU runs, and what it compares is of the same size and routes."""

import pytest
import torch
from serving import document_of

pytest.importorskip("vllm")

from attnres_serve.kernels.cpp import backend as cpp
from benchmarks.kernels import experts
from benchmarks.published import tables


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_compute_the_same_where_the_bound_is_far(dtype, monkeypatch) -> None:
    """SiTU is SiLU then.

    vLLM's rounds to bfloat16, by 2^-9, what goes into each of two products and what comes out of
    them; a processor may lose two bits more.  Numbers are of size one.
    """
    cpp.prepare()
    monkeypatch.setattr(experts, "SITU_BOUNDS", (1e4, None))
    cell = experts.Cell(5, 8, 2, 64, 96, dtype)
    ours, theirs = (run().float().clone() for run in experts.make_calls(cell).values())
    torch.testing.assert_close(ours, theirs, rtol=3 * 2**-7, atol=3 * 2**-7)
    assert float(ours.norm()) > 1


def test_the_document_has_what_its_table_tells(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(experts, "CELLS", (experts.Cell(3, 4, 2, 64, 32),))
    threads = torch.get_num_threads()
    document = document_of(experts.main, tmp_path / "out.json", capsys, "--rounds", "2")
    torch.set_num_threads(threads)
    (lines,) = tables.of(document)
    assert lines[2].startswith("| 3 | 4 | 2 | 64 | 32 | bfloat16 | ")
