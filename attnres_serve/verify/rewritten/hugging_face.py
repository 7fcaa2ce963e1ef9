"""A checkpoint in Hugging Face's class, in float64."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnres_serve.verify.rewritten.wide import wide_class

_UNREAD = ("architectures", "model_type", "attn_res")


def config(model_type: str, stated: Mapping[str, Any]) -> Any:
    """Hugging Face's configuration of a model type, from a config.json.

    Raises:
        ValueError: Hugging Face has no such class.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    # By the name of the class: other packages register classes for some types, like fla for mamba2.
    if model_type not in CONFIG_MAPPING_NAMES:
        raise ValueError(f"Hugging Face has no model type {model_type!r}")
    # The default padding token of a class may be beyond a small vocabulary.
    read = {"pad_token_id": None} | {k: v for k, v in stated.items() if k not in _UNREAD}
    built = getattr(transformers, CONFIG_MAPPING_NAMES[model_type]).from_dict(read)
    if type(built) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"Hugging Face has no language model of the type {model_type!r}")
    built._attn_implementation = built._experts_implementation = "eager"
    return built


def build(config: Any, weights: Mapping[str, Tensor]) -> Any:
    """The causal language model, loaded by the rules of its class for names and experts.

    Args:
        config: Hugging Face's configuration.
        weights: every tensor, by its name in a checkpoint.

    Raises:
        ValueError: the class needs other tensors.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    cls = wide_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    model, report = cls.from_pretrained(
        None,
        config=config,
        state_dict=_needed(config, weights),
        dtype=torch.float64,
        output_loading_info=True,
    )
    if odd := sorted(str(name) for names in report.values() for name in names):
        raise ValueError(f"missing, unexpected or misshapen tensors: {odd}")
    return in_float64(model.eval())


def _needed(config: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without those of draft layers after the last layer."""
    last = config.num_hidden_layers
    further = range(last, last + (getattr(config, "num_nextn_predict_layers", 0) or 0))
    behind = tuple(f"model.layers.{layer}." for layer in further)
    return {name: tensor for name, tensor in weights.items() if not name.startswith(behind)}


def in_float64(model: Any) -> Any:
    """A model of recompiled classes with its parameters and tables in float64."""
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            # The loader fills the tables of the special kinds of rope by functions that were not
            # recompiled.
            module.__init__(module.config)
    return model.double()
