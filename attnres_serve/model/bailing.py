"""The configuration of Ring-linear, of which transformers has no class."""

from transformers import PreTrainedConfig


class BailingHybridConfig(PreTrainedConfig):
    """Every key of its config.json is an attribute, as vLLM reads it."""

    model_type = "bailing_hybrid"
