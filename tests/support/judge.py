"""What a checkpoint means by its format's own definition, whatever its config.json says.

For a Llama, Qwen2 or Qwen3 config Hugging Face's own class reads the base family's keys and gives
attention, MLP and norms; the float64 oracle gives depth attention around them. FLA, nanoGPT and the
Llama that norms rotated keys have classes of their own, so there the oracle, which was written from
their source, reads all.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnres_serve.verify import oracle

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# Not of the base family, or of no meaning to a model that is only evaluated.
LEFT_OUT = ("architectures", "model_type", "auto_map", "attn_res", "dtype", "torch_dtype")
LEFT_OUT += ("initializer_range", "use_cache", "pretraining_tp", "attention_dropout")
LEFT_OUT += ("max_window_layers",)
# The oracle itself refuses some of what Hugging Face's classes know.
MODES = {"baseline_mode", "residual_baseline"}
PLAIN = {"hidden_act": "silu", "rope_scaling": None, "rope_parameters": None}
PLAIN |= {"rope_theta": 1.0, "use_sliding_window": False}


class Judge(oracle.Model):
    """The oracle's depth attention around the sublayers of ``self.hf``."""

    hf: nn.Module

    def sublayer(self, s: int, h: Tensor) -> Tensor:
        place = self.spec.layout[s]
        layer = self.hf.model.layers[place.layer]
        if place.kind == "mlp":
            return layer.mlp(layer.post_attention_layernorm(h))
        positions, config = torch.arange(len(h)), self.hf.config
        age = positions[:, None] - positions
        hidden = age < 0
        # Hugging Face's Llama has no windows; the house format's may (docs/use/formats.md).
        if set(getattr(config, "layer_types", None) or ()) == {"sliding_attention"}:
            hidden |= age >= config.sliding_window
        x = layer.input_layernorm(h)[None]
        return layer.self_attn(
            hidden_states=x,
            position_embeddings=self.hf.model.rotary_emb(x, positions[None]),
            attention_mask=torch.zeros_like(age, dtype=h.dtype).masked_fill(hidden, -1e30),
        )[0][0]

    def norm(self, site: int, h: Tensor) -> Tensor:
        return self.hf.model.norm(h)  # of the final site: the others' are in `sublayer`

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.hf.model.embed_tokens(torch.tensor(ids))

    def logits(self, normed: Tensor) -> Tensor:
        return self.hf.lm_head(normed)


def truth(folder: Path, ids: Sequence[int]) -> Tensor:
    """Logprobs ``[tokens, vocabulary]``, or an exception for what no definition knows."""
    config = json.loads((folder / "config.json").read_text())
    base = next((base for base in CLASSES if base in config["model_type"]), None)
    is_normed = "normed_llama" in config["model_type"] or MODES & {*config}
    if base is None or is_normed:
        return oracle.load(folder).logprobs(ids)
    weights = oracle.read_weights(folder)
    defaults = {"rms_norm_eps": 1e-6, "head_dim": None}
    judge = Judge(oracle.spec_of(defaults | config | PLAIN, weights), weights)
    judge.hf = hugging_face(base, config, weights)
    with torch.inference_mode():
        return judge.logprobs(ids)


def hugging_face(base: str, config: dict, weights: dict[str, Tensor]) -> nn.Module:
    """The base family's model in float64."""
    config_class, model_class = CLASSES[base]
    read = {k: v for k, v in config.items() if k not in LEFT_OUT}
    if read.get("head_dim", 0) is None:
        del read["head_dim"]  # Qwen2's class stumbles over null where the others have a default
    own = config_class.from_dict(read)
    own._attn_implementation = "eager"
    model = model_class(own).double().eval()
    for layer in model.model.layers:
        if config["model_type"] == "attnres_gated_llama":
            add_gate(layer.self_attn, own)
        if config["model_type"] == "attnres_qwen3":
            layer.self_attn.o_proj.bias = None
            eps = config.get("qk_norm_eps") or own.rms_norm_eps
            layer.self_attn.q_norm.variance_epsilon = eps
            layer.self_attn.k_norm.variance_epsilon = eps
    plain = {name: weight for name, weight in weights.items() if "_res_" not in name}
    missing, unexpected = model.load_state_dict(plain, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if own.tie_word_embeddings else set()):
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    return model


def add_gate(attention: nn.Module, config) -> None:
    """``o_proj(y)`` becomes ``o_proj(y * sigmoid(attn_gate(x)))``."""
    width = config.num_attention_heads * attention.head_dim
    gate = nn.Linear(config.hidden_size, width, bias=config.attention_bias).double()
    attention.attn_gate = gate
    read = {}

    def listen(_, __, given) -> None:
        read["x"] = given["hidden_states"]

    attention.register_forward_pre_hook(listen, with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(lambda _, y: (y[0] * gate(read["x"]).sigmoid(),))
