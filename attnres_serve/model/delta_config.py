"""Configurations of FLA's Gated DeltaNet and Kimi Delta Attention.

Every key of a config.json is an attribute, as vLLM reads it.
"""

from transformers import PreTrainedConfig


class GatedDeltaNetConfig(PreTrainedConfig):
    model_type = "gated_deltanet"


class KDAConfig(PreTrainedConfig):
    model_type = "kda"
