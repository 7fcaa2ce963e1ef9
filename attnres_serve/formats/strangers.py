"""Models whose layers are connected in another way than by standard or Attention Residuals.

They have the architecture of a plain model, and some have its tensors too: vLLM would serve that
model in their place.
"""

import re
from typing import Any

from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import baseline_attnres, connections
from attnres_serve.formats.baseline_attnres import DEPTH_ATTENTION, SWITCH
from attnres_serve.formats.keys import says_nothing

_MODES = {
    "denseformer": "DenseFormer, whose layers read a learned average of all earlier outputs",
    "densetransformer": "DenseFormer, whose layers read a learned average of all earlier outputs",
    "mhc": "mHC, manifold-constrained hyper-connections of several residual streams",
}
_OLDER = ("cross_layer_pattern", "cross_layer_mode", "depth_softmax_stride")
_OWN_CODE = "run it with the code that it was trained with"


def refuse_sisters(config: dict[str, Any]) -> None:
    """Raise CheckpointError for the other models of the code that trained AttnRes-3B."""
    for key in baseline_attnres.MODES:
        if _is_off(key, value := config.get(key)):
            continue
        if sister := _MODES.get(re.sub(r"[\W_]", "", str(value)).lower()):
            raise CheckpointError(
                f"config.json has {key}: {value!r}, which is {sister}. It is another function than "
                f"Attention Residuals and is not supported; {_OWN_CODE}."
            )
        if baseline_attnres.means_attnres(value) and not baseline_attnres.matches(config):
            raise CheckpointError(
                f"config.json has {key}: {value!r} beside model_type {config.get('model_type')!r} "
                f"and architectures {config.get('architectures')!r}; the code that writes it has "
                "'llama' and ['LlamaForCausalLM'] alone."
            )
        if not baseline_attnres.means_attnres(value) and config.get("model_type") == "llama":
            raise CheckpointError(
                f"config.json has {key}: {value!r}, which is no baseline that is known; supported "
                f"is {key} 'attnres', or the key removed from a model with standard residuals."
            )
    for key in (*DEPTH_ATTENTION, *_OLDER):
        if key in config and not _is_off(key, config[key]) and not _is_idle(key, config):
            raise CheckpointError(
                f"config.json has {key}: {config[key]!r}, a setting of Depth-Attention (arXiv "
                "2606.05014), in which attention also reads keys and values of earlier layers. It "
                "adds no tensor, so it would be served as a plain model and answer wrongly; "
                f"{_OWN_CODE}."
            )


def refuse(config: dict[str, Any]) -> None:
    """Raise CheckpointError for a plain model with a key that connects its layers otherwise.

    Plain are the families that vLLM has. Every key of theirs that their class knows may be there.
    """
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    for family in FAMILIES.values():
        if not family.is_stock or family.stock_architecture != architecture:
            continue
        for key, value in config.items():
            is_read = family.name in connections.READ.get(key, ())
            is_idle = _is_off(key, value) or _is_idle(key, config)
            if connections.speaks_of_them(key) and not is_read and not is_idle:
                raise CheckpointError(
                    f"config.json has {key}: {value!r}, by its name a setting of how layers are "
                    f"connected, which {architecture} does not have; vLLM would serve a plain "
                    f"{family.title} with standard residuals instead. {_OWN_CODE.capitalize()}, or "
                    "remove the key if it was trained without."
                )


def _is_off(key: str, value: Any) -> bool:
    """Whether a key says nothing."""
    word = value.strip().lower() if isinstance(value, str) else None
    return word in ("", "none") or says_nothing(key, value)


def _is_idle(key: str, config: dict[str, Any]) -> bool:
    """Whether a key is of Depth-Attention, which is stated to be off."""
    return key in DEPTH_ATTENTION and config.get(SWITCH) is False
