"""Requests whose constraints leave no token.

vLLM 0.32 masks the logits of the tokens that a request forbids.  Where it forbids them all, vLLM
samples token 0 nevertheless, or answers with 500 if a grammar notices.  A contradiction that the
request shows is refused before it is queued.  One that turns up later ends the request at that
token, and the client gets a 400, or an error in the stream.

This can go with a vLLM whose workers tell the scheduler that every logit of a row is masked.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from attnres_serve.compat import engine_config
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds.request_refusals import refusal, refuse_by

REASON = "no_token_left"  # the stop_reason of an answer that an engine ends
KEY = "attn_res_allowed"  # of a request, where its list is kept as a set
ADVICE = "permit more tokens, or leave one of these fields out"


def refuse_contradictions(client) -> None:
    """Have an engine refuse requests that forbid their first token, whatever it is."""
    rows = client.vllm_config.model_config.get_vocab_size()
    refuse_by(client, lambda request: contradiction(request.sampling_params, rows))


def contradiction(sampling, rows: int) -> str | None:
    """Error sentence for a request that forbids every first token; None if one is left.

    Args:
        sampling: vLLM's ``SamplingParams`` of the request, with its bad words as tokens; or None.
        rows: tokens of the vocabulary.
    """
    if sampling is None:
        return None
    forbidden = {"`bad_words`": {word[0] for word in _bad_words(sampling) if len(word) == 1}}
    forbidden["`min_tokens`"] = _ends(sampling)
    if sampling.allowed_token_ids:
        left, fields = {*sampling.allowed_token_ids}, ["`allowed_token_ids`"]
    elif sum(map(len, forbidden.values())) < rows:
        return None
    else:
        left, fields = {*range(rows)}, []
    for field, tokens in forbidden.items():
        if left & tokens:
            left -= tokens
            fields.append(field)
    if left:
        return None
    return _sentence(fields, "for the answer")


def _sentence(fields: Sequence[str], place: str) -> str:
    verb = "leave" if len(fields) > 1 else "leaves"
    return f"{' and '.join(fields)} {verb} no token {place}; {ADVICE}."


def _bad_words(sampling) -> Sequence[Sequence[int]]:
    return sampling.bad_words_token_ids or ()


def _ends(sampling) -> set[int]:
    """The tokens that ``min_tokens`` forbids at first; a grammar that permits no other keeps them.

    vLLM forbids ``stop_token_ids`` and the model's own, even with ``ignore_eos``.
    """
    if not sampling.min_tokens or sampling.structured_outputs is not None:
        return set()
    return sampling.all_stop_token_ids


def _ending_answers(original: Any) -> Any:
    """Have schedulers end answers of AttnRes models before a token that is forbidden.

    All of them were, or it would not have been sampled.
    """
    from vllm.v1.request import RequestStatus

    def _update_request_with_output(self, request, new_token_ids, *rest, **options):
        is_ours = engine_config.has_attn_res(self.vllm_config)
        count = permitted(self, request, new_token_ids) if is_ours else len(new_token_ids)
        if count == len(new_token_ids):
            return original(self, request, new_token_ids, *rest, **options)
        tokens, stopped = original(self, request, new_token_ids[:count], *rest, **options)
        if not stopped:
            request.status, request.stop_reason = RequestStatus.FINISHED_ABORTED, REASON
            request.resumable = False  # a session does not go on from here
        return tokens, True

    return _update_request_with_output


def permitted(scheduler, request, tokens: Sequence[int]) -> int:
    """How many of the tokens that were sampled come before the first that the request forbids.

    Args:
        scheduler: vLLM's.
        request: of it, with the tokens of its answer before these.
        tokens: one, or several if drafts were accepted.
    """
    sampling = request.sampling_params
    is_bound = (
        sampling.allowed_token_ids
        or sampling.bad_words_token_ids
        or sampling.min_tokens
        or sampling.structured_outputs is not None
    )
    if not is_bound or getattr(sampling, "trace_decode_token_ids", None):
        return len(tokens)
    count = _permitted_by_lists(request, sampling, tokens)
    return _permitted_by_grammar(scheduler, request, tokens[:count])


def _permitted_by_lists(request, sampling, tokens: Sequence[int]) -> int:
    allowed, bad_words, ends = _allowed(request, sampling), _bad_words(sampling), _ends(sampling)
    reach = max(map(len, bad_words), default=0)
    past = [*request.output_token_ids[-reach:]] if reach else []
    for number, token in enumerate(tokens):
        past.append(token)
        is_early = request.num_output_tokens + number < sampling.min_tokens
        if (
            (allowed and token not in allowed)
            or (is_early and token in ends)
            or any(past[-len(word) :] == [*word] for word in bad_words)
        ):
            return number
    return len(tokens)


def _allowed(request, sampling) -> frozenset[int]:
    """Those of ``allowed_token_ids``, made once for them; empty without the field.

    A session that gets its prompt in parts has others with each part.
    """
    kept = vars(request)
    if kept.get(KEY, (None,))[0] is not sampling:
        kept[KEY] = sampling, frozenset(sampling.allowed_token_ids or ())
    allowed: frozenset[int] = kept[KEY][1]
    return allowed


def _permitted_by_grammar(scheduler, request, tokens: Sequence[int]) -> int:
    manager = scheduler.structured_output_manager
    # Before 0.32 the manager has no such method, and vLLM answers with 500.
    if not (request.use_structured_output and hasattr(manager, "validate_tokens")):
        return len(tokens)
    grammar = request.structured_output_request.grammar
    if grammar is None or grammar.is_terminated():
        return len(tokens)
    count = len(manager.validate_tokens(request, [*tokens]))
    ended = count and tokens[count - 1] in request.sampling_params.all_stop_token_ids
    return len(tokens) if ended else count  # what follows an end is free, and vLLM cuts it off


def constraints(sampling) -> list[str]:
    """The fields of a request that forbid tokens."""
    fields = {
        "`allowed_token_ids`": sampling.allowed_token_ids,
        "`bad_words`": sampling.bad_words_token_ids or sampling.bad_words,
        "`min_tokens`": sampling.min_tokens,
        "the grammar (`structured_outputs`, `response_format` or `tools`)": (
            sampling.structured_outputs
        ),
    }
    return [field for field, value in fields.items() if value]


def _refusing_dead_ends(generate: Callable[..., AsyncGenerator[Any, None]]) -> Any:
    """Have an engine's client answer an error where the engine ended an answer for ``REASON``."""

    def generate_or_refuse(prompt, sampling_params, *rest, **options):
        answers = generate(prompt, sampling_params, *rest, **options)
        fields = constraints(sampling_params)
        return _until_dead_end(answers, fields) if fields else answers

    return generate_or_refuse


async def _until_dead_end(answers, fields: list[str]):
    """The answers.

    Raises:
        VLLMValidationError: no token was left for one of them.
    """
    async with aclosing(answers):
        async for output in answers:
            if any(one.stop_reason == REASON for one in output.outputs):
                raise refusal(_sentence(fields, "to go on with in this answer"))
            yield output


PATCH = Patch(
    targets=("vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output",),
    make=_ending_answers,
    why="a token was sampled although a request forbids them all",
    models="AttnRes models",
    first=(0, 28),
    report="no-token-left",
)
CLIENT = replace(
    PATCH,
    targets=("generate",),
    of="one engine's client",
    make=_refusing_dead_ends,
    models="every model of our server",
)
