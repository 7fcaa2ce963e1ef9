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


# --- what no answer can satisfy


A, B = (tokenizer.load(DEMO)(letter, add_special_tokens=False).input_ids[0] for letter in "ab")
# What contradicts itself at once, after some tokens, or by a grammar; the first field is named.
DEAD_ENDS: dict[str, dict] = {
    "at once": {"allowed_token_ids": [A], "bad_words": ["a"]},
    "at once, sampled": {"allowed_token_ids": [A], "bad_words": ["a"], "temperature": 1, "n": 2},
    "the end": {"allowed_token_ids": [2], "min_tokens": 4},
    "on the way": {"allowed_token_ids": [A, B], "bad_words": ["aa", "ab", "ba", "bb"]},
    "on the way, sampled": {"allowed_token_ids": [A], "bad_words": ["aaa"], "n": 3}
    | {"temperature": 1},
    "a grammar": {"allowed_token_ids": [B], "structured_outputs": {"regex": "a+"}},
    "a grammar and a word": {"bad_words": ["a"], "structured_outputs": {"regex": "a"}},
    "a penalty": {"repetition_penalty": 1e-38},
}
WRONG = {"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"
ROUTES = {"/v1/completions": ASK, "/v1/chat/completions": CHAT}
# A grammar that permits no character, which the third route reads as well.
NOTHING = {"structured_outputs": {"regex": "[^\\x00-\\U0010ffff]"}}
REFUSED = [
    *((path, case, next(iter(case))) for path in ROUTES for case in DEAD_ENDS.values()),
    ("/v1/responses", NOTHING, "structured_outputs"),
    *((path, *WRONG) for path in (*ROUTES, "/v1/responses")),
    ("/v1/responses", {"repetition_penalty": 1e38}, "repetition_penalty"),
]


def last_error(lines: list[str]) -> dict:
    """What the last event of a stream that is an error says, in either shape."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (found,) = [one for one in events if "error" in one or one.get("type") == "error"]
    return found.get("error") or found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=str)
def test_what_leaves_no_token_is_refused(server, path, fields, param, stream):
    body = ROUTES.get(path, ASK_RESPONSES) | fields
    answer = server.client.post(path, json=body | {"stream": stream})
    assert answer.status_code == (200 if stream else 400)
    error = last_error(answer.text.splitlines()) if stream else answer.json()["error"]
    assert str(error["code"]) == "400" and error["param"] == param
    assert "\n" not in error["message"] and f"`{param}`" in error["message"]


def test_one_of_two_tokens_is_left(client):
    bound = {"allowed_token_ids": [A, B], "bad_words": ["a"]}
    answer = client.completions.create(**ASK, extra_body=bound)
    assert answer.choices[0].text == "b" * 12
    bound = {"structured_outputs": {"regex": "a"}, "bad_words": ["b"], "min_tokens": 5}
    answer = client.completions.create(**ASK, extra_body=bound)
    assert answer.choices[0].text == "a" and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("token", [2**31, 2**32, 2**63 - 1, 2048])
def test_ids_that_no_vocabulary_has(server, token):
    asked = {"prompt": [5, token], "max_tokens": 1, "model": "demo"}
    for path, body in {
        "/detokenize": {"tokens": [5, token]},
        "/v1/completions": asked,
        "/v1/completions?echo": asked | {"echo": True},
        "/v1/attn_res/trace": {"prompt": [5, token]},
    }.items():
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400
        assert f"{token} " in answer.json()["error"]["message"]


# --- echo


ECHOES = {
    "several answers": {"prompt": "x", "n": 3, "temperature": 1, "seed": 1, "logprobs": 1},
    "the prompt alone": {"prompt": "import os", "max_tokens": 0, "logprobs": 1, "n": 2},
    "token ids": {"prompt": [A, B, 300], "n": 2, "temperature": 1, "seed": 2, "logprobs": 0},
    "several prompts": {
        "prompt": ["import os", "é"],
        "n": 2,
        "temperature": 1,
        "seed": 3,
        "logprobs": 2,
    },
    "without logprobs": {"prompt": ["a", "import os"], "n": 2, "temperature": 1, "seed": 4},
}


def joined(parts: list[dict]) -> dict[int, dict[str, list]]:
    """Texts, tokens, logprobs and offsets of the answers, whose parts come in any order."""
    found: dict[int, dict[str, list]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        rows = found.setdefault(choice["index"], {"text": []})
        rows["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            rows.setdefault(name, []).extend(values)
    return found


@pytest.mark.parametrize("name", ECHOES)
def test_a_stream_echoes_what_one_answer_does(server, name):
    """Several times: whether vLLM merged outputs of two answers was a matter of the moment."""
    asked = {"model": "demo", "max_tokens": 6, "temperature": 0, "echo": True} | ECHOES[name]
    if not asked["max_tokens"]:
        asked["temperature"] = 1  # several answers are never greedy
    whole = joined([server.client.post("/v1/completions", json=asked).json()])
    for _ in range(4):
        lines = server.client.post("/v1/completions", json=asked | {"stream": True}).text
        parts = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
        assert joined(parts) == whole


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
