"""Configurations of Depth-Attention's repository, key by key, and what its training code adds."""

from typing import Any

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_qk_norm": True,
    "scale_embeds": False,
}
_LARGE = _COMMON | {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 6912,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.01,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.1",
}
_SMALL = _COMMON | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTNRES = {"baseline_mode": "attnres", "attnres_block_size": 12}
_DEPTH = {"use_depth_attention": True, "depth_attention_recent_window": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "AttnRes-3B": _LARGE | _ATTNRES | {"use_cache": False},
    "AttnRes-410M": _SMALL | _ATTNRES | {"attnres_recency_bias_init": 3.0},
    "Vanilla-3B": _LARGE | {"use_depth_attention": False},
    "Depth-Attention-3B": _LARGE | _DEPTH | {"depth_attention_stride": 24},
    "Depth-Attention-410M": _SMALL
    | _DEPTH
    | {
        "recurrent_model": True,
        "cross_layer_pattern": "depth_softmax",
        "cross_layer_mode": "depth_softmax",
        "depth_softmax_stride": 16,
        "depth_recent_window": 0,
        "depth_attention_stride": 16,
    },
    "DenseFormer-3B": _LARGE
    | {
        "baseline_mode": "denseformer",
        "denseformer_dwa_dilation": 1,
        "denseformer_dwa_period": 1,
    },
    "mHC-3B": _LARGE
    | {
        "baseline_mode": "mhc",
        "residual_baseline_num_streams": 4,
        "mhc_num_streams": 4,
        "mhc_alpha_init": 0.01,
        "mhc_sinkhorn_iters": 20,
        "use_cache": False,
    },
}
# Settings that it writes for every model.
SETTINGS: dict[str, Any] = {
    "depth_softmax_stride": 1,
    "depth_attention_stride": 1,
    "depth_recent_window": 0,
    "depth_attention_recent_window": 0,
    "classifier_dropout": 0,
    "output_hidden_states": False,
}
# What it writes for AttnRes.
SAVED: dict[str, Any] = SETTINGS | {
    "recurrent_model": True,
    "cross_layer_pattern": None,
    "baseline_mode": "attnres",
    "residual_baseline": None,
    "attnres_block_size": 12,
    "attnres_recency_bias_init": 3.0,
}
