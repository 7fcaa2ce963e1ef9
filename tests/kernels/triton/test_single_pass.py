"""The single pass in Triton: configs, launches, refusals.

``test_backend.py`` asks it what every backend is asked.
"""

import pytest
import torch
from kernel_cases import KEY_EPS, NORM_EPS
from triton_cases import Spy, zeros
from triton_interpreter import DEVICE, ON_GPU

from attnres_serve.kernels.triton import common
from attnres_serve.kernels.triton import single_pass as triton_single_pass
from attnres_serve.kernels.triton.common import MAX_HIDDEN
from attnres_serve.kernels.triton.single_pass import single_pass

pytestmark = pytest.mark.usefixtures("interpreter")


def _arguments(**changes: object) -> dict[str, object]:
    """Valid arguments of a small launch, with changes."""
    generator = torch.Generator().manual_seed(1)
    arguments: dict[str, object] = {
        "delta": torch.randn(4, 96, generator=generator).to(torch.bfloat16).to(DEVICE),
        "bank": torch.randn(4, 5, 96, generator=generator).to(torch.bfloat16).to(DEVICE),
        "query": torch.randn(96, generator=generator).to(DEVICE),
        "norm_weight": torch.randn(96, generator=generator).to(torch.bfloat16).to(DEVICE),
        "row": 3,
        "fresh": False,
        "key_eps": KEY_EPS,
        "norm_eps": NORM_EPS,
    }
    return arguments | changes


