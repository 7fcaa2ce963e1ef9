"""Temperature, top-k and top-p of drafted tokens on CPU."""

from types import SimpleNamespace

import pytest
import torch

from attnres_serve.compat.workarounds import draft_sampling

pytest.importorskip("vllm")

from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

NAME = "expand_batch_to_tokens"
TEMPERATURES = {
    "sampled": [0.01, 3.0, 0.7],
    "greedy beside sampled": [0.0, 0.7, 0.0],
    "one request": [0.25],
}


@pytest.mark.parametrize("chosen", [(), ("top_k",), ("top_p",), ("top_k", "top_p")])
@pytest.mark.parametrize("temperatures", TEMPERATURES.values(), ids=TEMPERATURES)
def test_every_draft_is_judged_by_its_requests_parameters(
    temperatures: list[float], chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection_sampler, NAME, getattr(rejection_sampler, NAME))
    draft_sampling.PATCH.apply()
    drafts = torch.tensor([2, 0, 3][-len(temperatures) :])
    every = {
        "top_k": torch.tensor([2, 5, 8], dtype=torch.int32),
        "top_p": torch.tensor([0.5, 0.9, 1.0]),
    }
    limits = {name: every[name][: len(temperatures)] if name in chosen else None for name in every}
    logits, given = torch.randn(int(drafts.sum()), 8), torch.tensor(temperatures)
    asked = SimpleNamespace(all_greedy=False, temperature=given, **limits)
    result = rejection_sampler.apply_sampling_constraints(
        logits.clone(), drafts.cumsum(0).int(), asked
    )
    of = torch.arange(len(temperatures)).repeat_interleave(drafts)  # the request of each
    divided = logits / given.where(given != 0, 1.0)[of, None]
    own = [None if limit is None else limit[of] for limit in limits.values()]
    torch.testing.assert_close(result, apply_top_k_top_p(divided, *own))
