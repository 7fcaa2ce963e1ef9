"""Requests that raise in a worker of vLLM's second model runner, which ends the engine."""

from attnres_serve.compat.workarounds.request_refusals import refuse_by


def refuse_beyond_workers(client) -> None:
    """Refuse requests that exceed the buffers of workers.

    vLLM's second model runner has buffers of fixed sizes and 32-bit counts, and nothing checks
    them.  When a request gets its id it is complete: its stop tokens and bad words are token ids.
    """
    if not client.vllm_config.use_v2_model_runner:
        return
    room = _room_of_workers()
    refuse_by(
        client,
        lambda request: request.sampling_params and problem(request.sampling_params, room),
    )


def _room_of_workers() -> dict[str, int]:
    from vllm import envs
    from vllm.v1.worker.gpu.sample import bad_words, logit_bias

    fixed = getattr(bad_words, "MAX_BAD_WORDS_TOTAL_TOKENS", 1024)  # before the variable existed
    return {
        "ids in `allowed_token_ids`": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "ids in `logit_bias`": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "ids to stop at beside `min_tokens`": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "tokens in `bad_words`": getattr(envs, "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", fixed),
        "tokens as `max_tokens`": 2**30,  # with the prompt's, 2**31
    }


def problem(sampling, room: dict[str, int]) -> str | None:
    """Error sentence for the first parameter that exceeds a worker's buffers; None if all fit."""
    counts = (
        len(sampling.allowed_token_ids or ()),
        len(sampling.logit_bias or ()),
        len(sampling.all_stop_token_ids) if sampling.min_tokens else 0,
        sum(map(len, sampling.bad_words_token_ids or ())),
        sampling.max_tokens or 0,  # at least as many as ``min_tokens``
    )
    for count, (what, most) in zip(counts, room.items(), strict=True):
        if count > most:
            return f"Found {count} {what}; this server takes at most {most}."
    if sampling.seed is not None and sampling.seed + sampling.n > 2**63:  # each has the next one
        return "Found a `seed` with which that of the last of `n` answers has more than 63 bits."
    return None
