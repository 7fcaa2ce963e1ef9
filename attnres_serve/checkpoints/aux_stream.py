"""The choice of hidden states that EAGLE heads read, made before any worker starts."""

from typing import Any

from attnres_serve.checkpoints import draft
from attnres_serve.compat import drafts, engine_config
from attnres_serve.errors import SettingError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.settings import AUTO, EAGLE, HEADS, STREAM_KEY, STREAMS, choice

FLAG = f"--{STREAM_KEY.replace('_', '-')}"


def settle(vllm_config: Any, target: ParsedConfig) -> None:
    """Write the stream into the settings that workers and vLLM's cache of compiled code read.

    A wrong stream shows only in a low acceptance rate of drafts.

    Args:
        vllm_config: vLLM's configuration of the engine.
        target: the parsed config.json.

    Raises:
        CheckpointError: vLLM's class of the family gives no hidden states.
        SettingError: the stream is not stated, or two places contradict each other.
    """
    method = engine_config.speculation_method(vllm_config)
    if method not in HEADS:
        return
    draft.check_hook(target, method)
    draft_config = drafts.config_of_draft(vllm_config)
    reads_layers = (getattr(draft_config, "eagle_config", None) or {}).get(
        "use_aux_hidden_state", True
    )
    if target.spec is None or method == EAGLE or not reads_layers:
        return  # the head reads a residual, or the last norm's output
    requested = choice(vllm_config.additional_config, STREAM_KEY)
    stated = getattr(draft_config, STREAM_KEY, None)
    if stated is not None and stated not in STREAMS:
        raise SettingError(
            f"{STREAM_KEY} in the draft's config.json is {stated!r}; expected one of "
            f"{', '.join(STREAMS)}."
        )
    if requested == AUTO and stated is None:
        raise SettingError(
            f"speculative decoding by {method!r} needs to know what the head was trained "
            f"on: give {FLAG} partial (the running sum of a block) or mixed (what the next layer "
            f"reads), or {STREAM_KEY} in the draft's config.json."
        )
    if stated not in (None, requested) and requested != AUTO:
        raise SettingError(
            f"{FLAG} is {requested}, and {STREAM_KEY} in the draft's config.json is {stated}; "
            "leave the flag out, or correct the file if it is wrong."
        )
    if stated is not None:
        engine_config.set_additional(vllm_config, STREAM_KEY, stated)
