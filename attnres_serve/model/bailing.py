"""Configurations of Ling and Ring; transformers has no classes for them.

Every key of a config.json becomes an attribute, as vLLM expects.
"""

from transformers import PreTrainedConfig


class BailingHybridConfig(PreTrainedConfig):
    model_type = "bailing_hybrid"


class BailingMoeConfig(PreTrainedConfig):
    model_type = "bailing_moe"
