"""What was measured on a GPU: the figures on file, and what is said of them."""

import json
from typing import Any

import pytest

from attnres_serve.model import backend
from benchmarks.common import RESULTS, ROOT
from benchmarks.published import tables

ON_FILE: dict[str, dict[str, Any]] = {
    name: json.loads((RESULTS / f"h100-{name}.json").read_text()) for name in ("kernels", "stack")
}


@pytest.mark.parametrize("name", ON_FILE)
def test_a_document_says_where_it_was_measured(name: str) -> None:
    document = ON_FILE[name]
    assert document["device"].startswith("NVIDIA H100")
    assert {"driver", "cuda", "command", "hardware"} < document.keys()
    assert {"python", "torch", "triton"} < document["versions"].keys()
    assert document["method"]["timed"] and not document.get("quick") and not document["failures"]
    assert document["method"]["rounds"] >= 5
    if name != "stack":
        assert all(row["gate"] <= 1 for row in document["results"])


def test_the_documentation_has_the_rule_of_auto() -> None:
    docs = ROOT / "docs"
    plan = f"{backend.BLOCKS_ON_GPU} blocks of {backend.SUBLAYERS_ON_GPU} sublayers on"
    for page in ("use/operations/limits.md", "measure/gpu.md"):
        text = " ".join((docs / page).read_text().split())
        assert plan in text and f"up to a hidden size of {backend.HIDDEN_ON_GPU}" in text, page


def test_tensor_parallelism_is_reckoned_from_what_was_measured() -> None:
    """Every worker has all sites: what they add is not divided, and the step is."""
    rows = ON_FILE["stack"]["results"]
    first = ("8B", "decode", 1)
    of = {r["connection"]: r for r in rows if (r["shape"], r["name"], r["batch"]) == first}
    step = of["residual"]["us"]["median"]
    added = (of["two_phase_late"]["ratio"] - 1) * step
    page = " ".join((ROOT / "docs" / "use" / "scaling.md").read_text().split())
    norm = tables.by_cell(ON_FILE["kernels"]["results"])[(4096, 8, 4, 1)]["add_rms_norm"]
    each = round(norm["site_us"] - ON_FILE["kernels"]["method"]["launch_us"], 1)
    assert f"(65 x {each} us)" in page
    assert f"[{added:.0f} us of {step / 1000:.2f} ms]" in page
    for more in (added, added + 65 * each):
        shares = [f"{100 * more / (step / workers):.1f}" for workers in (2, 4, 8)]
        assert f"| {', '.join(shares)} % |" in page


def test_vllms_kernel_is_slower_where_that_is_claimed() -> None:
    for (hidden, *_, tokens), found in tables.by_cell(ON_FILE["kernels"]["results"]).items():
        theirs = found["vllm_kimi_k3"]["block_us"]["median"]
        assert found["two_phase"]["block_us"]["median"] < 0.94 * theirs
        most = 0.895 if hidden == 7168 else 1.055
        assert found["single_pass"]["block_us"]["median"] < most * theirs, (hidden, tokens)
