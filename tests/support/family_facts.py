"""What the tests know of each family, read off Hugging Face's classes and not off ours.

The makers of checkpoints draw by it, and the tests of families run every variant.
"""

from dataclasses import dataclass, field
from typing import Any

from tiny import KIMI_LAYERS

QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Facts:
    """A family.

    Attributes:
        title: how the names of its classes begin.
        options: keys that its config.json has and not every family's.
        biased: projections that always have a bias.
        has_head_norms: whether heads have a query and a key norm.
        has_gate: whether attention has a gate on what it returns.
        has_stages: whether vLLM's class can be split into pipeline stages.
        compiles: whether vLLM compiles its class.
        sublayers: of every layer, as the names of their queries call them.
        variants: further keys of config.json with which a model is served and compared, by a name.
        workaround: what mends plain vLLM where its answers are wrong without, as module:function.
        is_tiny: whether checkpoints are made of the sizes in ``tiny`` by Hugging Face's class.
        caches_prefixes: whether vLLM has a prefix cache for it on every CPU; for latent attention
            it needs AMX.
        refused: keys of config.json with which vLLM would serve another model than Hugging Face's.
    """

    title: str
    options: tuple[str, ...] = ("head_dim",)
    biased: tuple[str, ...] = ()
    has_head_norms: bool = False
    has_gate: bool = False
    workaround: str | None = None
    has_stages: bool = True
    compiles: bool = True
    sublayers: tuple[str, ...] = ("self_attention", "mlp")
    is_tiny: bool = False
    caches_prefixes: bool = True
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    refused: tuple[dict[str, Any], ...] = ()


def yarn(**scales: float) -> dict[str, Any]:
    """Keys of config.json for a context of four times 128 tokens."""
    usual = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    return {"rope_parameters": usual | {"original_max_position_embeddings": 128} | scales}


# Of latent attention. With yarn stock vLLM rotates rightly on CPU, so that a twin can be compared;
# it is the first variant for that.
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
REFUSED_LATENT: tuple[dict[str, Any], ...] = (
    {"head_dim": 32},
    {"num_key_value_heads": 2},
    {"attention_bias": True},
    {"tie_word_embeddings": True},
    {"kv_lora_rank": None},
    {"moe_layer_freq": 2},
    {"topk_group": 3},
    {"num_experts_per_tok": 9},
    LINEAR,
    yarn(mscale=0.7),
    yarn(mscale_all_dim=0.7),
)

# Of linear_attn_config: layers in both lists, in none or beyond the last, and what K3 has.
KIMI_ODD: tuple[dict[str, Any], ...] = (
    {"full_attn_layers": [2, 3]},
    {"kda_layers": [1, 3]},
    {"kda_layers": [1, 3, 4, 5]},
    {"kda_layers": [0, 1, 3, 4]},
    {"head_dim": None},
    {"use_full_rank_gate": True},
    {"gate_lower_bound": -5.0},
)

