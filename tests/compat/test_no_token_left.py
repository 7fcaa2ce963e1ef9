"""Requests that forbid every token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnres_serve.compat.workarounds import no_token_left
from attnres_serve.compat.workarounds.no_token_left import REASON

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.sampler import Sampler

from tests.compat.test_refused_requests import asked

ROWS, END = 16, 2  # tokens of the vocabulary, and the one that ends an answer
GRAMMAR = StructuredOutputsParams(regex="a+")


def params(words: list[list[int]] = (), **asked: Any) -> SamplingParams:
    """As vLLM's input processor leaves them, with bad words as tokens."""
    result = SamplingParams(max_tokens=10, **asked)
    result.update_from_generation_config({}, END)
    result._bad_words_token_ids = [*words] or None
    return result


def test_vllm_samples_a_token_though_all_are_forbidden() -> None:
    current_platform.import_kernels()
    assert Sampler.greedy_sample(torch.full((1, ROWS), float("-inf"))).tolist() == [0]


CONTRADICTIONS = {
    "`allowed_token_ids` and `bad_words`": {"allowed_token_ids": [5, 6], "words": [[5], [6], [7]]},
    "`allowed_token_ids` and `min_tokens`": {"allowed_token_ids": [END], "min_tokens": 1},
    "`bad_words` and `min_tokens`": {
        "words": [[n] for n in range(ROWS) if n != END],
        "min_tokens": 1,
    },
    "`bad_words` leaves no token": {"words": [[n] for n in range(ROWS)]},
    "`allowed_token_ids` and `min_tokens` leave": {
        "allowed_token_ids": [9, END],
        "stop_token_ids": [9],
        "min_tokens": 3,
        "ignore_eos": True,
    },
    "`allowed_token_ids` and `bad_words` and `min_tokens` leave": {
        "allowed_token_ids": [5, END],
        "words": [[5]],
        "min_tokens": 3,
    },
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_what_a_request_shows_is_refused(message: str) -> None:
    result = no_token_left.problem(params(**CONTRADICTIONS[message]), ROWS)
    assert result is not None and result.startswith(message) and result.endswith("fields out.")


POSSIBLE = (
    {},
    {"allowed_token_ids": [5, 6], "words": [[5]]},
    {"allowed_token_ids": [5], "words": [[5, 5]]},
    {"allowed_token_ids": [END]},
    {"allowed_token_ids": [5, END], "min_tokens": 4},
    {"allowed_token_ids": [END], "min_tokens": 4, "structured_outputs": GRAMMAR},
    {"words": [[n] for n in range(1, ROWS)]},
    {"min_tokens": 4},
)


@pytest.mark.parametrize("asked", POSSIBLE, ids=str)
def test_what_leaves_a_token_is_not_refused(asked: dict[str, Any]) -> None:
    assert no_token_left.problem(params(**asked), ROWS) is None
    assert no_token_left.problem(None, ROWS) is None


class Grammar:
    """A manager of grammars, whose one grammar permits tokens from 5 to 9 until the end."""

    def __init__(self, ended: bool = False) -> None:
        self.ended = ended

    def is_terminated(self) -> bool:
        return self.ended

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        count = 0
        while count < len(tokens) and 5 <= tokens[count] <= 9:
            count += 1
        return tokens[: count + (count < len(tokens) and tokens[count] == END)]


FORBIDDEN, STOPPED = RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED
# What is sampled, what was before, what is asked, how many of the tokens are kept, and its end.
STEPS = (
    ([0], (), {"allowed_token_ids": [5, 6]}, 0, FORBIDDEN),
    ([5, 0], (5,), {"allowed_token_ids": [5, 6]}, 1, FORBIDDEN),
    ([0], (), {"words": [[0]]}, 0, FORBIDDEN),
    ([6], (5,), {"words": [[5, 6]]}, 0, FORBIDDEN),
    ([5, 6, 7], (9,), {"words": [[9, 5, 6]]}, 1, FORBIDDEN),
    ([END], (), {"min_tokens": 2}, 0, FORBIDDEN),
    ([5, END], (), {"min_tokens": 2}, 1, FORBIDDEN),
    ([7], (5,), {"min_tokens": 2, "stop_token_ids": [7]}, 0, FORBIDDEN),
    ([0], (), {"structured_outputs": GRAMMAR}, 0, FORBIDDEN),
    ([6, 6, 0], (5,), {"structured_outputs": GRAMMAR}, 2, FORBIDDEN),
    ([6], (), {"structured_outputs": GRAMMAR, "allowed_token_ids": [3]}, 0, FORBIDDEN),
    ([5, END, 0], (), {"allowed_token_ids": [5, END]}, 2, STOPPED),
    ([5, 6, END], (), {"min_tokens": 2}, 3, STOPPED),
    ([5, END, 0], (), {"structured_outputs": GRAMMAR}, 2, STOPPED),
    ([END], (), {"structured_outputs": GRAMMAR, "min_tokens": 3}, 1, STOPPED),
    ([5], (), {"allowed_token_ids": [5, 6]}, 1, None),
    ([6], (4,), {"words": [[5, 6]]}, 1, None),
    ([6, 5], (), {"words": [[5, 6]]}, 2, None),
    ([5], (), {"min_tokens": 2}, 1, None),
    ([5, 6], (), {"structured_outputs": GRAMMAR}, 2, None),
    ([0], (), {"structured_outputs": GRAMMAR, "ended": True}, 1, None),
    ([0], (), {}, 1, None),
    ([0], (), {"allowed_token_ids": [5], "config": {}}, 1, None),  # of another model
)


@pytest.mark.parametrize(("tokens", "past", "asked", "kept", "end"), STEPS, ids=str)
def test_an_answer_ends_before_a_forbidden_token(
    tokens, past, asked, kept, end, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that stops before it, or goes on, has no reason of ours."""
    name = "_update_request_with_output"
    monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))
    for _ in range(2):  # idempotent
        no_token_left.PATCH.apply()
    asked = {"ended": False, "config": {"attn_res_config": {}}} | asked
    grammar, model = Grammar(asked.pop("ended")), SimpleNamespace(**asked.pop("config"))
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=model))
    scheduler: Any = SimpleNamespace(max_model_len=64, vllm_config=config)
    scheduler.structured_output_manager = grammar
    request: Any = Request("name", [3], params(**asked), None)
    if request.structured_output_request is not None:
        request.structured_output_request.grammar = grammar
    request.append_output_token_ids([*past])
    result, stopped = getattr(Scheduler, name)(scheduler, request, [*tokens])
    assert stopped == (end is not None) and result == tokens[:kept]
    assert [*request.output_token_ids] == [*past, *tokens[:kept]]
    assert request.stop_reason == (REASON if end == FORBIDDEN else None)
    assert end in (None, request.status)


def client_of(reasons: list[str | None], closed: list[bool]) -> SimpleNamespace:
    """A client of an engine that answers an output for each ``stop_reason``."""

    async def generate(prompt, sampling_params, request_id):
        try:
            for reason in reasons:
                answers = [SimpleNamespace(stop_reason=None), SimpleNamespace(stop_reason=reason)]
                yield SimpleNamespace(outputs=answers)
        finally:
            closed.append(True)

    return SimpleNamespace(generate=generate)


FIELDS = {
    "`allowed_token_ids` and `bad_words` leave no token to go on": {
        "allowed_token_ids": [5],
        "bad_words": ["a"],
    },
    "`min_tokens` leaves no token to go on": {"min_tokens": 3},
    "the grammar (`structured_outputs`": {"structured_outputs": GRAMMAR},
}


@pytest.mark.parametrize("message", FIELDS)
def test_a_client_is_told_of_an_answer_that_ended_so(message: str) -> None:
    closed: list[bool] = []
    client = client_of([None, REASON, None], closed)
    no_token_left.CLIENT.apply_to(client)
    with pytest.raises(VLLMValidationError) as caught:
        asked(client, params(**FIELDS[message]))
    assert message in str(caught.value) and caught.value.parameter in message and closed == [True]


def test_other_answers_come_as_they_are() -> None:
    client = client_of([None, "stop", None], [])
    no_token_left.CLIENT.apply_to(client)
    assert asked(client, params(allowed_token_ids=[5])) == 3
    assert asked(client, params()) == 3
