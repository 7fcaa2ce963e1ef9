"""Requests whose constraints leave no token.

vLLM 0.32 masks the logits of forbidden tokens.  If all are forbidden, vLLM still samples token 0,
or answers 500 if a grammar notices.  Here a contradiction within the request is refused before it
is queued.  A later one ends the request at that token, and the client gets a 400, or an error in
the stream.

Remove this with a vLLM whose workers report to the scheduler that all logits of a row are masked.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from attnres_serve.compat import engine_config
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds.request_refusals import refusal, refuse_by

REASON = "no_token_left"  # the stop_reason of an answer that the engine ends
KEY = "attn_res_allowed"  # an attribute of requests with their list as a set
ADVICE = "permit more tokens, or leave one of these fields out"


def refuse_contradictions(client) -> None:
    """Refuse requests that forbid every first token."""
    rows = client.vllm_config.model_config.get_vocab_size()
    refuse_by(client, lambda request: problem(request.sampling_params, rows))


def problem(sampling, rows: int) -> str | None:
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
    """The tokens that ``min_tokens`` forbids at first; none with a grammar, which may need them.

    vLLM forbids ``stop_token_ids`` and the model's tokens, even with ``ignore_eos``.
    """
    if not sampling.min_tokens or sampling.structured_outputs is not None:
        return set()
    return sampling.all_stop_token_ids


def _ending_answers(original: Any) -> Any:
    """End answers of AttnRes models before a forbidden token.

    Such a token is sampled only if all are forbidden.
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
            request.resumable = False  # a session cannot continue from here
        return tokens, True

    return _update_request_with_output


def permitted(scheduler, request, tokens: Sequence[int]) -> int:
    """The number of sampled tokens before the first that the request forbids.

    Args:
        scheduler: of vLLM.
        request: with the earlier tokens of its answer.
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
    """The set of ``allowed_token_ids``, cached; empty without the field.

    A session that gets its prompt in parts may have another list for each part.
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
    return len(tokens) if ended else count  # tokens after an end are unconstrained, and cut off


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
    """Answer an error if the engine ended an answer for ``REASON``."""

    def generate_or_refuse(prompt, sampling_params, *rest, **options):
        answers = generate(prompt, sampling_params, *rest, **options)
        fields = constraints(sampling_params)
        return _until_dead_end(answers, fields) if fields else answers

    return generate_or_refuse


async def _until_dead_end(answers, fields: list[str]):
    """Pass the answers on.

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
