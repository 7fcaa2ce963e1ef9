"""Requests that a server of ours refuses in one sentence, where vLLM does not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from serving import DEMO

from attnres_serve.checkpoints import tokenizer
from attnres_serve.compat.workarounds import (
    bare_refusals,
    grammar_refusals,
    ids_without_row,
    penalties,
    responses_errors,
)

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams


@pytest.mark.parametrize("penalty", [5e-324, 1e-45, 1e-38, 9e-31, 1.1e30, 1e38, 1e300])
def test_a_penalty_that_overflows(penalty: float) -> None:
    result = penalties.problem(SamplingParams(repetition_penalty=penalty))
    assert result == (
        f"`repetition_penalty` is {penalty:g}; expected 1e-30 to 1e+30, and 1 for none."
    )


@pytest.mark.parametrize("penalty", [1e-30, 0.01, 1.0, 2, 1e30])
def test_a_penalty_that_does_not(penalty: float) -> None:
    assert penalties.problem(SamplingParams(repetition_penalty=penalty)) is None
    assert penalties.problem(None) is None


@pytest.mark.parametrize("penalty", [1e300, -51, 50.1, float("inf"), float("nan")])
def test_a_length_penalty_that_overflows(monkeypatch: pytest.MonkeyPatch, penalty: float) -> None:
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.sampling_params import BeamSearchParams

    def asked(penalty: float) -> Any:
        params = BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty)
        run: Any = BeamSearchOnlineMixin.beam_search
        return run(None, prompt="a", request_id="name", params=params)

    monkeypatch.setattr(BeamSearchOnlineMixin, "beam_search", lambda *_: "beams")
    penalties.PATCH.apply()
    with pytest.raises(VLLMValidationError, match=r"^`length_penalty` is ") as caught:
        asked(penalty)
    assert caught.value.parameter == "length_penalty"
    assert asked(-50) == asked(1) == "beams"


# --- sentences of vLLM's


@pytest.mark.parametrize(
    ("parameter", "value"), [("max_tokens", 5000), ("stop", ["a (b)"]), ("seed", None), (None, 5)]
)
def test_a_sentence_without_its_field(parameter: str | None, value: Any) -> None:
    """Which stands in the answer's ``param``."""
    from vllm.entrypoints.openai.models.serving import create_error_response

    for _ in range(2):  # idempotent
        bare_refusals.PATCH.apply()
    message = "It is too long (at most 9)."
    result = create_error_response(
        VLLMValidationError(message, parameter=parameter, value=value)
    ).error
    assert (result.message, result.param, result.code) == (message, parameter, 400)


# --- grammars


WRONG: dict[str, list[Any]] = {
    "regex": ["([", "a{3,1}", "*", "(?=a)b", "[z-a]", "\\p{Foo}", "\0"],
    "grammar": ["", "root ::= x", 'x ::= "a"', "start: foo", "start: /([/", 'root ::= "a', "?"],
    "choice": [[], ["\ud800"]],
    "json": [
        *("{", "[]", "5", "null", '{"type": "foo"}', " "),
        *({"type": "foo"}, {"type": 5}, {"$ref": "#/nope"}, {"type": "string", "pattern": "(["}),
        *({"type": "array", "minItems": 5, "maxItems": 2}, {"enum": []}, {"properties": 5}),
    ],
    "structural_tag": ["{", "", "{}", "[]", "5", '{"structures": []}'],
    "json_object": [False],
}


@pytest.fixture(scope="module")
def validate():
    """Validates a grammar as vLLM does when it processes a request."""
    words = tokenizer.load(DEMO)

    def run(**outputs: Any) -> None:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))
        model, backend = SimpleNamespace(is_diffusion=False), SimpleNamespace(backend="auto")
        params._validate_structured_outputs(model, backend, words)  # type: ignore[arg-type]

    return run


@pytest.fixture
def one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_validate_structured_outputs"
    monkeypatch.setattr(SamplingParams, name, getattr(SamplingParams, name))
    grammar_refusals.PATCH.apply()
    bare_refusals.PATCH.apply()


