"""Which hidden states heads of EAGLE's kind read, settled before any worker starts."""

from typing import Any

from attnres_serve.checkpoints import draft
from attnres_serve.compat import engine_config
from attnres_serve.errors import SettingError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.settings import AUTO, EAGLE, HEADS, STREAM_KEY, STREAMS, choice

FLAG = f"--{STREAM_KEY.replace('_', '-')}"


def settle(vllm_config: Any, target: ParsedConfig) -> None:
    """Write the stream into the settings that workers read, and that vLLM's compiled code is of.

    Nothing tells a wrong stream from the right one but how few drafts are accepted.

    Args:
        vllm_config: the engine's.
        target: what the resolver made of config.json.

    Raises:
        CheckpointError: the family shows no layers.
        SettingError: nothing says which stream it is, or two places say it otherwise.
    """
    method = engine_config.speculation_method(vllm_config)
    if method not in HEADS:
        return
    draft.check_hook(target, method)
    own = engine_config.config_of_draft(vllm_config)
    reads_layers = (getattr(own, "eagle_config", None) or {}).get("use_aux_hidden_state", True)
    if target.spec is None or method == EAGLE or not reads_layers:
        return  # it reads a residual, or what the last norm gives
    asked = choice(vllm_config.additional_config, STREAM_KEY)
    stated = getattr(own, STREAM_KEY, None)
    if stated is not None and stated not in STREAMS:
        raise SettingError(
            f"{STREAM_KEY} in the draft's config.json is {stated!r}; expected one of "
            f"{', '.join(STREAMS)}."
        )
    if asked == AUTO and stated is None:
        raise SettingError(
            f"speculative decoding by {method!r} needs to know what the head was trained "
            f"on: give {FLAG} partial (the running sum of a block) or mixed (what the next layer "
            f"reads), or {STREAM_KEY} in the draft's config.json."
        )
    if stated not in (None, asked) and asked != AUTO:
        raise SettingError(
            f"{FLAG} is {asked}, and {STREAM_KEY} in the draft's config.json is {stated}; leave "
            "the flag out, or correct the file if it is wrong."
        )
    if stated is not None:
        engine_config.set_additional(vllm_config, STREAM_KEY, stated)
