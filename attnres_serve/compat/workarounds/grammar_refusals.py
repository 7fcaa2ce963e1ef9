"""Grammars that cannot be compiled, as errors of the client.

vLLM 0.32 reports some of them in several lines that draw the place, without the field.  If the
server accepts a grammar that the engine's backend cannot compile, the answer is 500: the backend of
the first request with a grammar compiles all later ones.

Remove this with a vLLM that answers both with 400 and one sentence.
"""

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds.request_refusals import refusal

LONGEST = 200  # characters of a reason, which may contain the whole grammar
# Other fields from which vLLM makes a grammar, by the field of ``structured_outputs``.
ELSEWHERE = {
    "json": "`response_format`, `text.format` or `tools`",
    "json_object": "`response_format`",
    "structural_tag": "`response_format` or `tools`",
}


def _in_a_sentence(original: Any) -> Any:
    """Refuse such grammars with one sentence that names the field."""

    def _validate_structured_outputs(self, *rest, **options):
        field = field_of(self.structured_outputs)
        try:
            original(self, *rest, **options)
        except Exception as error:  # compilers raise various errors
            raise refusal(f"{field} cannot be compiled ({reason(str(error))}).") from error

    return _validate_structured_outputs


def field_of(outputs) -> str:
    """The possible fields of a grammar's source.

    Args:
        outputs: vLLM's ``StructuredOutputsParams``, or None.
    """
    fields = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    field = next((name for name in fields if getattr(outputs, name, None) is not None), None)
    if field is None:
        return "`structured_outputs`"
    others = ELSEWHERE.get(field)
    return f"`structured_outputs.{field}`" + (f" or that of {others}" if others else "")


def reason(message: str) -> str:
    """A compiler's message, as a part of a sentence."""
    error = re.search(r"^error: (.+)$", message, re.MULTILINE)  # below a drawing of the place
    line = error[1] if error else message.strip().partition("\n")[0]
    line = re.sub(r"^((Grammar error|Invalid grammar specification): )+", "", line).rstrip(".")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def refuse_uncompiled(client) -> None:
    """Answer 400 if the engine could not compile a grammar.

    The engine ends such a request like one whose cache another server could not send.
    """
    if client.vllm_config.kv_transfer_config is None:
        CLIENT.apply_to(client)


def _refusing_uncompiled(generate: Callable[..., AsyncGenerator[Any, None]]) -> Any:
    def generate_or_refuse(prompt, sampling_params, *rest, **options):
        answers = generate(prompt, sampling_params, *rest, **options)
        outputs = sampling_params.structured_outputs
        return answers if outputs is None else _unless_uncompiled(answers, field_of(outputs))

    return generate_or_refuse


async def _unless_uncompiled(answers, field: str):
    """Pass the answers on.

    Raises:
        VLLMValidationError: the engine gave one up before it began.
    """
    has_begun = False  # another fault ends an answer that has begun
    async with aclosing(answers):
        async for output in answers:
            has_begun = has_begun or any(one.token_ids for one in output.outputs)
            if not has_begun and any(one.finish_reason == "error" for one in output.outputs):
                raise refusal(
                    f"{field} cannot be compiled by this server, whose log says why; simplify it."
                )
            yield output


PATCH = Patch(
    targets=("vllm.sampling_params:SamplingParams._validate_structured_outputs",),
    make=_in_a_sentence,
    why="a refusal of a grammar had several lines and no field",
    models="every model of our server",
    first=(0, 28),
    report="grammars-of-two-backends",
)
CLIENT = replace(
    PATCH,
    targets=("generate",),
    of="one engine's client",
    make=_refusing_uncompiled,
    why="a grammar that the engine could not compile was a 500",
)
