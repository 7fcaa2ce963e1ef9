"""What a model costs: the state of a sequence, and experts that no token sees are left out."""

from math import prod

import pytest
from facts import TINY

from attnres_serve.families import FAMILIES, experts, footprint, idle_experts


def vllms(name: str) -> list[tuple[int, ...]]:
    """The shapes of the state of one recurrent layer, by vLLM's own code."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    config = TINY[name]
    if name.startswith("lfm2"):
        return [*Shapes.short_conv_state_shape(1, config["hidden_size"], config["conv_L_cache"])]
    if name in ("qwen3_next", "gated_deltanet"):
        keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        own = (config[f"linear_{key}"] for key in (*keys, "conv_kernel_dim"))
        return [*Shapes.gated_delta_net_state_shape(1, *own)]
    if name == "kda":
        keys = ("num_key_heads", "key_head_dim", "conv_kernel_dim")
        heads, head, kernel = (config[f"linear_{key}"] for key in keys)
        return [*Shapes.kda_state_shape(1, heads, head, conv_kernel_size=kernel)]
    sizes = ("num_heads", "head_dim", "state_size")
    if name == "nemotron_h":
        sizes = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    heads, head, state = (config[size] for size in sizes)
    kernel = config["conv_kernel"]
    return [*Shapes.mamba2_state_shape(1, heads * head, 1, heads, head, state, kernel)]


@pytest.mark.parametrize(
    "name", ["gated_deltanet", "kda", "lfm2", "lfm2_moe", "mamba2", "nemotron_h", "qwen3_next"]
)
def test_state_is_vllms(name: str) -> None:
    """In bfloat16; some recurrences are kept in float32."""
    family, config = FAMILIES[name], TINY[name]
    widths = (2, 4) if name in ("nemotron_h", "kda", "gated_deltanet") else (2, 2)
    convolved = sum("conv" in tensor for tensor in family.shapes(config) if "weight" in tensor)
    layers = footprint.recurrent_layers(family.shapes(config))
    if name.startswith("lfm2"):
        layers = convolved // 3  # of its projections and itself
    assert layers
    one = sum(prod(shape) * width for shape, width in zip(vllms(name), widths, strict=False))
    assert family.state_bytes(config, 2) == layers * one


@pytest.mark.parametrize("name", sorted(TINY.keys() & FAMILIES.keys()))
def test_active_parameters(name: str) -> None:
    """One expert more that a token sees is one expert's parameters in every layer that has some."""
    family, config = FAMILIES[name], TINY[name]
    key = next((key for key in experts.CHOSEN if key in config), None)
    if key is None:
        assert family.idle_elements(config) == 0
        names = [tensor for tensor in family.shapes(config) if "expert" in tensor]
        assert names == [], f"{name} has experts, and experts.CHOSEN lacks the key of its config"
        return
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    number = next(config[count] for count in counts if count in config)
    idle = idle_experts.elements(family.shapes(config), 1)
    assert idle % (number - 1) == 0
    assert family.idle_elements(config) == idle // (number - 1) * (number - config[key])
    shapes = family.shapes(config).items()
    inside = [prod(shape) for name, shape in shapes if ".experts." in name or "put_linear" in name]
    assert idle // (number - 1) * number == sum(inside) > 0
