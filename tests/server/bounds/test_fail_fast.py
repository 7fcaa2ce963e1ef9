"""Bodies that are wrong many times, or have too long integers."""

import re
import time
import tracemalloc

import pytest
from asgi import ask
from cost import of_a_start
from fastapi import FastAPI
from pydantic import ValidationError

pytest.importorskip("vllm")

from bounded_app import BEARER, JSON, body_of, error_of

from attnres_serve.compat import openai_app
from attnres_serve.server.bounds import fail_fast

MANY = 100_000

WRONG = [  # of which pydantic would make ten thousands of errors and more, of some millions
    ("/v1/completions", {"prompt": [[]] * MANY}),
    ("/v1/completions", {"prompt": "a", "bad_words": [1] * MANY}),
    ("/v1/chat/completions", {"messages": [{}] * MANY}),
    ("/v1/messages", {"messages": [{}] * MANY}),
    ("/v1/responses", {"input": [{}] * MANY}),
    *(("/v1/responses", {"input": [{name: [{}] * MANY}]}) for name in ("tools", "content")),
    ("/v1/responses", {"input": [{"tools": [{}] * 100}] * 50}),
    ("/tokenize", {"messages": [{}] * MANY}),
    ("/inference/v1/generate", {"token_ids": ["a"] * MANY, "sampling_params": {}}),
    ("/v1/attn_res/trace", {"prompt": [-1] * MANY}),
]


@pytest.mark.parametrize(("path", "asked"), WRONG, ids=lambda one: str(one)[:50])
def test_what_is_wrong_many_times_is_refused_soon(vllms_app, path, asked):
    """And of little memory: what gets through to vLLM's own check ends at the first error.

    Soon is less than an import of torch takes here; millions of errors take minutes.  Memory is
    that of Python's objects, alike on every machine: JSON makes 100 000 objects of 64 bytes and a
    list, 7 MB, and pydantic some kB of each error, so hundreds of MB.
    """
    from vllm import __version__

    request, chunks = ("POST", path, [BEARER, JSON]), [body_of(**asked)]
    begin = time.process_time()
    answer = ask(vllms_app, *request, chunks=chunks)
    assert time.process_time() - begin < of_a_start()
    # vLLM 0.28 repeats what is wrong for each of the kinds that it might have been.
    longest = 2**23 if __version__.startswith("0.28.") else 2**20
    assert answer.status == 400 and len(error_of(answer)) < longest
    tracemalloc.start()  # which makes it slower
    ask(vllms_app, *request, chunks=chunks)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**26


LONG = [
    ("/v1/completions", {"prompt": "a", "top_k": 2**63}),
    ("/v1/completions", {"prompt": "a", "priority": -(2.0**70)}),
    ("/v1/completions", {"prompt": "a", "repetition_detection": {"min_count": 1e25}}),
    ("/v1/chat/completions", {"messages": [], "min_tokens": str(2**70)}),
]


@pytest.mark.parametrize(("path", "asked"), LONG, ids=lambda one: str(one)[:60])
def test_integers_that_an_engine_cannot_take_are_refused(vllms_app, path, asked):
    answer = ask(vllms_app, "POST", path, [BEARER, JSON], chunks=[body_of(**asked)])
    assert answer.status == 400
    assert re.search("at most|at least|exceeded maximum size", error_of(answer))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"top_k": str(2**64)}, {"top_k": -1e25}, {"bad_words": [1] * 1000}),
        {"repetition_detection": {"max_pattern_size": 2, "min_count": str(2**64)}},
    ],
    ids=lambda one: str(one)[:40],
)
def test_invocations_reads_within_the_same_bounds(completions_of_invocations, wrong):
    read = completions_of_invocations.validate_python
    with pytest.raises(ValidationError) as caught:
        read({"prompt": "a", **wrong})
    assert caught.value.error_count() == 1
    assert read({"prompt": "a", "top_k": "7"}).top_k == 7


def test_an_integer_that_may_be_a_float_stays_one(vllms_app):
    (route,) = (route for route in vllms_app.routes if route.path == "/v1/completions")
    given = {"a": 2**63 + 1, "b": [2**64 - 1, -(2**63), 1.5]}
    found, errors = route.body_field.validate({"prompt": "a", "vllm_xargs": given}, {}, loc=())
    assert not errors and repr(found.vllm_xargs) == repr(given)


def test_bodies_that_cannot_be_bounded_are_told_of(vllms_app, warned):
    """Those of a route that reads its body by other means; the others have their bounds."""
    fail_fast.read_to_first_error(vllms_app)
    assert not warned
    app = FastAPI()

    async def invocations() -> None: ...

    async def taking_numbers(numbers: list[int]) -> int:
        return len(numbers)

    app.add_api_route(openai_app.INVOCATIONS, invocations, methods=["POST"])
    app.add_api_route("/other", taking_numbers, methods=["POST"])
    fail_fast.read_to_first_error(app)
    assert len(warned) == 1 and openai_app.INVOCATIONS in warned[0] and "/other" not in warned[0]
    assert ask(app, "POST", "/other", [JSON], chunks=[b"[%d]" % 2**64]).status == 422


ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    # vLLM adds what these lack before it reads them.
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"type": "reasoning", "summary": []},
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "a"},
]


@pytest.mark.parametrize("wrong", [None, {}, 7], ids=str)
def test_what_is_right_is_read_as_before(vllms_app, wrong):
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    (route,) = (route for route in vllms_app.routes if route.path == "/v1/responses")
    items = 100 * ITEMS + ([] if wrong is None else [wrong])
    found, errors = route.body_field.validate({"input": items}, {}, loc=())
    if wrong is None:
        kinds = [type(item) for item in ResponsesRequest(input=items).input]
        assert not errors and [type(item) for item in found.input] == kinds
    else:
        assert errors
