"""Kimi K3 in float64: Hugging Face's Kimi Linear with the additions of Kimi K3.

Full-rank gate: the gate of KDA is one projection, not two.
Lower bound b: log decay = b sigmoid(exp(A_log) (f + dt_bias)), where without one it is
-exp(A_log) softplus(f + dt_bias).
Output gate of latent attention: its heads' outputs times sigmoid(g_proj x), before o_proj.
SiTU: beta tanh(g / beta) sigmoid(g) * c tanh(u / c), with c = inf by default.
Latent: experts read routed_expert_down_proj x; the weighted sum of their outputs is normed and goes
through routed_expert_up_proj. Routers and shared experts read x.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from attnres_serve.verify.rewritten.hugging_face import in_float64
from attnres_serve.verify.rewritten.wide import wide_module

NAME, PREFIX = "kimi_k3", "language_model."
BETAS = ("activation_situ_beta", "activation_situ_linear_beta")
LATENT, LATENT_NORM = "routed_expert_hidden_size", "latent_moe_use_norm"
KEYS = (*BETAS, LATENT, LATENT_NORM, "mla_use_output_gate")
BOUND, FULL_RANK = "gate_lower_bound", "use_full_rank_gate"
_FORGET = re.compile(r"\.self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)")
_FURTHER = "num_nextn_predict_layers"

Act = Callable[[Tensor, Tensor], Tensor]  # of the gate and the gated value


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the language model, which may be an object within the whole one."""
    return config["text_config"] if config["model_type"] == NAME else config


def is_kimi_k3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json states more than Hugging Face's class of Kimi Linear supports."""
    if (linear := config.get("linear_attn_config")) is None:
        return False
    stated = [*map(config.get, KEYS), linear.get(BOUND), linear.get(FULL_RANK)]
    without_experts = config.get("num_experts") is None
    return without_experts or any(value not in (None, False) for value in stated)


def readable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json that Hugging Face's class reads."""
    kept = {key: value for key, value in config.items() if key not in KEYS and value is not None}
    dense = {"first_k_dense_replace": config["num_hidden_layers"]}
    return kept | {"hidden_act": "silu"} | (dense if config.get("num_experts") is None else {})


