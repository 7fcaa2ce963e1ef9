"""Configurations of FLA's Gated DeltaNet and Kimi Delta Attention.

Every key of a config.json becomes an attribute, as vLLM expects.
"""

from transformers import PreTrainedConfig


class GatedDeltaNetConfig(PreTrainedConfig):
    model_type = "gated_deltanet"


class KDAConfig(PreTrainedConfig):
    model_type = "kda"
