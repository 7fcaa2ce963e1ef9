"""Our settings in vLLM's ``additional_config``, and so in its compile-cache key."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attnres_serve.errors import SettingError
from attnres_serve.kernels.backends import BACKENDS

if TYPE_CHECKING:
    from attnres_serve.depth.edits import Edit
    from attnres_serve.depth.spec import AttnResSpec

ALGORITHM_KEY = "attnres_algorithm"
ALGORITHMS = ("single_pass", "two_phase")
BACKEND_KEY = "attnres_backend"
AUTO = "auto"
NATIVE_KEY = "attnres_native"
TRACE_KEY = "attnres_trace"
UNTRACED = "disable_trace"  # the flag
SHARD_KEY = "attnres_shard_sites"
SHARD_TOKENS_KEY = "attnres_shard_tokens"
SHARD_TOKENS = 1024  # by arithmetic (docs/use/scaling.md)
STREAM_KEY = "attnres_aux_stream"
EDIT = "attnres_edit"  # the flag
EDITS_KEY = "attnres_edits"
CHANGE_EDITS = "enable_attnres_edits"  # the flag of a server
CHANGE_EDITS_KEY = "attnres_edits_change"
PARTIAL, MIXED = STREAMS = ("partial", "mixed")
CHOICES = {
    ALGORITHM_KEY: (*ALGORITHMS, AUTO),
    BACKEND_KEY: (*BACKENDS, AUTO),
    NATIVE_KEY: ("on", "off", AUTO),
    TRACE_KEY: ("on", "off", AUTO),
    SHARD_KEY: ("on", "off", AUTO),
    STREAM_KEY: (*STREAMS, AUTO),
    CHANGE_EDITS_KEY: ("on", "off", AUTO),
}
KEYS = (*CHOICES, SHARD_TOKENS_KEY, EDITS_KEY)
HELP = {
    ALGORITHM_KEY: "how sites attend to their sources",
    BACKEND_KEY: "what computes the sites",
    NATIVE_KEY: "leave a format to vLLM that it serves by itself on a GPU",
    SHARD_KEY: "divide the tokens of sites over the workers of tensor parallelism",
    STREAM_KEY: "what draft heads read of layers: the running sum, or the mix that follows",
}
FLAGS = (*HELP, SHARD_TOKENS_KEY, UNTRACED, EDIT)  # names of parsed values
PREFIX = "attnres_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting."""
    for key, text in HELP.items():
        flag = f"--{key.replace('_', '-')}"
        parser.add_argument(flag, choices=CHOICES[key], help=f"{text} (default: {AUTO})")
    parser.add_argument(
        f"--{SHARD_TOKENS_KEY.replace('_', '-')}",
        type=int,
        metavar="N",
        help=f"tokens of the smallest step that they are divided in (default: {SHARD_TOKENS})",
    )
    add_edits(parser, EDIT, "serve the model under an edit of what its sites read")
    parser.add_argument(
        f"--{UNTRACED.replace('_', '-')}",
        action=argparse.BooleanOptionalAction,
        help="answer no POST /v1/attn_res/trace",
    )


def add_edits(
    parser: argparse.ArgumentParser, name: str, what: str, example: str = 'mask sources="block 2"'
) -> None:
    """Add a flag whose values ``edit_text.each`` reads."""
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        action="append",
        default=[],
        metavar="EDIT",
        help=f"{what}, for example '{example}'; may be given several times",
    )


def from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in flags, by their keys in ``additional_config``.

    Args:
        flags: values by name; None for an absent flag.

    Raises:
        SettingError: a text is no edit.
    """
    settings = {key: value for key in KEYS if (value := flags.get(key)) is not None}
    settings |= {TRACE_KEY: "off"} if flags.get(UNTRACED) else {}
    settings |= {CHANGE_EDITS_KEY: "on"} if flags.get(CHANGE_EDITS) else {}
    if texts := flags.get(EDIT):
        from attnres_serve.depth import edit_text, static_edits  # not for every command

        edits = edit_text.each(texts, f"--{EDIT.replace('_', '-')}")
        settings[EDITS_KEY] = static_edits.to_json(edits)
    return settings


def choice(additional_config: Any, key: str) -> str:
    """The value under a key, or ``auto``, for which each worker decides.

    Raises:
        SettingError: for an unknown value, or an unknown key that begins with ``attnres_``.
    """
    settings = {} if additional_config is None else additional_config
    if not isinstance(settings, dict):
        raise SettingError(
            f"--additional-config is a {type(settings).__name__}; expected a JSON object."
        )
    for name in settings:
        if name.startswith(PREFIX) and name not in KEYS:
            raise SettingError(
                f"--additional-config has the unknown key {name!r}; the known ones are "
                f"{', '.join(KEYS)}."
            )
    value = settings.get(key, AUTO)
    if value not in CHOICES[key]:
        raise SettingError(f"{key} is {value!r}; expected one of {', '.join(CHOICES[key])}.")
    return value


def edits(additional_config: Any) -> "list[Edit] | None":
    """The edits that a model is served under; None if it has none and cannot have some later.

    Raises:
        SettingError: they are no list of edits.
    """
    changes = edits_change(additional_config)
    if not (stated := (additional_config or {}).get(EDITS_KEY)):
        return [] if changes else None
    from attnres_serve.depth import static_edits

    return static_edits.from_json(stated, EDITS_KEY)


def edits_change(additional_config: Any) -> bool:
    """Whether edits may change while a model is served; ``auto`` is off."""
    return choice(additional_config, CHANGE_EDITS_KEY) == "on"


def require_edits(additional_config: Any, spec: "AttnResSpec | None") -> None:
    """Raise SettingError if a model cannot be served under the requested edits."""
    if (requested := edits(additional_config)) is not None:
        from attnres_serve.depth import static_edits

        static_edits.resolve(requested, spec)


def traces(additional_config: Any) -> bool:
    """Whether ``POST /v1/attn_res/trace`` is enabled; ``auto`` is on."""
    return choice(additional_config, TRACE_KEY) != "off"


def shard_tokens(additional_config: Any) -> int | None:
    """Tokens of the smallest step whose sites are sharded over workers; None for none.

    ``auto`` is off, because no gain has been measured yet.

    Raises:
        SettingError: the number is invalid, or 1, which cannot be sharded.
    """
    is_on = choice(additional_config, SHARD_KEY) == "on"
    tokens = (additional_config or {}).get(SHARD_TOKENS_KEY, SHARD_TOKENS)
    if type(tokens) is not int or tokens < 2:
        raise SettingError(
            f"{SHARD_TOKENS_KEY} is {tokens!r}; expected a whole number of at least 2."
        )
    return tokens if is_on else None


# Methods of speculative decoding with a model: a separate one, the checkpoint's head, or a head in
# another folder.
MODEL = "draft_model"
MTP = "mtp"
EAGLE, EAGLE3 = "eagle", "eagle3"
HEADS = (EAGLE, EAGLE3)
