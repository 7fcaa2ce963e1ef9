"""The resolver: from a config.json to a normalised checkpoint.

vLLM's configuration path and our commands both call ``resolve``, so a checkpoint means the same to
every process.
"""

from collections.abc import Callable, Collection
from typing import Any

from attnres_serve import formats
from attnres_serve.compat import source
from attnres_serve.families import FAMILIES, checks
from attnres_serve.formats import ambiguous, refused, strangers
from attnres_serve.formats.parsed_config import ParsedConfig

TensorNames = Callable[[], Collection[str] | None]


def resolve(
    config: dict[str, Any], trusts_code: bool = False, names: TensorNames = lambda: None
) -> ParsedConfig | None:
    """Recognise a checkpoint and translate its configuration.

    Args:
        config: the content of config.json.
        trusts_code: whether the caller may run the repository's code (``auto_map`` with
            trust_remote_code).  A checkpoint that matches no format is then left to its code; one
            that matches is ours in any case, as vLLM prefers built-in classes too.
        names: gives the names of the checkpoint's tensors, None if they are not available.  It is
            called only if config.json leaves the format open.

    Returns:
        The ParsedConfig, or None if this is no AttnRes checkpoint that we should touch.

    Raises:
        CheckpointError: for AttnRes that cannot be served exactly.
    """
    config = with_list_of_architectures(config)
    matching = [one for one in formats.SERVED.values() if one.matches(config)]
    is_left_to_its_code = not matching and trusts_code and _has_code(config)
    if not is_left_to_its_code:
        strangers.refuse_sisters(config)
    candidates = [one.translate(config) for one in matching]
    for parsed in candidates:
        FAMILIES[parsed.family].check(parsed.config)
        checks.check_ends(parsed.config, "config.json")
    if len(candidates) > 1:
        return ambiguous.distinguished(candidates, config, names())
    if candidates:
        return candidates[0]
    if config.get("model_type") == "transformer" and "auto_map" in config:
        return None  # a repository with code under a name that anyone may use
    if not is_left_to_its_code:
        refused.refuse_if_attnres(config, formats.SUPPORTED)
        strangers.refuse(config, names)
    return None


def _has_code(config: dict[str, Any]) -> bool:
    """Whether vLLM would run a repository's code if allowed: it prefers built-in classes."""
    name = strangers.architecture(config)
    is_listed = name is not None and source.listed_class(name) is not None
    return "auto_map" in config and not is_listed


def with_list_of_architectures(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json in which a single architecture as a string is a list of one."""
    architectures = config.get("architectures")
    return config | {"architectures": [architectures]} if isinstance(architectures, str) else config
