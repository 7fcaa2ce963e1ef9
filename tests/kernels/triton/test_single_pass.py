"""The single pass in Triton: configs, and what is compiled.

``test_backend.py`` asks it what every backend is asked.
"""

import pytest
import torch
from kernel_cases import KEY_EPS, NORM_EPS
from triton_cases import Spy, zeros

from attnres_serve.kernels.triton import common
from attnres_serve.kernels.triton import single_pass as triton_single_pass
from attnres_serve.kernels.triton.common import MAX_HIDDEN

pytestmark = pytest.mark.usefixtures("interpreter")


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
