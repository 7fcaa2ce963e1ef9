"""A tiny config.json of every family: four layers of 128 channels, 256 tokens, float32.

Keys are Hugging Face's model types, and names of variants where one type has several. The sizes are
those with which vLLM runs on a CPU: its latent attention decodes only a latent of 512 channels
and 64 rotated ones, and gpt-oss' experts want widths that are multiples of 128.
"""

from typing import Any

Config = dict[str, Any]

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
SIGMOID: Config = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

# Latent attention with 576 cached channels a token, and as many key heads as query heads.
LATENT: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
KIMI_EXPERTS: Config = {
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
}
KIMI_LAYERS: Config = {
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 3, 4],
        "full_attn_layers": [2],
        "head_dim": 32,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
}
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


def _config(
    model_type: str, class_name: str, *given: Config, without: tuple[str, ...] = (), **keys: Any
) -> Config:
    """A config.json: ``SIZES`` changed by ``given`` and ``keys``, less the keys in ``without``."""
    config = {"architectures": [class_name], "model_type": model_type, **SIZES}
    for change in (*given, keys):
        config |= change
    return {key: value for key, value in config.items() if key not in without}


TINY: dict[str, Config] = {
    # Dense.
    "llama": _config("llama", "LlamaForCausalLM"),
    "qwen2": _config("qwen2", "Qwen2ForCausalLM", without=NO_HEAD_DIM),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM"),
    "mistral": _config("mistral", "MistralForCausalLM", sliding_window=None),
    "ministral3": _config(
        "ministral3",
        "Ministral3ForCausalLM",
        # Hugging Face's class scales queries beyond the original length.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 2048,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "phi3": _config(
        "phi3", "Phi3ForCausalLM", sliding_window=None, original_max_position_embeddings=2048
    ),
    "glm4": _config("glm4", "Glm4ForCausalLM", partial_rotary_factor=0.5),
    "ernie4_5": _config("ernie4_5", "Ernie4_5ForCausalLM", use_bias=False),
    "apertus": _config("apertus", "ApertusForCausalLM", hidden_act="xielu", without=NO_HEAD_DIM),
    "granite": _config("granite", "GraniteForCausalLM", MULTIPLIERS, without=NO_HEAD_DIM),
    # Dense with norms that multiply by 1 + w.
    "gemma": _config("gemma", "GemmaForCausalLM", hidden_act=GELU, tie_word_embeddings=True),
    "gemma2": _config(
        "gemma2",
        "Gemma2ForCausalLM",
        hidden_act=GELU,
        hidden_activation=GELU,
        query_pre_attn_scalar=32,
        sliding_window=64,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    ),
    "gemma3_text": _config(
        "gemma3_text",
        "Gemma3ForCausalLM",
        WINDOWS,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        },
        hidden_activation=GELU,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
        without=("hidden_act",),
    ),
    # Mixtures of experts.
    "mixtral": _config("mixtral", "MixtralForCausalLM", LOCAL_EXPERTS, sliding_window=None),
    "qwen2_moe": _config(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        EXPERTS,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        without=NO_HEAD_DIM,
    ),
    "qwen3_moe": _config(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        EXPERTS,
        num_experts=8,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
    ),
    "olmoe": _config(
        "olmoe",
        "OlmoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        without=NO_HEAD_DIM,
    ),
    "glm4_moe": _config(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        DEEPSEEK_EXPERTS,
        partial_rotary_factor=0.5,
        use_qk_norm=True,
        without=("moe_layer_freq",),
    ),
    "gpt_oss": _config(
        "gpt_oss",
        "GptOssForCausalLM",
        LOCAL_EXPERTS,
        intermediate_size=128,
        rms_norm_eps=1e-5,
        attention_bias=True,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "ernie4_5_moe": _config(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
        moe_layer_interval=1,
        use_bias=False,
    ),
    "llama4_text": _config(
        "llama4_text",
        "Llama4ForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=256,
        attention_chunk_size=128,
        no_rope_layers=[1, 0, 1, 1],
        attn_temperature_tuning=False,
        use_qk_norm=True,
    ),
    "exaone_moe": _config(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        EXPERTS,
        WINDOWS,
        num_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        sliding_window_pattern="LLLG",
    ),
    # Hugging Face has no class of it.
    "bailing_moe": _config(
        "bailing_moe",
        "BailingMoeV2ForCausalLM",
        EXPERTS,
        num_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        use_bias=False,
        use_qkv_bias=False,
        use_qk_norm=True,
        use_rmsnorm=True,
        norm_head=False,
        partial_rotary_factor=0.5,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_dropout=0.0,
        embedding_dropout=0.0,
        output_dropout=0.0,
    ),
    "granitemoe": _config(
        "granitemoe", "GraniteMoeForCausalLM", LOCAL_EXPERTS, MULTIPLIERS, without=NO_HEAD_DIM
    ),
    # Latent attention and a mixture of experts.
    "deepseek_v2": _config(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        LATENT,
        DEEPSEEK_EXPERTS,
        # Hugging Face's class ignores it, vLLM's does not.
        norm_topk_prob=False,
        topk_method="greedy",
        without=NO_HEAD_DIM,
    ),
    "deepseek_v3": _config(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        LATENT,
        DEEPSEEK_EXPERTS,
        SIGMOID,
        q_lora_rank=64,
        n_group=2,
        routed_scaling_factor=2.5,
        without=NO_HEAD_DIM,
    ),
    "moonlight": _config(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        LATENT,
        DEEPSEEK_EXPERTS,
        SIGMOID,
        routed_scaling_factor=2.446,
        without=NO_HEAD_DIM,
    ),
    "glm4_moe_lite": _config(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        LATENT,
        DEEPSEEK_EXPERTS,
        topk_method="noaux_tc",
        without=NO_HEAD_DIM,
    ),
    # Gated DeltaNet, gated attention and a mixture of experts.
    "qwen3_next": _config(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        EXPERTS,
        LINEAR,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        partial_rotary_factor=0.25,
    ),
    # Kimi Delta Attention, latent attention and a mixture of experts.
    "kimi_linear": _config(
        "kimi_linear",
        "KimiLinearForCausalLM",
        LATENT,
        KIMI_EXPERTS,
        KIMI_LAYERS,
        without=NO_HEAD_DIM,
    ),
    # Lightning attention, latent attention and a mixture of experts; Hugging Face has no class.
    "bailing_hybrid": _config(
        "bailing_hybrid",
        "BailingMoeV2_5ForCausalLM",
        LATENT,
        EXPERTS,
        num_experts=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        use_bias=False,
        use_qkv_bias=False,
        use_qk_norm=True,
        layer_group_size=2,
        group_norm_size=2,
        partial_rotary_factor=0.5,
        rope_theta=10000.0,
    ),
    # Kimi Delta Attention and gated attention; Hugging Face has no class.
    "alice_ai": _config(
        "alice_ai",
        "AliceAIForCausalLM",
        EXPERTS,
        LINEAR,
        num_experts=8,
        shared_expert_intermediate_size=64,
        linear_num_value_heads=2,
        linear_value_head_dim=32,
        partial_rotary_factor=0.25,
        without=("intermediate_size",),
    ),
    # Short convolutions between layers of attention.
    "lfm2": _config(
        "lfm2",
        "Lfm2ForCausalLM",
        SHORT_CONVOLUTION,
        conv_dim=128,
        block_dim=128,
        block_ff_dim=256,
        block_multiple_of=1,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
        without=NORM_EPS,
    ),
    "lfm2_moe": _config(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        SHORT_CONVOLUTION,
        EXPERTS,
        num_dense_layers=1,
        use_expert_bias=True,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        without=NORM_EPS,
    ),
    # One sublayer a layer.
    "nemotron_h": _config(
        "nemotron_h",
        "NemotronHForCausalLM",
        STATE_SPACE,
        hybrid_override_pattern="M*M-",
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        mlp_hidden_act="relu2",
        use_conv_bias=True,
        use_bias=False,
        mamba_proj_bias=False,
        mlp_bias=False,
        attention_bias=False,
        time_step_min=1e-6,
        without=("rms_norm_eps", "hidden_act"),
    ),
    "mamba2": _config(
        "mamba2",
        "Mamba2ForCausalLM",
        STATE_SPACE,
        num_heads=8,
        state_size=32,
        time_step_rank=8,
        without=("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    ),
}