@pytest.mark.usefixtures("one_sentence")
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]], ids=str
)
def test_a_grammar_that_cannot_be_compiled(validate, field: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        validate(**{field: value})
    message = str(caught.value)
    assert (
        message.startswith(f"`structured_outputs.{field}`") and " cannot be compiled (" in message
    )
    assert message.endswith(").") and "\n" not in message and len(message) < 400
    assert caught.value.parameter == f"structured_outputs.{field}"


@pytest.mark.usefixtures("one_sentence")
@pytest.mark.parametrize("outputs", [{"regex": "a+"}, {"choice": ["a"]}, {"json": {}}], ids=str)
def test_a_grammar_that_can(validate, outputs: dict[str, Any]) -> None:
    validate(**outputs)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Grammar error: at 1(8): no:\n    ([\n     ^\nerror: unclosed\n   1 | x\n", "unclosed"),
        ("Invalid grammar specification: Grammar error: 5 is none.", "5 is none"),
        ("\n" + "x" * 300, "x" * 200 + "..."),
    ],
)
def test_what_is_told_of_a_compiler(message: str, reason: str) -> None:
    assert grammar_refusals.reason(message) == reason


def client_of(reasons: list[str | None], **config: Any) -> SimpleNamespace:
    """A client of an engine that answers an output for each ``finish_reason``; errors are empty."""

    async def generate(prompt, sampling_params, request_id):
        for reason in reasons:
            tokens = [] if reason == "error" else [5]
            yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason, token_ids=tokens)])

    own = SimpleNamespace(**{"kv_transfer_config": None} | config)
    return SimpleNamespace(generate=generate, vllm_config=own)


def asked(client: SimpleNamespace, sampling: SamplingParams) -> int:
    async def ask() -> int:
        return len([output async for output in client.generate("a", sampling, "name")])

    return asyncio.run(ask())


def test_a_grammar_that_the_engine_cannot_compile() -> None:
    bound = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    client = client_of(["error"])
    grammar_refusals.refuse_uncompiled(client)
    with pytest.raises(VLLMValidationError, match=r"^`structured_outputs.regex` cannot be comp"):
        asked(client, bound)
    assert asked(client, SamplingParams()) == 1  # vLLM's own words for another fault
    client = client_of([None, "stop"])
    grammar_refusals.refuse_uncompiled(client)
    assert asked(client, bound) == 2
    client = client_of([None, "error"])  # it was compiled, and what ended the answer is another
    grammar_refusals.refuse_uncompiled(client)
    assert asked(client, bound) == 2
    client = client_of(["error"], kv_transfer_config={})
    grammar_refusals.refuse_uncompiled(client)
    assert asked(client, bound) == 1


# --- ids that are decoded


OUTSIDE = [2**31, 2**32, 2**63 - 1, 400, -1]


TOKENIZER = SimpleNamespace(max_token_id=399)


def renderer_of(tokenizer: Any = TOKENIZER) -> SimpleNamespace:
    """A renderer of a model of 320 tokens, as a server has it."""

    async def decode(prompt: dict[str, Any]) -> dict[str, Any]:
        return prompt | {"prompt": "text"}

    result = SimpleNamespace(
        _detokenize_prompt_async=decode, validate_token_ids=None, tokenizer=tokenizer
    )
    model = SimpleNamespace(get_vocab_size=lambda: 320)
    config = SimpleNamespace(model_config=model)
    ids_without_row.name_the_field(SimpleNamespace(renderer=result, vllm_config=config))
    return result


@pytest.mark.parametrize("token", OUTSIDE)
def test_an_id_that_is_in_no_vocabulary_is_not_decoded(token: int) -> None:
    renderer = renderer_of()
    with pytest.raises(VLLMValidationError, match=rf"^Token {token} of `tokens` or `prompt` is"):
        asyncio.run(renderer._detokenize_prompt_async({"prompt_token_ids": [5, token]}))
    with pytest.raises(VLLMValidationError, match=rf"^Token {token} of `prompt` is") as caught:
        renderer.validate_token_ids([5, token])
    assert caught.value.parameter == "prompt"


def test_an_id_of_either_vocabulary_is_decoded() -> None:
    for renderer, ids in ((renderer_of(), [5, 399]), (renderer_of(None), [2**32])):
        result = asyncio.run(renderer._detokenize_prompt_async({"prompt_token_ids": ids}))
        assert result["prompt"] == "text"
        renderer.validate_token_ids(ids)


# --- streams of /v1/responses


def test_a_refusal_within_a_stream_of_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    async def stream(self, wrong: bool):
        yield "created"
        if wrong:
            raise VLLMValidationError("No.", parameter="seed")

    monkeypatch.setattr(OpenAIServingResponses, "responses_stream_generator", stream)
    responses_errors.PATCH.apply()

    async def events(wrong: bool) -> list[Any]:
        run: Any = OpenAIServingResponses.responses_stream_generator
        return [event async for event in run(None, wrong)]

    assert asyncio.run(events(False)) == ["created"]
    created, error = asyncio.run(events(True))
    assert (created, error.type, error.code, error.param) == ("created", "error", "400", "seed")
    assert error.sequence_number == 1 and error.message.startswith("No.")
