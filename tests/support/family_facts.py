"""What the tests know of each family, read off Hugging Face's classes and not off ours.

The makers of checkpoints draw by it, and the tests of families run every variant.
"""

from dataclasses import dataclass, field
from typing import Any

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
        variants: further keys of config.json with which a model is served and compared, by a name.
        is_tiny: whether checkpoints are made of the sizes in ``tiny`` by Hugging Face's class.
        refused: keys of config.json with which vLLM would serve another model than Hugging Face's.
    """

    title: str
    options: tuple[str, ...] = ("head_dim",)
    biased: tuple[str, ...] = ()
    has_head_norms: bool = False
    has_gate: bool = False
    is_tiny: bool = False
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    refused: tuple[dict[str, Any], ...] = ()


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
    "glm4_moe": Facts(
        "Glm4Moe",
        is_tiny=True,
        variants={
            "": {},
            "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            "plain": {"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False},
        },
        refused=({"head_dim": None}, {"tie_word_embeddings": True}, {"hidden_act": "gelu"}),
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
