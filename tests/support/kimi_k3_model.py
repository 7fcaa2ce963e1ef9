"""Hugging Face's Kimi Linear in float64 with what Kimi K3 has beside it, written down once more.

Full-rank gate: the gate of KDA is one projection, not two.
Lower bound b: log decay = b sigmoid(exp(A_log) (f + dt_bias)), where without one it is
-exp(A_log) softplus(f + dt_bias).
Output gate of latent attention: its heads' outputs times sigmoid(g_proj x), before o_proj.
SiTU: down(beta tanh(g / beta) sigmoid(g) * c tanh(u / c)), with c = inf where no c is stated.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tiny_sites
import torch
from torch import Tensor, nn

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import Rewritten, hugging_face

K3 = ("mla_use_output_gate", "activation_situ_beta", "activation_situ_linear_beta")


@dataclass
class KimiK3(Rewritten):
    """Such a checkpoint; ``stated`` is its config.json."""

    stated: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def hf(self) -> Any:
        depth = oracle.depth_shapes(self.spec)
        weights = {name: tensor for name, tensor in self.weights.items() if name not in depth}
        gates = {name: weights.pop(name) for name in [*weights] if "self_attn.g_proj" in name}
        linear, hidden = self.stated["linear_attn_config"], self.stated["hidden_size"]
        size, heads = linear["head_dim"], linear["num_heads"]
        for name in [name for name in weights if name.endswith("A_log")]:
            weights[name] = weights[name].view(1, 1, heads, 1)
            attention = name.removesuffix("A_log")
            if f"{attention}g_proj.weight" in gates:  # the class wants some
                weights[f"{attention}g_a_proj.weight"] = torch.zeros(size, hidden)
                weights[f"{attention}g_b_proj.weight"] = torch.zeros(heads * size, size)
        model = hugging_face.build(self.config, weights)
        for index, layer in enumerate(model.model.layers):
            gate = gates.get(f"model.layers.{index}.self_attn.g_proj.weight")
            if hasattr(layer.self_attn, "o_norm"):
                _change_delta(layer.self_attn, gate, linear.get("gate_lower_bound"))
            elif gate is not None:
                _gate_output(layer.self_attn, gate)
            if self.stated["hidden_act"] == "situ":
                _change_mlp(layer.mlp, *(self.stated.get(key) for key in K3[1:]))
        return model


def _change_delta(attention: Any, gate: Tensor | None, bound: float | None) -> None:
    if gate is not None:
        attention.g_a_proj, attention.g_b_proj = nn.Identity(), nn.Linear(*gate.T.shape, bias=False)
        attention.g_b_proj.weight = nn.Parameter(gate.double())
    if bound is not None:
        forget = attention.forget_gate

        def log_decay(x: Tensor) -> Tensor:
            f = (forget.f_b_proj(forget.f_a_proj(x)) + forget.dt_bias).unflatten(
                -1, (-1, forget.head_dim)
            )
            return bound * torch.sigmoid(forget.A_log.exp() * f)

        forget.forward = log_decay


def _gate_output(attention: Any, gate: Tensor) -> None:
    given: list[Tensor] = []
    attention.register_forward_pre_hook(
        lambda _, __, named: given.append(named["hidden_states"]), with_kwargs=True
    )
    attention.o_proj.register_forward_pre_hook(
        lambda _, args: (args[0] * torch.sigmoid(given.pop() @ gate.double().T),)
    )


def _change_mlp(mlp: Any, beta: float, clip: float | None) -> None:
    def forward(x: Tensor) -> Tensor:
        g, u = mlp.gate_proj(x), mlp.up_proj(x)
        u = u if clip is None else clip * torch.tanh(u / clip)
        return mlp.down_proj(beta * torch.tanh(g / beta) * torch.sigmoid(g) * u)

    mlp.forward = forward


def load(folder: Path) -> KimiK3:
    """A checkpoint of the house format in float64."""
    stated = json.loads((folder / "config.json").read_text())
    layers = stated["num_hidden_layers"]
    plain = {key: value for key, value in stated.items() if key not in K3 and value is not None}
    plain["hidden_act"] = "silu"
    if stated.get("num_experts") is None:
        plain["first_k_dense_replace"] = layers
    own = hugging_face.config("kimi_linear", plain)
    sites = tiny_sites.sites_of("kimi_linear", layers)
    names = oracle.depth_names("attention", "mlp")
    layout = tuple(oracle.Place(site.layer, site.kind) for site in sites)
    spec = oracle.Spec(
        names, layout, {}, own.hidden_size, own.vocab_size, own.rms_norm_eps, tied=False
    )
    oracle.add_depth(spec, stated["attn_res"])
    norms = (*(site.norm for site in sites), "norm")
    return KimiK3(own, norms, spec, oracle.read_weights(folder), stated=stated)