FACTS = {
    "llama": Facts(
        "Llama",
        options=("head_dim", "attention_bias", "mlp_bias"),
        refused=({"sliding_window": 24}, {"head_dim": 15}),
    ),
    "gated_llama": Facts(
        "GatedLlama", options=("head_dim", "attention_bias", "mlp_bias"), has_gate=True
    ),
    "mistral": Facts(
        "Mistral",
        variants={
            "": {"sliding_window": None},
            "window": {"sliding_window": 24},
            "stated window": {"sliding_window": 24, "layer_types": ["sliding_attention"] * 4},
        },
        refused=(
            {"attention_bias": True},
            {"use_sliding_window": True},
            {"sliding_window": 24, "layer_types": ["full_attention"] * 2},
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}},
        ),
    ),
    "qwen2": Facts("Qwen2", options=(), biased=QKV, refused=({"use_sliding_window": True},)),
    "qwen3": Facts("Qwen3", options=("head_dim", "attention_bias"), has_head_norms=True),
    "mixtral": Facts("Mixtral", is_tiny=True, refused=({"sliding_window": 24},)),
    "qwen2_moe": Facts(
        "Qwen2Moe",
        is_tiny=True,
        variants={"": {}, "dense layer": {"mlp_only_layers": [1]}},
        refused=({"qkv_bias": False}, {"use_sliding_window": True}, {"head_dim": 64}),
    ),
    "qwen3_moe": Facts(
        "Qwen3Moe",
        is_tiny=True,
        variants={"": {}, "dense layer": {"mlp_only_layers": [1], "norm_topk_prob": False}},
        refused=({"attention_bias": True}, {"use_sliding_window": True}),
    ),
    "olmoe": Facts(
        "Olmoe",
        is_tiny=True,
        refused=({"norm_topk_prob": True}, {"rms_norm_eps": 1e-6}, {"clip_qkv": 8.0}),
    ),
    "phi3": Facts("Phi3", is_tiny=True, refused=({"sliding_window": 24}, {"hidden_act": "gelu"})),
    "glm4": Facts(
        "Glm4",
        is_tiny=True,
        variants={"": {}, "biases": {"attention_bias": True}},
        refused=({"hidden_act": "gelu"}, {"partial_rotary_factor": 0}),
    ),
    "ernie4_5": Facts("Ernie4_5", is_tiny=True, refused=({"use_bias": True},)),
    "gemma": Facts("Gemma", is_tiny=True, refused=({"hidden_act": "silu"},)),
    "gemma2": Facts(
        "Gemma2",
        is_tiny=True,
        refused=({"hidden_activation": "silu"}, {"layer_types": ["conv"] * 4}),
    ),
    "deepseek_v2": Facts(
        "DeepseekV2",
        is_tiny=True,
        caches_prefixes=False,
        variants={
            "yarn": yarn(mscale=0.707, mscale_all_dim=0.707),
            "": {},
            "query latent, groups, another epsilon": {
                "q_lora_rank": 64,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 16.0,
                "rms_norm_eps": 1e-3,
            },
        },
        refused=(
            *REFUSED_LATENT,
            {"norm_topk_prob": True},
            {"n_group": 2},
            {"n_group": None},
            {"topk_method": "noaux_tc"},
            {"scoring_func": "sigmoid"},
            {"mlp_bias": True},
        ),
    ),
    "deepseek_v3": Facts(
        "DeepseekV3",
        is_tiny=True,
        caches_prefixes=False,
        variants={
            "yarn": yarn(mscale=1.0, mscale_all_dim=0.5),
            "": {},
            "moonlight": {"q_lora_rank": None, "n_group": 1, "routed_scaling_factor": 2.446},
            "another epsilon": {"rms_norm_eps": 1e-3, "norm_topk_prob": False},
        },
        refused=(
            *REFUSED_LATENT,
            {"topk_method": None},
            {"scoring_func": "softmax"},
            {"rope_interleave": False},
            {"n_group": 8},
        ),
    ),
    "glm4_moe_lite": Facts(
        "Glm4MoeLite",
        is_tiny=True,
        caches_prefixes=False,
        variants={
            "yarn": yarn(),
            "": {},
            "dense layers": {
                "q_lora_rank": 64,
                "first_k_dense_replace": 2,
                "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
                "rms_norm_eps": 1e-3,
            },
        },
        refused=(
            *REFUSED_LATENT,
            {"first_k_dense_replace": None},
            {"first_k_dense_replace": 2},
            {"mlp_layer_types": ["sparse", "dense"] * 2},
            {"rope_interleave": False},
        ),
    ),
    "kimi_linear": Facts(
        "KimiLinear",
        is_tiny=True,
        compiles=False,
        caches_prefixes=False,
        workaround="portable_stock:kimi_linear",
        variants={
            "": {},
            "query latent, groups, another epsilon": {
                "q_lora_rank": 64,
                "first_k_dense_replace": 2,
                "num_shared_experts": 2,
                "num_expert_group": 4,
                "topk_group": 2,
                "moe_renormalize": False,
                "rms_norm_eps": 1e-3,
            },
            "two of each, wider heads": {
                "first_k_dense_replace": 0,
                "linear_attn_config": {
                    "kda_layers": [2, 3],
                    "full_attn_layers": [1, 4],
                    "head_dim": 48,
                    "num_heads": 4,
                    "short_conv_kernel_size": 3,
                },
            },
        },
        refused=(
            {"num_key_value_heads": 2},
            {"attention_bias": True},
            {"tie_word_embeddings": True},
            {"kv_lora_rank": None},
            {"mla_use_nope": False},
            {"mla_use_output_gate": True},
            {"moe_layer_freq": 2},
            {"moe_router_activation_func": "softmax"},
            {"use_grouped_topk": False},
            {"topk_group": 3},
            {"num_expert_group": 8},
            {"num_experts_per_token": 9},
            {"n_shared_experts": 2},
            {"routed_scaling_factor": None},
            {"first_k_dense_replace": None},
            {"mlp_layer_types": ["dense"] * 4},
            {"linear_head_dim": 64},
            {"hidden_act": "situ"},
            {"routed_expert_hidden_size": 64},
            {"linear_attn_config": None},
            *({"linear_attn_config": KIMI_LAYERS["linear_attn_config"] | one} for one in KIMI_ODD),
        ),
    ),
    "bailing_hybrid": Facts(
        "BailingMoeV2_5",
        is_tiny=True,
        caches_prefixes=False,
        workaround="portable_stock:bailing_hybrid",
        variants={
            "": {},
            "query latent, other groups": {
                "q_lora_rank": 64,
                "layer_group_size": 4,
                "group_norm_size": 1,
                "first_k_dense_replace": 0,
            },
        },
        refused=(
            {"num_key_value_heads": 2},
            {"layer_group_size": 3},
            {"layer_group_size": 1},
            {"group_norm_size": 3},
            {"use_bias": True},
            {"use_qk_norm": False},
            {"linear_silu": True},
            {"score_function": "softmax"},
            {"router_dtype": "bf16"},
            {"rms_norm_eps": 1e-5},
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_theta": None},
            {"head_dim": None},
            {"n_group": 3},
        ),
    ),
    "apertus": Facts(
        "Apertus",
        is_tiny=True,
        workaround="xielu:in_the_models_type",
        variants={"": {}, "biases": {"attention_bias": True, "tie_word_embeddings": True}},
        refused=(
            {"hidden_act": "silu"},
            {"logit_scale": 2.0},
            {"qkv_bias": True},
            {"qk_norm": False},
        ),
    ),
    "lfm2": Facts(
        "Lfm2",
        is_tiny=True,
        workaround="rotary:rotate_every_head",
        variants={
            "": {},
            "biases and older keys": {
                "block_auto_adjust_ff_dim": True,
                "block_ff_dim": 288,
                "block_multiple_of": 64,
                "conv_bias": True,
                "full_attn_idxs": [1, 2],
                "layer_types": None,
                "tie_embedding": True,
            },
        },
        refused=(
            {"conv_dim": 256},
            {"block_dim": 256},
            {"tie_word_embeddings": False},
            {"tie_embedding": False},
            {"head_dim": 64},
            {"layer_types": ["conv"] * 3 + ["sliding_attention"]},
        ),
    ),
    "lfm2_moe": Facts(
        "Lfm2Moe",
        is_tiny=True,
        workaround="rotary:rotate_every_head",
        variants={
            "": {},
            "no bias of experts": {
                "conv_bias": True,
                "norm_topk_prob": False,
                "num_dense_layers": 2,
                "routed_scaling_factor": 1.5,
                "use_expert_bias": False,
            },
        },
        refused=(
            {"tie_word_embeddings": False},
            {"tie_embedding": False},
            {"head_dim": 64},
            {"layer_types": ["conv"] * 3 + ["sliding_attention"]},
        ),
    ),
    "qwen3_next": Facts(
        "Qwen3Next",
        is_tiny=True,
        workaround="portable_stock:qwen3_next",
        variants={
            "": {},
            "dense layer, older keys": {
                "layer_types": None,
                "full_attention_interval": 3,
                "linear_num_value_heads": 2,
                "linear_conv_kernel_dim": 3,
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
                "partial_rotary_factor": 0.5,
                "rope_theta": 50000.0,
            },
        },
        refused=(
            {"attention_bias": True},
            {"qkv_bias": True},
            {"tie_word_embeddings": True},
            {"head_dim": None},
            {"hidden_act": "gelu"},
            {"layer_scale": True},
            {"layer_types": ["linear_attention"] * 4},
            {"layer_types": None, "full_attention_interval": 1},
            {"linear_num_value_heads": 3},
            {"linear_conv_kernel_dim": 1},
            {"num_experts": 0},
            {"num_experts_per_tok": 5},
            {"shared_expert_intermediate_size": 0},
            {"decoder_sparse_step": 5},
            {"mlp_only_layers": [0, 1, 2, 3]},
        ),
    ),
    "alice_ai": Facts(
        "AliceAI",
        is_tiny=True,
        variants={
            "": {},
            "one more of some": {
                "head_dim": 64,
                "linear_key_head_dim": 48,
                "linear_value_head_dim": 48,
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 4,
                "linear_conv_kernel_dim": 3,
                "norm_topk_prob": False,
                "partial_rotary_factor": 1.0,
                "rms_norm_eps": 1e-3,
            },
        },
        refused=(
            {"attention_bias": True},
            {"tie_word_embeddings": True},
            {"head_dim": None},
            {"hidden_act": "gelu"},
            {"layer_types": None},
            {"layer_types": ["linear_attention"] * 4},
            {"partial_rotary_factor": None},
            {"linear_num_value_heads": 4},
            {"linear_value_head_dim": 64},
            {"linear_conv_kernel_dim": 1},
            {"num_experts": 1},
            {"num_experts_per_tok": 9},
            {"shared_expert_intermediate_size": 0},
            {"decoder_sparse_step": 2},
            {"mlp_only_layers": [1]},
            {"kda_allow_negative_eigenvalues": True},
            {"router_score_function": "softmax"},
            {"router_bias_correction": False},
            {"mtp_num_hidden_layers": "one"},
        ),
    ),
    "mamba2": Facts(
        "Mamba2",
        is_tiny=True,
        has_stages=False,
        workaround="hybrid_prefix_caching:off_by_default",
        caches_prefixes=False,
        sublayers=("mixer",),
        variants={"": {}, "biases": {"use_bias": True, "tie_word_embeddings": True}},
        refused=(
            {"n_groups": 2},
            {"rms_norm": False},
            {"time_step_limit": [0.01, 1.0]},
            {"hidden_act": "gelu"},
            {"rms_norm_eps": 1e-5},
        ),
    ),
    "nemotron_h": Facts(
        "NemotronH",
        is_tiny=True,
        workaround="hybrid_prefix_caching:off_by_default",
        caches_prefixes=False,
        sublayers=("mixer",),
        variants={"": {}, "groups": {"n_groups": 2, "use_bias": True, "mlp_bias": True}},
        refused=(
            {"time_step_min": 0.001},
            {"hybrid_override_pattern": "M*E-"},
            {"hybrid_override_pattern": "M*-"},
            {"attention_bias": True},
            {"mlp_hidden_act": "silu"},
            {"tie_word_embeddings": True},
            {"sliding_window": 24},
        ),
    ),
    "ministral3": Facts(
        "Ministral3",
        is_tiny=True,
        variants={
            "": {},
            "scaled queries": {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 32,
                    "max_position_embeddings": 512,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.3,
                }
            },
        },
        refused=(
            {"sliding_window": 24},
            {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        ),
    ),
    "gemma3_text": Facts(
        "Gemma3",
        is_tiny=True,
        variants={
            "": {},
            "older keys": {
                "attention_bias": True,
                "layer_types": None,
                "rope_local_base_freq": 20000.0,
                "rope_parameters": None,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
                "rope_theta": 60000.0,
                "sliding_window_pattern": 2,
                "tie_word_embeddings": False,
            },
        },
        refused=(
            {"use_bidirectional_attention": True},
            {"attn_logit_softcapping": 50.0},
            {"hidden_activation": "silu"},
            {"sliding_window": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
    ),
    "glm4_moe": Facts(
        "Glm4Moe",
        is_tiny=True,
        variants={
            "": {},
            "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            "plain": {"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False},
        },
        refused=(
            {"head_dim": None},
            {"tie_word_embeddings": True},
            {"hidden_act": "gelu"},
            {"n_group": 8},
            {"topk_group": 2},
        ),
    ),
    "gpt_oss": Facts(
        "GptOss",
        is_tiny=True,
        refused=(
            {"head_dim": None},
            {"rms_norm_eps": 1e-6},
            {"attention_bias": False},
            {"swiglu_limit": 5.0},
            {"tie_word_embeddings": True},
            {"sliding_window": None},
            {"layer_types": ["full_attention"] * 4},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
            {"quantization_config": {"quant_method": "mxfp4"}},
        ),
    ),
    "exaone_moe": Facts(
        "ExaoneMoe",
        is_tiny=True,
        variants={
            "": {},
            "groups": {
                "num_experts": 8,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.5,
                "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            },
        },
        refused=(
            {"layer_types": ["full_attention"] * 4},
            {"layer_types": None},
            {"sliding_window": None},
            {"swiglu_limits": [7.0] * 4},
            {"n_group": 3},
            {"num_experts": 0},
        ),
    ),
    "granite": Facts(
        "Granite",
        is_tiny=True,
        variants={"": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
        refused=({"layer_types": ["full_attention"] * 4}, {"layer_rope_theta": [0.0] * 4}),
    ),
    "granitemoe": Facts(
        "GraniteMoe",
        is_tiny=True,
        refused=({"attention_bias": True}, {"head_dim": 64}),
    ),
    "ernie4_5_moe": Facts(
        "Ernie4_5_Moe",
        is_tiny=True,
        # Stock vLLM on CPU leaves out the bias that chooses experts. Where all are chosen it is
        # right, so that a twin can be compared; it is the first variant for that.
        variants={
            "all experts": {"moe_k": 4},
            "": {},
            "sparse": {"moe_layer_interval": 2, "moe_num_shared_experts": 0},
        },
        refused=({"use_bias": True}, {"moe_norm_min": 1.0}),
    ),
    "llama4_text": Facts(
        "Llama4",
        is_tiny=True,
        variants={
            "": {},
            # The twin is the first variant's: stock vLLM has the temperature by --max-model-len.
            "temperature": {
                "attn_temperature_tuning": True,
                "floor_scale": 32,
                "use_qk_norm": False,
                "interleave_moe_layer_step": 1,
            },
        },
        refused=(
            {"attention_bias": True},
            {"num_experts_per_tok": 2},
            {"head_dim": None},
            {"attention_chunk_size": None},
            {"attention_chunk_size": 64},
            {"no_rope_layer_interval": 0},
            {"no_rope_layers": [1]},
            {"layer_types": ["full_attention"] * 4},
            {"moe_layers": [0]},
        ),
    ),
}
