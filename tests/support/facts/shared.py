"""What families have in common, for the files of each."""

from typing import Any

Config = dict[str, Any]

QKV = ("q_proj", "k_proj", "v_proj")
SIZES: Config = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
NO_HEAD_DIM = ("head_dim",)  # the class divides hidden_size by the number of heads
NORM_EPS = (*NO_HEAD_DIM, "rms_norm_eps")  # which the class calls norm_eps
# Mixtures of experts: the key for the number of experts differs from class to class.
EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
# DeepSeek's: the first layer is dense, and one expert sees every token.
DEEPSEEK_EXPERTS: Config = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
# Ling 2 and Ring-linear.
BAILING: Config = EXPERTS | {
    "num_experts": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
}
# Latent attention with 576 cached channels a token, and as many key heads as query heads.
LATENT: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
# Other rows than the one of which vLLM's kernels for CPUs are compiled.
NARROW_ROWS: Config = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}
MULTIPLIERS: Config = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
LINEAR: Config = {
    # Both halves have both kinds, without which vLLM has no such stages on CPU.
    "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
}
GELU = "gelu_pytorch_tanh"
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
SHORT_CONVOLUTION: Config = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-6,
}
STATE_SPACE: Config = {
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 64,
    "layer_norm_epsilon": 1e-6,
}


def tiny(*given: Config, without: tuple[str, ...] = (), **keys: Any) -> Config:
    """``SIZES`` changed by ``given`` and ``keys``, less the keys in ``without``."""
    config = dict(SIZES)
    for change in (*given, keys):
        config |= change
    return {key: value for key, value in config.items() if key not in without}


def yarn(**scales: float) -> dict[str, Any]:
    """Keys of config.json for a context of four times 128 tokens.

    With them stock vLLM rotates latent attention rightly on a CPU, so that a twin can be compared:
    such a family has them in its first variant.
    """
    usual = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    return {"rope_parameters": usual | {"original_max_position_embeddings": 128} | scales}


LINEAR_ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
REFUSED_LATENT: tuple[dict[str, Any], ...] = (
    {"head_dim": 32},
    {"num_key_value_heads": 2},
    {"attention_bias": True},
    {"tie_word_embeddings": True},
    {"kv_lora_rank": None},
    {"moe_layer_freq": 2},
    {"topk_group": 3},
    {"num_experts_per_tok": 9},
    LINEAR_ROPE,
    yarn(mscale=0.7),
    yarn(mscale_all_dim=0.7),
)
REFUSED_BAILING: tuple[dict[str, Any], ...] = (
    {"use_bias": True},
    {"use_qk_norm": None},
    {"score_function": "softmax"},
    {"norm_head": True},
    {"router_dtype": "bf16"},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_theta": None},
    {"head_dim": None},
    {"n_group": 3},
    {"quantization_config": {"quant_method": "compressed-tensors"}},
)
