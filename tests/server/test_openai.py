"""OpenAI's own client: what it asks is answered as by any other server, or refused."""

import json
from itertools import pairwise
from statistics import fmean

import pytest
from demo_servers import CONTEXT, NAMES
from faults import until
from openai import NotFoundError, OpenAI
from serving import DEMO

from attnres_serve.checkpoints import tokenizer
from attnres_serve.verify import oracle

pytestmark = pytest.mark.engine

PROMPT = "import os\n\n\ndef "
ASK = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
CHAT = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}


@pytest.fixture(scope="module")
def server(open_server):
    return open_server


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def greedy(client) -> str:
    return client.completions.create(**ASK).choices[0].text


# --- completions


def test_likelihoods_as_lm_eval_asks_for_them(client):
    """Its whole tasks are in ``test_conformance.py``; the answer may be rounded to bfloat16.

    How much that changes depends on the processor, but a list that begins a token too early or too
    late is off by as much as neighbours differ: a fourth of it is allowed.
    """
    ids = tokenizer.load(DEMO)("def add(a, b):\n    return a + b\n").input_ids
    ask = {"model": "demo", "prompt": [ids], "temperature": 0, "seed": 1234}
    (choice,) = client.completions.create(**ask, max_tokens=1, logprobs=1, echo=True).choices
    first, *said = choice.logprobs.token_logprobs[: len(ids)]
    rows = oracle.load(DEMO).logprobs(ids)
    wanted = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
    far = fmean(abs(one - other) for one, other in pairwise(wanted)) / 4
    assert first is None and said == pytest.approx(wanted, abs=far)
    greedy = [max(top.values()) for top in choice.logprobs.top_logprobs[1 : len(ids)]]
    assert greedy == pytest.approx(rows[:-1].max(-1).values.tolist(), abs=far)


def test_streams_end_with_usage(client, greedy):
    options = {"include_usage": True, "continuous_usage_stats": False}
    chunks = list(client.completions.create(**ASK, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == greedy
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 12


# --- chat


def test_a_schema_binds_the_answer(client):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    answer = client.chat.completions.create(
        **CHAT | {"max_completion_tokens": 60}, response_format=wanted
    )
    assert json.loads(answer.choices[0].message.content)["name"] in ("a", "b")


def test_fields_that_are_not_read_are_ignored_and_told_of_once(client, server, greedy):
    caller = {"user": "someone", "safety_identifier": "x", "prompt_cache_key": "y"}
    usual = {"store": False, "service_tier": "auto", "modalities": ["text"], "metadata": {"a": "b"}}
    assert client.chat.completions.create(**CHAT, **caller, **usual).choices
    dropped = {"frobnicate": [1, {"a": 2}], "max_token": 3}
    for _ in range(2):
        answer = client.completions.create(**ASK, best_of=2, extra_body=dropped)
        assert answer.choices[0].text == greedy
    client.completions.create(**ASK, extra_body={"the_last_one": 4})
    until(lambda: "has the field 'the_last_one'" in server.log.read_text(), 60)
    lines = server.log.read_text().splitlines()
    for name in ("best_of", *dropped):
        assert len([line for line in lines if f"has the field '{name}'" in line]) == 1


# --- responses


ASK_RESPONSES = {
    "model": "demo",
    "input": MESSAGES[0]["content"],
    "temperature": 0,
    "max_output_tokens": 12,
}


def test_responses_whole_and_streamed(client):
    """Instructions are a message more."""
    whole = client.responses.create(**ASK_RESPONSES)
    assert whole.output_text and whole.usage.output_tokens == 12
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = client.responses.create(**ASK_RESPONSES, stream=True)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text  # a busy server may send several at a time
    more = client.responses.create(**ASK_RESPONSES, instructions="class A:")
    assert more.usage.input_tokens > whole.usage.input_tokens


# --- the rest of the API


def missing(name: str) -> str:
    return f"The model `{name}` does not exist; there is {', '.join(f'`{one}`' for one in NAMES)}."


def test_models_and_what_is_not_there(client):
    assert [model.id for model in client.models.list()] == NAMES
    for call in (
        lambda: client.completions.create(**ASK | {"model": "nobody"}),
        lambda: client.embeddings.create(model="demo", input="x"),
    ):
        with pytest.raises(NotFoundError) as caught:
            call()
        if caught.value.param == "model":
            assert caught.value.body["message"] == missing("nobody")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_retrieved_as_it_is_listed(client, name):
    """But for what vLLM draws anew for every answer."""
    (listed,) = (model for model in client.models.list() if model.id == name)
    drawn = {"created", "permission"}
    found = client.models.retrieve(name)
    assert found.model_dump(exclude=drawn) == listed.model_dump(exclude=drawn)
    assert found.object == "model" and found.root and found.max_model_len == CONTEXT


@pytest.mark.parametrize("name", ["nobody", "demo/", "Demo", "a/b.c/d e", "a\nb\n"])
def test_a_model_that_is_not_there(client, name):
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve(name)
    said = {"message": missing(name), "type": "Not Found", "param": None, "code": 404}
    assert caught.value.body == said


def test_the_list_of_models_with_a_slash_too_many(server):
    answer = server.client.get("/v1/models/", follow_redirects=True)
    assert [model["id"] for model in answer.json()["data"]] == NAMES
