"""Configurations of Ling and Ring, of which transformers has no classes.

Every key of a config.json is an attribute, as vLLM reads it.
"""

from transformers import PreTrainedConfig


class BailingHybridConfig(PreTrainedConfig):
    model_type = "bailing_hybrid"


class BailingMoeConfig(PreTrainedConfig):
    model_type = "bailing_moe"
