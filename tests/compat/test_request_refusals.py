"""What an engine cannot take is refused before it is queued, on a stand-in of one."""

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from attnres_serve.compat import requests
from attnres_serve.compat.workarounds import ids_without_row, unsendable, worker_limits


def client_of(**config: Any) -> SimpleNamespace:
    """An engine's client, as much of it as refuses requests; ``given`` holds what it queues."""
    given: list[SimpleNamespace] = []
    processor = SimpleNamespace(assign_request_id=given.append)
    own = SimpleNamespace(**config)
    return SimpleNamespace(vllm_config=own, input_processor=processor, given=given)


def refused(client: SimpleNamespace, request: SimpleNamespace, said: str) -> None:
    """Ask an engine what it must refuse as a client's mistake, before it is queued."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=said) as caught:
        client.input_processor.assign_request_id(request)
    assert requests.is_refusal(caught.value) and not client.given


UNSENDABLE: dict[str, dict] = {
    "`priority` has an integer of more than 64 bits": {"priority": 2**64},
    "`priority` has an integer of more": {"priority": -(2**63) - 1},
    "`kv_transfer_params` has an integer": {"extra_args": {"a": [{"b": 2**64}, 1.5]}},
    "`kv_transfer_params` is nested too deep": {"extra_args": json.loads("[" * 900 + "]" * 900)},
}


def request_of(priority: int = 0, **sampling) -> SimpleNamespace:
    """As much of a request as is looked at before it is sent to an engine."""
    params = SimpleNamespace(**{"extra_args": None} | sampling)
    return SimpleNamespace(priority=priority, sampling_params=params)


@pytest.fixture
def usual_recursion() -> Iterator[None]:
    """Python's usual limit, which torch's compiler may have raised in this process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion")
@pytest.mark.parametrize("said", UNSENDABLE)
def test_what_an_engine_cannot_be_sent_is_refused(said):
    client = client_of()
    unsendable.refuse_unsendable(client)

    def send(frames: int) -> None:
        """From as deep as a route is."""
        if frames:
            send(frames - 1)
        else:
            refused(client, request_of(**UNSENDABLE[said]), said)

    send(frames=100)


@pytest.mark.parametrize(
    "asked",
    [
        *({}, {"priority": 2**64 - 1}, {"priority": -(2**63)}, {"extra_args": {"a": [2**64 - 1]}}),
        *({"extra_args": {"a": 1e300}}, {"extra_args": {"a": object}}),
    ],
    ids=str,
)
def test_what_an_engine_can_be_sent_is_not(asked):
    assert unsendable.problem(request_of(**asked)) is None
    assert unsendable.problem(SimpleNamespace(priority=0, sampling_params=None)) is None


BEYOND = {  # one more than there is room for; the model stops at two tokens of its own
    "allowed_token_ids": {"allowed_token_ids": [*range(1025)]},
    "logit_bias": {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    "min_tokens": {"stop_token_ids": [*range(2, 129)], "min_tokens": 1},
    "bad_words": {"bad_words": ["a" * 512, "b" * 513]},
    "max_tokens": {"max_tokens": 2**30 + 1},
    "seed": {"seed": 2**63 - 2, "n": 3},
}

WITHIN: dict[str, dict] = {
    "allowed_token_ids": {"allowed_token_ids": [*range(1024)]},
    "logit_bias": {"logit_bias": dict.fromkeys(range(1024), 1.0)},
    "stops": {"stop_token_ids": [*range(2, 128)], "min_tokens": 1},
    "no min_tokens": {"stop_token_ids": [*range(2, 1000)]},
    "bad_words": {"bad_words": ["a" * 512, "b" * 512]},
    "seed": {"seed": 2**63 - 2, "n": 2},
    "max_tokens": {"max_tokens": 2**30},
    "one answer": {"seed": 2**63 - 1},
    "usual": {},
}


class Letters:
    """A tokenizer of a token for each letter; none is put before a word."""

    max_token_id = 127

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*text.strip().encode()]


def processed(**asked) -> SimpleNamespace:
    """A request as vLLM's input processor leaves it."""
    from vllm import SamplingParams

    sampling = SamplingParams(**asked)
    sampling.update_from_generation_config({"eos_token_id": [0, 1]}, 0)
    sampling.update_from_tokenizer(Letters())
    return SimpleNamespace(sampling_params=sampling)


def engine(second_runner: bool) -> SimpleNamespace:
    client = client_of(use_v2_model_runner=second_runner)
    worker_limits.refuse_beyond_workers(client)
    return client


@pytest.mark.parametrize("name", BEYOND)
def test_what_ends_workers_is_refused(name):
    request = processed(**BEYOND[name])
    refused(engine(second_runner=True), request, name)
    client = engine(second_runner=False)
    client.input_processor.assign_request_id(request)
    assert client.given == [request]


@pytest.mark.parametrize("name", WITHIN)
def test_what_workers_have_room_for_is_not(name):
    request = processed(**WITHIN[name])
    client = engine(second_runner=True)
    client.input_processor.assign_request_id(request)
    client.input_processor.assign_request_id(pooling := SimpleNamespace(sampling_params=None))
    assert client.given == [request, pooling]


WITHOUT_ROW = {
    "Token 320 of the prompt": ([3, 320], {}),
    "Token -1 of the prompt": ([-1], {}),
    "Token 400 of `bad_words`": ([3], {"bad_words_token_ids": [[3], [5, 400]]}),
    "Token 999 of what ends an answer": ([3], {"min_tokens": 1, "all_stop_token_ids": {1, 999}}),
}


def asked_of_320(prompt, **sampling) -> tuple[SimpleNamespace, SimpleNamespace]:
    """An engine of 320 tokens, and a request as vLLM's input processor leaves it."""
    client = client_of(model_config=SimpleNamespace(get_vocab_size=lambda: 320))
    ids_without_row.refuse_ids_without_row(client)
    usual = {"min_tokens": 0, "all_stop_token_ids": {1}, "bad_words_token_ids": None}
    params = SimpleNamespace(**usual | sampling)
    return client, SimpleNamespace(prompt_token_ids=prompt, sampling_params=params)


@pytest.mark.parametrize("said", WITHOUT_ROW)
def test_ids_without_a_row_are_refused(said):
    prompt, sampling = WITHOUT_ROW[said]
    refused(*asked_of_320(prompt, **sampling), said)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([0, 319], {}), (None, {}), ([3], {"all_stop_token_ids": {999}})],
    ids=str,
)
def test_ids_with_a_row_are_not(prompt, sampling):
    client, request = asked_of_320(prompt, **sampling)
    client.input_processor.assign_request_id(request)
    assert client.given == [request]


def test_a_request_is_given_its_id_before_it_is_queued():
    """By the method that is replaced."""
    import inspect

    from vllm.v1.engine.async_llm import AsyncLLM

    _, _, source = inspect.getsource(sys.modules[AsyncLLM.__module__]).partition(" add_request(")
    assert "self.input_processor.assign_request_id(request)" in source
    assert source.index("assign_request_id") < source.index("_add_request(request")
