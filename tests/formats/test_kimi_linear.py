"""Kimi Linear's own format: what it claims, what its key counts, and what of Kimi K3 is refused."""

from typing import Any

import pytest
from facts import TINY
from facts.kimi_linear import KIMI_LAYERS

from attnres_serve.compat import source
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.resolve import resolve

CONFIG = TINY["kimi_linear"] | {"attn_res_block_size": 2}
LINEAR = KIMI_LAYERS["linear_attn_config"]
# As in config.json of Kimi-Linear-48B-A3B, and the paper's variant: blocks of three layers.
FULL = [*range(4, 27, 4), 27]
RELEASED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "attn_res_block_size": 3,
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_the_papers_variant() -> None:
    """Nine blocks of six sublayers, and the embedding; the context by the name that vLLM reads."""
    found = resolve(RELEASED)
    assert found is not None and found.spec is not None
    assert (found.format, found.base) == ("kimi_linear", "kimi_linear")
    assert found.spec.block_starts == tuple(range(0, 54, 6))
    assert found.spec.key_norm_eps == 1e-5 and found.spec.final_mix
    assert found.config["max_position_embeddings"] == 1048576
    assert "model_max_length" not in found.config


def test_the_key_counts_layers() -> None:
    found = resolve(CONFIG | {"attn_res_block_size": 3})
    assert found is not None and found.spec is not None
    assert found.spec.block_starts == (0, 6)


@pytest.mark.parametrize(
    "changes", [{"attn_res_block_size": None}, {"architectures": ["AnotherForCausalLM"]}], ids=str
)
def test_others_are_left_to_vllm(changes: dict[str, Any]) -> None:
    assert resolve(CONFIG | changes) is None


@pytest.mark.parametrize("odd", [0, -1, 2.0, True, "2", [2]])
def test_odd_block_sizes(odd: Any) -> None:
    with pytest.raises(CheckpointError, match=r"attn_res_block_size is .* number of layers"):
        resolve(CONFIG | {"attn_res_block_size": odd})


def test_two_names_of_one_value() -> None:
    """Those of Hugging Face's class are read where they say the same."""
    same = {"model_max_length": 2048, "n_group": 1, "num_experts_per_tok": 2}
    found = resolve(CONFIG | same)
    assert found is not None and not {*same} & {*found.config}
    with pytest.raises(CheckpointError, match="two names of one value"):
        resolve(CONFIG | {"num_experts_per_tok": 3})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routed_expert_hidden_size": 64}, "experts of Kimi K3 work on a latent"),
        ({"hidden_act": "situ", "activation_situ_beta": 2.0}, "supported without experts alone"),
        ({"hidden_act": "situ", "num_experts": None}, "activation_situ_beta is None"),
        ({"mla_use_output_gate": "yes"}, "mla_use_output_gate is 'yes'; expected true or false"),
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": -6.0}}, "gate_lower_bound is -6.0"),
        ({"linear_attn_config": LINEAR | {"gated": True}}, "gated: True, which vLLM's kimi_linear"),
        ({"mla_use_nope": None}, "mla_use_nope is None"),
    ],
)
def test_what_is_not_served(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "is_cpu_build", lambda: True)
    with pytest.raises(CheckpointError, match=said):
        resolve(CONFIG | changes)


def test_kimi_k3_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has it on a GPU alone; there it is none of ours."""
    text = {"attn_res_block_size": 12, "routed_expert_hidden_size": 3584}
    config = {"model_type": "kimi_k3", "text_config": text}
    monkeypatch.setattr(source, "is_cpu_build", lambda: True)
    with pytest.raises(CheckpointError, match="serve it on a GPU"):
        resolve(config)
    monkeypatch.setattr(source, "is_cpu_build", lambda: False)
    assert resolve(config) is None