def language_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the language model by their names in it, without those for images."""
    text = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    images = ("vision_tower.", "mm_projector.")
    return {name: tensor for name, tensor in text.items() if not name.startswith(images)}


def build(stated: Mapping[str, Any], config: Any, weights: Mapping[str, Tensor]) -> Any:
    """The causal language model.

    Args:
        stated: its config.json.
        config: Hugging Face's configuration of ``readable(stated)``.
        weights: every tensor except those of sites, by its name in a checkpoint.

    Raises:
        ValueError: the model needs other tensors.
    """
    kimi = wide_module("transformers.models.kimi_linear.modeling_kimi_linear")
    model = kimi.KimiLinearForCausalLM(config)
    linear, act = stated["linear_attn_config"], _act(stated)
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "o_norm"):
            _change_delta(layer.self_attn, linear)
        elif stated.get("mla_use_output_gate"):
            _gate_output(layer.self_attn)
        if hasattr(layer.mlp, "experts"):
            layer.mlp = Mixture(stated, layer.mlp.gate, act)
        else:
            layer.mlp = GatedMLP(config.hidden_size, config.intermediate_size, act, NAMES)
    model = in_float64(model.eval())
    try:
        model.load_state_dict(_by_modules(stated, weights))
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"missing, unexpected or misshapen tensors: {error}") from error
    return model


def _act(stated: Mapping[str, Any]) -> Act:
    if stated.get("hidden_act", "silu") != "situ":
        return lambda gate, up: silu(gate) * up
    beta, clip = map(stated.get, BETAS)
    assert beta is not None, "config.json is checked before"

    def situ(gate: Tensor, up: Tensor) -> Tensor:
        up = up if clip is None else clip * torch.tanh(up / clip)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up

    return situ


NAMES = ("gate_proj", "up_proj", "down_proj")


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, width: int, act: Act, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.act, self.names = act, names
        for name in names[:2]:
            self.add_module(name, nn.Linear(hidden, width, bias=False))
        self.add_module(names[2], nn.Linear(width, hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = map(self.get_submodule, self.names)
        y: Tensor = down(self.act(gate(x), up(x)))
        return y


class Mixture(nn.Module):
    def __init__(self, stated: Mapping[str, Any], gate: nn.Module, act: Act) -> None:
        super().__init__()
        hidden, width = stated["hidden_size"], stated["moe_intermediate_size"]
        latent = stated.get(LATENT)
        self.gate = gate
        shared = width * stated["num_shared_experts"]
        self.shared_experts = GatedMLP(hidden, shared, act, NAMES)
        self.experts = nn.ModuleList(
            GatedMLP(latent or hidden, width, act, ("w1", "w3", "w2"))
            for _ in range(stated["num_experts"])
        )
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
            if stated.get(LATENT_NORM):
                self.routed_expert_norm = nn.RMSNorm(latent, eps=stated["rms_norm_eps"])
        self.is_latent = latent is not None

    def forward(self, x: Tensor) -> Tensor:
        _, weights, chosen = self.gate(x)
        rows = x.flatten(0, 1)
        y = self.routed_expert_down_proj(rows) if self.is_latent else rows
        total = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            at, place = (chosen == number).nonzero(as_tuple=True)
            total[at] += weights[at, place, None] * expert(y[at])
        if hasattr(self, "routed_expert_norm"):
            total = self.routed_expert_norm(total)
        if self.is_latent:
            total = self.routed_expert_up_proj(total)
        shared: Tensor = self.shared_experts(x)
        return total.view_as(x) + shared


def _change_delta(attention: Any, linear: Mapping[str, Any]) -> None:
    if linear.get(FULL_RANK):
        wide = nn.Linear(attention.hidden_size, attention.qkv_dim, bias=False)
        attention.g_a_proj, attention.g_b_proj = nn.Identity(), wide
    if (bound := linear.get(BOUND)) is not None:
        forget = attention.forget_gate

        def log_decay(x: Tensor) -> Tensor:
            f = (forget.f_b_proj(forget.f_a_proj(x)) + forget.dt_bias).unflatten(
                -1, (-1, forget.head_dim)
            )
            decayed: Tensor = bound * torch.sigmoid(forget.A_log.exp() * f)
            return decayed

        forget.forward = log_decay


def _gate_output(attention: Any) -> None:
    inputs: list[Tensor] = []
    attention.g_proj = nn.Linear(
        attention.hidden_size, attention.num_heads * attention.v_head_dim, bias=False
    )
    attention.register_forward_pre_hook(
        lambda _, __, named: inputs.append(named["hidden_states"]), with_kwargs=True
    )
    attention.o_proj.register_forward_pre_hook(
        lambda _, args: (args[0] * torch.sigmoid(attention.g_proj(inputs.pop())),)
    )


def _by_modules(stated: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of modules, without those of draft layers after the last layer."""
    layers, linear = stated["num_hidden_layers"], stated["linear_attn_config"]
    behind = range(layers, layers + (stated.get(_FURTHER) or 0))
    left = tuple(f"model.layers.{layer}." for layer in behind)
    full_rank = tuple(f"model.layers.{n - 1}.self_attn.g_proj." for n in linear["kda_layers"])
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.startswith(left):
            continue
        if name.endswith(("k_conv1d.weight", "v_conv1d.weight")):
            continue
        if name.endswith("q_conv1d.weight"):
            parts = [weights[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"]
            name, tensor = name.replace("q_conv1d", "conv1d"), torch.cat(parts)
        elif name.startswith(full_rank):
            name = name.replace("g_proj", "g_b_proj")
        elif name.endswith(".A_log"):
            tensor = tensor.view(1, 1, -1, 1)
        name = _FORGET.sub(r".self_attn.forget_gate.\1", name)
        renamed[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    return renamed
