"""Tokens of an HTTP request, counted where the engine answers, and the weights that they are of.

So counts are exact for streams, for several prompts and answers, and without a usage in the answer.
When an answer has ended, a listener also gets the ids of its prompt and answer.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from attnres_serve.compat.patch import Patch


@dataclass
class TokenCounts:
    """Tokens that a request sent to the engine, and those that came back.

    Attributes:
        prompt: tokens of its prompts; None before its first request to the engine.
        answer: tokens of its answers so far.
        uncounted: answers of which ``answer`` lacks tokens, or has more than the client's.
        versions: of the weights that computed the answers which have ended, in order; none before
            vLLM 0.32.
    """

    prompt: int | None = None
    answer: int = 0
    uncounted: int = 0
    versions: list[str] = field(default_factory=list)


_counts: ContextVar[TokenCounts | None] = ContextVar("attn_res_token_counts", default=None)

Take = Callable[[list[int], list[int]], None]  # of prompt and answer
listener: Callable[[], Take] | None = None  # called as a request begins; it takes what ends


def begin() -> TokenCounts:
    """The counts of what this task, and every task that it starts, asks of the engine from now."""
    counts = TokenCounts()
    _counts.set(counts)
    return counts


def current() -> TokenCounts:
    """The counts of this task's request, which begin here unless they have begun."""
    return _counts.get() or begin()


def count(client) -> None:
    """Have vLLM's engine client count tokens for the requests that called ``begin``."""
    PATCH.apply_to(client)


def _counting(generate: Callable[..., AsyncGenerator[Any, None]]) -> Any:
    def generate_and_count(prompt, sampling_params, request_id, **options):
        answers = generate(prompt, sampling_params, request_id, **options)
        # Not our requests, embeddings (without ids) or single tokens of a beam search.
        has_ids = not (isinstance(prompt, dict) and "prompt_embeds" in prompt)
        is_part = "-beam-" in request_id  # one request of a client is many of the engine
        is_whole = not (request_id.startswith("attn-res-") or is_part)
        take = listener() if listener is not None and has_ids and is_whole else None
        counts = _counts.get()
        if counts is None and take is None:
            return answers
        counts = counts or TokenCounts()
        counts.uncounted += is_part
        return _counted(answers, counts, take, sampling_params)

    return generate_and_count


PATCH = Patch(
    targets=("generate",),
    of="one engine's client",
    make=_counting,
    why="its tokens are counted and its ids and weights told; no fault",
    models="every model of our server",
    first=(0, 28),
)


async def _counted(answers, counts: TokenCounts, take: Take | None, sampling_params):
    from vllm.sampling_params import RequestOutputKind

    comes_whole = sampling_params.output_kind != RequestOutputKind.DELTA
    counts.uncounted += comes_whole  # until it is there; before that a client may leave
    seen: dict[int, list[int]] = {}  # ids of each answer
    async with aclosing(answers):
        async for output in answers:
            prompt = output.prompt_token_ids or ()
            if not seen:
                counts.prompt = (counts.prompt or 0) + len(prompt)
            for answer in output.outputs:
                ids = seen.setdefault(answer.index, [])
                before = len(ids)
                ids[0 if comes_whole else before :] = answer.token_ids
                counts.answer += len(ids) - before
                for span in getattr(answer, "weight_versions", None) or ():
                    if span.version not in counts.versions:
                        counts.versions.append(span.version)
                if take is not None and answer.finish_reason not in (None, "abort", "error"):
                    take(list(prompt), ids)
            counts.uncounted -= comes_whole and output.finished
            yield output
