"""How far a model is from what a checkpoint's expected.json says."""

from collections.abc import Sequence
from typing import Any

from attnres_serve.verify.oracle.model import Model


def agreement(model: Model, cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Largest differences from `cases` (the list in an expected.json).

    `logprob` is over all prompt and generated log-probabilities, `excess` the same as a multiple of
    the bound 1e-4 + 2e-5 * |logprob|, `gap` over the leads of the greedy choices; `tokens` counts
    the agreeing greedy tokens up to a choice whose lead is below 2e-3, `of` those looked at.
    """
    worst = {"logprob": 0.0, "excess": 0.0, "gap": 0.0, "tokens": 0, "of": 0}
    for case in cases:
        prompt, output = case["prompt"], case["output"]
        table = model.logprobs(prompt + output)[:-1]
        wanted = case["prompt_logprobs"][1:] + case["output_logprobs"]
        for row, token, want in zip(table, (prompt + output)[1:], wanted, strict=True):
            difference = abs(row[token].item() - want)
            worst["logprob"] = max(worst["logprob"], difference)
            worst["excess"] = max(worst["excess"], difference / (1e-4 + 2e-5 * abs(want)))
        generated = table[len(prompt) - 1 :]
        top = generated.topk(2).values
        for lead, want in zip((top[:, 0] - top[:, 1]).tolist(), case["output_gap"], strict=True):
            worst["gap"] = max(worst["gap"], abs(lead - want))
        sure = next((i for i, gap in enumerate(case["output_gap"]) if gap < 2e-3), len(output))
        tokens, _, _ = model.greedy(prompt, sure)
        worst["tokens"] += sum(a == b for a, b in zip(tokens, output, strict=False))
        worst["of"] += sure
    return worst