def test_one_launch_and_none_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site is one launch of one program per token; no tokens, no launch."""
    monkeypatch.setattr(triton_single_pass, "site_kernel", spy := Spy())
    single_pass(**_arguments())
    assert spy.grids == [(4,)]
    empty = _arguments()
    empty["delta"], empty["bank"] = empty["delta"][:0], empty["bank"][:0]
    assert single_pass(**empty).shape == (0, 96)
    assert spy.grids == [(4,)]


@pytest.mark.parametrize("hidden", [96, 1024, 4096, 7168, MAX_HIDDEN])
def test_few_tokens_have_configs_of_their_own(monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
    """But not where each token is taken alone, and not in a merge."""
    few = triton_single_pass.site_config(hidden, 128, True)
    many = triton_single_pass.site_config(hidden, 129, True)
    assert many == common.config_for(hidden)
    assert (few != many) == (512 < hidden <= 8192) and few.tile >= many.tile
    merges = {triton_single_pass.site_config(hidden, tokens, False) for tokens in (1, 129)}
    assert len(merges) == 1
    monkeypatch.setattr(common, "_each_token_alone", True)
    assert triton_single_pass.site_config(hidden, 128, True) == many


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"weight_dtype": torch.float32},
        {"hidden": 2048},
        {"answers": True},
        {"bias": True},
        {"fresh": True},
        {"early": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_many_tokens_compile_what_few_need(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, object]
) -> None:
    """Once for each kind of launch, and without a launch."""
    monkeypatch.setattr(triton_single_pass, "site_kernel", spy := Spy())
    monkeypatch.setattr(common, "_compiled", set())

    def run(
        tokens: int = 129,
        hidden: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype = torch.bfloat16,
        answers: bool = False,
        bias: bool = False,
        fresh: bool = False,
        early: bool = False,
    ) -> list[tuple[int, ...]]:
        spy.grids.clear()
        monkeypatch.setattr(triton_single_pass, "starts_early", lambda device: early)
        bank = zeros(tokens, 5, hidden, dtype=dtype)
        triton_single_pass.launch(
            *(bank[:, 4].clone(), bank, zeros(hidden, dtype=torch.float32)),
            zeros(hidden, dtype=weight_dtype),
            zeros(1, dtype=torch.float32) if bias else None,
            torch.empty_like(bank[:, 4]),
            answers=(bank.transpose(0, 1), zeros(5, tokens)) if answers else None,
            **{"row": 3, "fresh": fresh, "key_eps": KEY_EPS, "norm_eps": NORM_EPS},
        )
        return spy.grids

    assert run(tokens=128) == [(128,)]
    for kind in ({}, other):
        assert run(**kind) == [(0,), (129,)] and run(**kind) == [(129,)]
        assert run(tokens=128, **kind) == [(128,)]
    assert run() == [(129,)]


REFUSALS = {
    "delta of three dimensions": (
        lambda: {"delta": zeros(4, 1, 96)},
        r"delta must be \[tokens, hidden\] and bank \[tokens, slots, hidden\], not \[4, 1, 96\]",
    ),
    "other tokens": (lambda: {"bank": zeros(3, 5, 96)}, r"bank \[3, 5, 96\] does not fit delta"),
    "other hidden size": (lambda: {"bank": zeros(4, 5, 95)}, "does not fit delta"),
    "hidden size zero": (
        lambda: {"delta": zeros(4, 0), "bank": zeros(4, 5, 0)},
        "hidden size 0 is outside",
    ),
    "hidden size too large": (
        lambda: {"delta": zeros(1, MAX_HIDDEN + 1), "bank": zeros(1, 4, MAX_HIDDEN + 1)},
        f"hidden size {MAX_HIDDEN + 1} is outside 1..{MAX_HIDDEN}",
    ),
    "row behind the bank": (lambda: {"row": 5}, "row 5 is outside the 5 slots of the bank"),
    "negative row": (lambda: {"row": -1}, "row -1 is outside"),
    "integer delta": (lambda: {"delta": zeros(4, 96, dtype=torch.int32)}, "delta is torch.int32"),
    "double delta": (lambda: {"delta": zeros(4, 96, dtype=torch.float64)}, "torch.float64, not"),
    "bank of another dtype": (
        lambda: {"bank": zeros(4, 5, 96, dtype=torch.float16)},
        "bank is torch.float16 but delta is torch.bfloat16",
    ),
    "query not in float32": (lambda: {"query": zeros(96)}, "query is torch.bfloat16; it is fold"),
    "bias of another size": (
        lambda: {"bias": zeros(2, dtype=torch.float32)},
        r"bias is \[2\] torch.float32, not \[1\] torch.float32",
    ),
    "bias in a half": (lambda: {"bias": zeros(1)}, r"bias is \[1\] torch.bfloat16, not"),
    "integer weight": (
        lambda: {"norm_weight": zeros(96, dtype=torch.int8)},
        "norm_weight is torch.int8",
    ),
    "query of another size": (
        lambda: {"query": zeros(95, dtype=torch.float32)},
        r"query is \[95\], not \[96\]",
    ),
    "weight of two dimensions": (
        lambda: {"norm_weight": zeros(1, 96)},
        r"norm_weight is \[1, 96\], not \[96\]",
    ),
    "query elsewhere": (
        lambda: {"query": torch.empty(96, device="meta")},
        f"query is on meta but delta on {DEVICE}",
    ),
    "strided delta": (lambda: {"delta": zeros(4, 192)[:, ::2]}, "delta must have unit stride"),
    "strided bank": (lambda: {"bank": zeros(4, 5, 192)[..., ::2]}, "bank must have unit stride"),
    "strided query": (
        lambda: {"query": zeros(192, dtype=torch.float32)[::2]},
        "query must have unit stride",
    ),
    "expanded bank": (
        lambda: {"bank": zeros(1, 5, 96).expand(4, 5, 96)},
        "bank is written and its rows overlap",
    ),
    "overlapping slots": (
        lambda: {"bank": zeros(4 * 5 * 96).as_strided((4, 5, 96), (480, 95, 1))},
        "bank is written and its rows overlap",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each broken contract is named before anything is launched."""
    changes, sentence = REFUSALS[name]
    monkeypatch.setattr(triton_single_pass, "site_kernel", None)
    kind = TypeError if " is torch." in sentence or "float64" in sentence else ValueError
    kind = ValueError if name.startswith("bias") else kind
    with pytest.raises(kind, match=sentence):
        single_pass(**_arguments(**changes()))


@pytest.mark.skipif(ON_GPU, reason="needs tensors without a Triton backend")
def test_refuses_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names both ways out."""
    monkeypatch.setattr(common, "INTERPRETED", False)
    with pytest.raises(ValueError, match="torch path, or set TRITON_INTERPRET=1 before"):
        single_pass(**_arguments())
