"""Prefix caching of hybrid models on CPU, which vLLM turns on by default for all of them.

vLLM 0.32 and 0.33 cannot run two kinds of them with it.  Mamba2 layers end by an IndexError at the
first prompt of more than one chunk: the scan on CPU returns the final state of a sequence, and the
cache asks for the state of every chunk.  Beside latent attention, Kimi Delta Attention continued a
cached state with other answers; lightning attention was not tried.
"""

from typing import Any

from attnres_serve.compat.patch import Patch
from attnres_serve.families import BY_ARCHITECTURE
from attnres_serve.families.limits import Limit


def _off_by_default(supported: Any) -> Any:
    """Leave prefix caching of AttnRes models off where it cannot run.

    To be applied on CPU, before an engine's arguments are completed.  Whoever asks for it is
    refused.
    """

    def is_prefix_caching_supported(self) -> bool:
        return problem(self) is None and supported.fget(self)

    return property(is_prefix_caching_supported)


def problem(model_config) -> str | None:
    """One sentence if an AttnRes model cannot run with prefix caching on CPU, else None.

    Args:
        model_config: vLLM's.
    """
    named = getattr(model_config.hf_config, "architectures", None) or ()
    families = [BY_ARCHITECTURE[name] for name in named if name in BY_ARCHITECTURE]
    if not families:
        return None
    (family,) = families
    if Limit.PREFIX_CACHING not in family.limits:
        return None
    return (
        f"--enable-prefix-caching is set, and vLLM cannot cache prefixes of {family.title} on this "
        "CPU; leave it out."
    )


PATCH = Patch(
    targets=("vllm.config.model:ModelConfig.is_prefix_caching_supported",),
    make=_off_by_default,
    why="vLLM caches prefixes that it cannot continue",
    models="AttnRes models with [no prefix cache](families.md#prefixes) on CPU",
    first=(0, 28),
    report="prefix-caching-of-recurrent-layers-on-cpu",
)
