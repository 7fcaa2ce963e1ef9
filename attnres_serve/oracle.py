"""An independent float64 evaluation of Attention-Residuals language models.

Written from the equations of arXiv 2603.15031; shares no code with what serves (``oracle_rotary``
is a part of it). Every call evaluates the whole sequence, and every site sums its blocks anew from
the sublayers' outputs.

With y_s the output of sublayer s (attention, MLP, attention, ...), x the token embedding and block
starts 0 = b_0 < b_1 < ..., the sources a site s can see are

    V = [x] + [y_b + ... + y_(e-1) for each start b < s],    e = min(next start, s)

so the newest block is present only as far as it has been computed. In a cumulative model a source
is instead all that was summed up to a start, and the last one all that there is:

    V = [x + y_0 + ... + y_(b-1) for each start b <= s] + [x + y_0 + ... + y_(s-1)]

The site mixes them by softmax_i(scale * <query, RMSNorm(V_i)> + [i is last] * bias), and its
sublayer (at the last site: the head) reads the result. Without a final mix the head reads V's last.

Understood: the house format (`attnres_llama`, `attnres_gated_llama`, `attnres_qwen2`,
`attnres_qwen3`), `transformer` of FLA, `nanogpt` of BabyLM, `qwen3_ar`, `qwen3_attnres` and
`llama_attnres` (told apart by the tensors), `qwen3` with the architecture
Qwen3BlockAttnResForCausalLM and, with ordinary residuals, `llama`, `qwen2`, `qwen3`.

    python -m attnres_serve.oracle CHECKPOINT    # agreement with the checkpoint's expected.json
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from attnres_serve.oracle_rotary import Rope, rope_of, rotate

HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "attention": "model.layers.{}.self_attn.",
    "mlp": "model.layers.{}.mlp.",
}
HOUSE_NAMES = HF_NAMES | {
    "attention_query": "model.layers.{}.self_attention_res_proj.weight",
    "attention_key": "model.layers.{}.self_attention_res_norm.weight",
    "mlp_query": "model.layers.{}.mlp_res_proj.weight",
    "mlp_key": "model.layers.{}.mlp_res_norm.weight",
    "final_query": "model.output_attn_res_proj.weight",
    "final_key": "model.output_attn_res_norm.weight",
    "attention_recency": "model.layers.{}.self_attention_res_bias",
    "mlp_recency": "model.layers.{}.mlp_res_bias",
    "final_recency": "model.output_attn_res_bias",
}
OPEN_NAMES = HF_NAMES | {
    "attention_query": "model.layers.{}.attn_res_proj.weight",
    "attention_key": "model.layers.{}.attn_res_norm.weight",
    "attention_recency": "model.layers.{}.attn_res_bias",
    "mlp_query": "model.layers.{}.mlp_res_proj.weight",
    "mlp_key": "model.layers.{}.mlp_res_norm.weight",
    "mlp_recency": "model.layers.{}.mlp_res_bias",
}
DELTA_NAMES = OPEN_NAMES | {
    "final_query": "model.final_res_proj.weight",
    "final_key": "model.final_res_norm.weight",
}
TITAN_NAMES = OPEN_NAMES | {
    "final_query": "model.final_attn_res_proj.weight",
    "final_key": "model.final_attn_res_norm.weight",
}
FLA_NAMES = {
    "embedding": "model.embeddings.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{}.attn_norm.weight",
    "mlp_norm": "model.layers.{}.mlp_norm.weight",
    "attention": "model.layers.{}.attn.",
    "mlp": "model.layers.{}.mlp.",
    "attention_query": "model.layers.{}.attn_res_proj.weight",
    "attention_key": "model.layers.{}.attn_res_norm.weight",
    "mlp_query": "model.layers.{}.mlp_res_proj.weight",
    "mlp_key": "model.layers.{}.mlp_res_norm.weight",
    "final_query": "model.res_proj.weight",
    "final_key": "model.res_norm.weight",
}
NANOGPT_NAMES = {
    "embedding": "transformer.wte.weight",
    "final_norm": "transformer.ln_f.weight",
    "head": "lm_head.weight",
    "attention_norm": "transformer.h.{}.ln_1.weight",
    "mlp_norm": "transformer.h.{}.ln_2.weight",
    "attention": "transformer.h.{}.attn.",
    "mlp": "transformer.h.{}.mlp.",
    "attention_query": "transformer.h.{}.attn_res_q1",
    "attention_key": "transformer.h.{}.attn_res_norm1.weight",
    "mlp_query": "transformer.h.{}.attn_res_q2",
    "mlp_key": "transformer.h.{}.attn_res_norm2.weight",
    "final_query": "attn_res_qf",
    "final_key": "attn_res_normf.weight",
}
NANOGPT_LEAVES = {
    "o_proj": "c_proj",
    "gate_proj": "c_gate",
    "up_proj": "c_val",
    "down_proj": "c_proj",
}


@dataclass
class Spec:
    """What a checkpoint computes, free of any format's spelling."""

    names: dict[str, str]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope: Rope
    tied: bool
    qk_norm_eps: float | None = None  # None: no per-head norm of queries and keys
    window: int | None = None
    biases: frozenset[str] = frozenset()  # of q_proj ... o_proj, gate_proj, up_proj, down_proj
    leaves: dict[str, str] = field(default_factory=dict)  # where a linear is not called so
    fused_qkv: bool = False  # c_attn: queries, keys and values one after the other
    gated: bool = False  # attention's output times sigmoid(attn_gate x), before o_proj
    block_starts: tuple[int, ...] | None = None  # None: ordinary residuals
    final_mix: bool = True
    key_norm_eps: float = 0.0
    cumulative: bool = False
    recency_bias: bool = False
    logit_scale: float = 1.0
    shared_queries: str | None = None  # "layer" or "block": the sites of one have one query
    eps_scale_starts: tuple[int, ...] | None = None  # see `load`

    @property
    def sublayers(self) -> int:
        return 2 * self.layers

    @property
    def starts(self) -> tuple[int, ...]:
        """The block starts of a model that has blocks."""
        assert self.block_starts is not None
        return self.block_starts


def starts_of(block_size: int, sublayers: int) -> tuple[int, ...]:
    """Block starts 0, S, 2S, ... of blocks of S sublayers."""
    if block_size < 1:
        raise ValueError(f"block size must be positive, not {block_size}")
    return tuple(range(0, sublayers, block_size))


def check_starts(starts: Sequence[int], sublayers: int) -> tuple[int, ...]:
    """`starts` as a tuple, or a ValueError: they must rise from 0 and stay below `sublayers`."""
    starts = tuple(starts)
    rising = all(a < b for a, b in pairwise(starts))
    if not starts or starts[0] != 0 or not rising or starts[-1] >= sublayers:
        raise ValueError(f"bad block starts {starts} for {sublayers} sublayers")
    return starts


def source_spans(starts: Sequence[int], site: int) -> list[tuple[int, int]]:
    """Spans [b, e) of the sublayers in each block that `site` can see, oldest first."""
    ends = [*starts[1:], site]
    return [(b, min(e, site)) for b, e in zip(starts, ends, strict=True) if b < site]


def site_role(spec: Spec, site: int) -> tuple[str, int | None]:
    """Under which role and layer the query and key norm of `site` are stored."""
    if site == spec.sublayers:
        return "final", None
    if spec.shared_queries == "layer":
        site = 2 * (site // 2)
    elif spec.shared_queries == "block":
        site = max(start for start in spec.starts if start <= site)
    return ("mlp" if site % 2 else "attention"), site // 2


SMALL = 512  # hidden size


@contextmanager
def threads_for(hidden: int) -> Iterator[None]:
    """One thread where matrices are too small to share: a second one can cost tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if hidden < SMALL else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@dataclass
class Model:
    """A checkpoint in float64. `weights` is keyed by the format's own tensor names."""

    spec: Spec
    weights: dict[str, Tensor] = field(repr=False)

    def weight(self, role: str, layer: int | None = None, leaf: str = "") -> Tensor:
        return self.weights[self.spec.names[role].format(layer) + leaf]

    def linear(self, x: Tensor, role: str, layer: int, leaf: str) -> Tensor:
        """x [tokens, in] -> [tokens, out] through `leaf`, with its bias where there is one."""
        own = self.spec.leaves.get(leaf, leaf)
        y = x @ self.weight(role, layer, own + ".weight").T
        return y + self.weight(role, layer, own + ".bias") if leaf in self.spec.biases else y

    def attention(self, x: Tensor, layer: int) -> Tensor:
        """Causal (windowed) grouped-query attention of x [tokens, hidden]."""
        spec, tokens = self.spec, x.shape[0]
        if spec.fused_qkv:
            qkv = self.linear(x, "attention", layer, "c_attn").split(spec.hidden, dim=-1)
        else:
            qkv = [self.linear(x, "attention", layer, f"{part}_proj") for part in "qkv"]
        q = qkv[0].view(tokens, spec.heads, spec.head_dim)
        k = qkv[1].view(tokens, spec.kv_heads, spec.head_dim)
        v = qkv[2].view(tokens, spec.kv_heads, spec.head_dim)
        if spec.qk_norm_eps is not None:
            q = rms_norm(q, self.weight("attention", layer, "q_norm.weight"), spec.qk_norm_eps)
            k = rms_norm(k, self.weight("attention", layer, "k_norm.weight"), spec.qk_norm_eps)
        q, k = rotate(q, spec.rope), rotate(k, spec.rope)
        age = torch.arange(tokens)[:, None] - torch.arange(tokens)  # query position - key position
        hidden = (age < 0) if spec.window is None else (age < 0) | (age >= spec.window)
        outputs = []
        for head in range(spec.heads):
            group = head // (spec.heads // spec.kv_heads)
            scores = q[:, head] @ k[:, group].T / math.sqrt(spec.head_dim)
            outputs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, group])
        output = torch.cat(outputs, dim=-1)
        if spec.gated:
            output = output / (1 + torch.exp(-self.linear(x, "attention", layer, "attn_gate")))
        return self.linear(output, "attention", layer, "o_proj")

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        """SwiGLU of x [tokens, hidden]."""
        gate = self.linear(x, "mlp", layer, "gate_proj")
        up = self.linear(x, "mlp", layer, "up_proj")
        return self.linear(gate / (1 + torch.exp(-gate)) * up, "mlp", layer, "down_proj")

    def norm_eps(self, site: int) -> float:
        """The eps of the norm that reads the mix of `site`."""
        starts = self.spec.eps_scale_starts
        sources = 1 if starts is None else 1 + len(source_spans(starts, site))
        return sources**2 * self.spec.eps

    def sublayer(self, s: int, h: Tensor) -> Tensor:
        """y_s: prenorm and attention or MLP of what site s mixed, h [tokens, hidden]."""
        return (self.mlp if s % 2 else self.attention)(self.norm(s, h), s // 2)

    def norm(self, site: int, h: Tensor) -> Tensor:
        """The norm that reads what `site` mixed, h [tokens, hidden]."""
        role = ("mlp_norm" if site % 2 else "attention_norm") if site < self.spec.sublayers else ""
        weight = self.weight(role, site // 2) if role else self.weight("final_norm")
        return rms_norm(h, weight, self.norm_eps(site))

    def logits(self, normed: Tensor) -> Tensor:
        """What the last norm gave, [tokens, hidden] -> [tokens, vocab]."""
        return normed @ self.weight("embedding" if self.spec.tied else "head").T

    def head(self, h: Tensor) -> Tensor:
        """Last norm, head and log-softmax: h [tokens, hidden] -> [tokens, vocab]."""
        return self.logits(self.norm(self.spec.sublayers, h)).log_softmax(-1)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """[tokens, hidden]"""
        return self.weight("embedding")[torch.as_tensor(list(ids), dtype=torch.long)]

    def depth_softmax(self, site: int, sources: Tensor) -> Tensor:
        """Weights [tokens, sources] that `site` gives to sources [sources, tokens, hidden]."""
        role, layer = site_role(self.spec, site)
        keys = rms_norm(sources, self.weight(f"{role}_key", layer), self.spec.key_norm_eps)
        scores = self.spec.logit_scale * (keys @ self.weight(f"{role}_query", layer).flatten()).T
        if self.spec.recency_bias:
            scores[:, -1] += self.weight(f"{role}_recency", layer).item()
        return scores.softmax(-1)

    def sources(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        """V of `site` [sources, tokens, hidden], from the embedding x and the outputs y_0 ..."""
        starts = self.spec.starts
        if self.spec.cumulative:
            ends = [*(b for b in starts if b <= site), site]
            return torch.stack([torch.stack([x, *y[:end]]).sum(0) for end in ends])
        spans = source_spans(starts, site)
        return torch.stack([x, *(torch.stack(list(y[b:e])).sum(0) for b, e in spans)])

    def mix(self, site: int, x: Tensor, y: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """What `site` reads [tokens, hidden], and its weights [tokens, sources] if it mixes."""
        if self.spec.block_starts is None:
            return torch.stack([x, *y]).sum(0), None
        sources = self.sources(site, x, y)
        if site == self.spec.sublayers and not self.spec.final_mix:
            return sources[-1], None
        weights = self.depth_softmax(site, sources)
        return torch.einsum("tn,ntd->td", weights, sources), weights

    def normed(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        """What `site` gives to its sublayer, from the embedding x and the outputs y_0 ..."""
        return self.norm(site, self.mix(site, x, y)[0])

    def _evaluate(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """What the last norm reads [tokens, hidden], and each site's weights [tokens, sources]."""
        x = self.embed(ids)
        y: list[Tensor] = []
        every: list[Tensor] = []
        for site in range(self.spec.sublayers + 1):
            h, weights = self.mix(site, x, y)
            every += [] if weights is None else [weights]
            if site < self.spec.sublayers:
                y.append(self.sublayer(site, h))
        return h, every

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities [len(ids), vocab] of the token after each position."""
        with threads_for(self.spec.hidden):
            return self.head(self._evaluate(ids)[0])

    def depth_weights(self, ids: Sequence[int]) -> list[Tensor]:
        """Per site the softmax weights [tokens, sources].

        Sources are in the order embedding, finished blocks, running partial sum; with ordinary
        residuals the list is empty, and without a final mix there is no last site.
        """
        with threads_for(self.spec.hidden):
            return self._evaluate(ids)[1]

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float | None]:
        """The log-probability of each token given those before it; None for the first."""
        table = self.logprobs(ids)
        return [None, *(table[i, token].item() for i, token in enumerate(ids[1:]))]

    def greedy(self, prompt: Sequence[int], n: int) -> tuple[list[int], list[float], list[float]]:
        """`n` greedy tokens, their log-probabilities and their lead over the runner-up."""
        ids, logprobs, gaps = list(prompt), [], []
        for _ in range(n):
            best = self.logprobs(ids)[-1].topk(2)
            ids.append(int(best.indices[0]))
            logprobs.append(best.values[0].item())
            gaps.append((best.values[0] - best.values[1]).item())
        return ids[len(prompt) :], logprobs, gaps


def _fla_spec(config: dict) -> Spec:
    hidden, heads = config["hidden_size"], config["num_heads"]
    if config.get("hidden_act", "swish") != "swish":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported")
    intermediate = config.get("intermediate_size")
    if intermediate is None:
        two_thirds = int(hidden * (config.get("hidden_ratio") or 4) * 2 / 3)
        intermediate = math.ceil(two_thirds / 256) * 256
    block_size = config.get("attnres_block_size")
    eps = config.get("norm_eps", 1e-6)
    layers = config["num_hidden_layers"]
    return Spec(
        names=FLA_NAMES,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_kv_heads") or heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=config["vocab_size"],
        eps=eps,
        rope=rope_of(config),
        tied=config.get("tie_word_embeddings", False),
        qk_norm_eps=1e-5 if config.get("qk_norm") else None,
        window=config.get("window_size"),
        biases=frozenset(["q_proj", "k_proj", "v_proj"] if config.get("qkv_bias") else []),
        block_starts=None if block_size is None else starts_of(block_size, 2 * layers),
        key_norm_eps=eps,
    )


def _nanogpt_spec(config: dict) -> Spec:
    hidden, heads, layers = config["n_embd"], config["n_head"], config["n_layer"]
    kind = [config[key] for key in ("use_rmsnorm", "use_swiglu", "use_rope")]
    if kind != [True, True, True] or config.get("bidirectional"):
        raise ValueError("only RMSNorm, SwiGLU, rotary embedding and causal attention")
    linears = ("c_attn", "o_proj", "attn_gate", "gate_proj", "up_proj", "down_proj")
    size = config["attn_res_block_size"] if config["use_attn_res"] else None
    return Spec(
        names=NANOGPT_NAMES,
        leaves=NANOGPT_LEAVES,
        fused_qkv=True,
        gated=config["use_attn_gate"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=64 * round(int(config["swiglu_mult"] * hidden) / 64),
        vocab=config["vocab_size"],
        eps=config["layer_norm_epsilon"],
        rope=rope_of({"rope_theta": config["rope_theta"]}),
        tied=config.get("tie_word_embeddings", True),
        biases=frozenset(linears if config["bias"] else ()),
        block_starts=None if size is None else starts_of(size, 2 * layers),
        key_norm_eps=1e-5,
    )


def _hf_spec(config: dict, base: str) -> Spec:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported")
    types = set(config.get("layer_types") or ())
    qwen = base.startswith("qwen")
    windowed = bool(config.get("use_sliding_window") if qwen else config.get("sliding_window"))
    if types - {"full_attention"} if not windowed else types != {"sliding_attention"}:
        raise ValueError("sliding windows are only supported on every layer")
    biases = []
    if base == "qwen2" or config.get("attention_bias"):
        biases += ["q_proj", "k_proj", "v_proj"]
    if base != "qwen2" and config.get("attention_bias"):
        biases += ["o_proj"]
    if base == "gated_llama" and config.get("attention_bias"):
        biases += ["attn_gate"]
    if base in ("llama", "gated_llama") and config.get("mlp_bias"):
        biases += ["gate_proj", "up_proj", "down_proj"]
    head_dim = config.get("head_dim") if base != "qwen2" else None
    eps = config.get("rms_norm_eps", 1e-6)
    return Spec(
        names=HF_NAMES,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim or (128 if base == "qwen3" else hidden // heads),
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        eps=eps,
        rope=rope_of(config),
        tied=config.get("tie_word_embeddings", False),
        qk_norm_eps=eps if base == "qwen3" else None,
        window=config["sliding_window"] if windowed else None,
        biases=frozenset(biases),
        gated=base == "gated_llama",
    )


def _house_spec(config: dict, base: str) -> Spec:
    spec, options = _hf_spec(config, base), config["attn_res"]
    if base == "qwen3":
        spec.qk_norm_eps = config.get("qk_norm_eps", spec.qk_norm_eps)
        spec.biases -= {"o_proj"}
    free = ("final_mix", "cumulative", "recency_bias", "logit_scale", "shared_queries")
    unknown = set(options) - {"block_size", "block_starts", "key_norm_eps", *free}
    if unknown or ("block_size" in options) == ("block_starts" in options):
        raise ValueError(f"bad attn_res options {options}")
    spec.names = HOUSE_NAMES
    if "block_size" in options:
        spec.block_starts = starts_of(options["block_size"], spec.sublayers)
    else:
        spec.block_starts = check_starts(options["block_starts"], spec.sublayers)
    spec.key_norm_eps = options.get("key_norm_eps", spec.eps)
    spec.qk_norm_eps = config.get("qk_norm_eps", spec.qk_norm_eps)
    for key in free:
        setattr(spec, key, options.get(key, getattr(spec, key)))
    return spec


def _layers_spec(config: dict, base: str, names: dict[str, str], per_block: int | None) -> Spec:
    """A model on `base` whose blocks are `per_block` layers; None: every sublayer is one."""
    spec = _hf_spec(config, base)
    spec.names, spec.key_norm_eps = names, spec.eps
    spec.block_starts = starts_of(2 * per_block if per_block else 1, spec.sublayers)
    return spec


def _kimi_names_spec(config: dict) -> Spec:
    if config["attn_res_block_size"] is None:
        return _hf_spec(config, "qwen3")
    spec = _layers_spec(config, "qwen3", HOUSE_NAMES, config["attn_res_block_size"])
    spec.final_mix = config.get("attn_res_output_route", True)
    return spec


def _mode_spec(config: dict, base: str, tensors: Iterable[str]) -> Spec:
    """`qwen3_attnres` and `llama_attnres`: cumulative if there are recency biases."""
    mode, blocks = config["attnres_mode"], config.get("attnres_num_blocks")
    if mode not in ("block", "full") or config.get("attnres_gate_type", "bias") != "bias":
        raise ValueError(f"attnres_mode {mode!r} with this gate is not supported")
    if config.get("attnres_use_null_source"):
        raise ValueError("a null source is not supported")
    per_block = math.ceil(config["num_hidden_layers"] / blocks) if mode == "block" else None
    biased = any(name.endswith("_res_bias") for name in tensors)
    spec = _layers_spec(config, base, OPEN_NAMES if biased else DELTA_NAMES, per_block)
    spec.cumulative = spec.recency_bias = biased
    spec.final_mix = not biased
    return spec


def _titan_spec(config: dict) -> Spec:
    per_block = max(config["num_hidden_layers"] // config["attn_res_num_blocks"], 1)
    return _layers_spec(config, "qwen3", TITAN_NAMES, per_block)


def _shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must hold."""
    d, names = spec.hidden, spec.names
    shapes: dict[str, tuple[int, ...]] = {}
    linears = {
        "q_proj": ("attention", spec.heads * spec.head_dim, d),
        "k_proj": ("attention", spec.kv_heads * spec.head_dim, d),
        "v_proj": ("attention", spec.kv_heads * spec.head_dim, d),
        "o_proj": ("attention", d, spec.heads * spec.head_dim),
        "gate_proj": ("mlp", spec.intermediate, d),
        "up_proj": ("mlp", spec.intermediate, d),
        "down_proj": ("mlp", d, spec.intermediate),
    }
    if spec.gated:
        linears["attn_gate"] = ("attention", spec.heads * spec.head_dim, d)
    if spec.fused_qkv:
        linears = {k: v for k, v in linears.items() if k not in ("q_proj", "k_proj", "v_proj")}
        linears["c_attn"] = ("attention", 3 * d, d)
    query = (1, d) if names.get("attention_query", "").endswith(".weight") else (d,)
    shapes[names["embedding"]] = (spec.vocab, d)
    shapes[names["final_norm"]] = (d,)
    if not spec.tied:
        shapes[names["head"]] = (spec.vocab, d)
    if spec.block_starts is not None:
        for site in range(spec.sublayers + spec.final_mix):
            role, layer = site_role(spec, site)
            shapes[names[f"{role}_query"].format(layer)] = query
            shapes[names[f"{role}_key"].format(layer)] = (d,)
            if spec.recency_bias:
                shapes[names[f"{role}_recency"].format(layer)] = ()
    for layer in range(spec.layers):
        for role in ("attention", "mlp"):
            shapes[names[f"{role}_norm"].format(layer)] = (d,)
        for leaf, (role, rows, columns) in linears.items():
            prefix = names[role].format(layer) + spec.leaves.get(leaf, leaf)
            shapes[prefix + ".weight"] = (rows, columns)
            if leaf in spec.biases:
                shapes[prefix + ".bias"] = (rows,)
        if spec.qk_norm_eps is not None:
            for leaf in ("q_norm.weight", "k_norm.weight"):
                shapes[names["attention"].format(layer) + leaf] = (spec.head_dim,)
    return shapes


def spec_of(config: dict, tensors: Iterable[str]) -> Spec:
    """What a config.json says, where need be with the names of the tensors."""
    kind, architectures = config["model_type"], config.get("architectures")
    if kind == "transformer":
        return _fla_spec(config)
    if kind == "nanogpt":
        return _nanogpt_spec(config)
    if kind == "qwen3_ar":
        return _kimi_names_spec(config)
    if kind in ("qwen3_attnres", "llama_attnres"):
        return _mode_spec(config, kind.removesuffix("_attnres"), tensors)
    if kind == "qwen3" and architectures == ["Qwen3BlockAttnResForCausalLM"]:
        return _titan_spec(config)
    if kind in ("llama", "qwen2", "qwen3"):
        return _hf_spec(config, kind)
    if kind in ("attnres_llama", "attnres_gated_llama", "attnres_qwen2", "attnres_qwen3"):
        return _house_spec(config, kind.removeprefix("attnres_"))
    raise ValueError(f"model_type {kind!r} is not supported")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in float64."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a file handle, not a dict)
                weights[name] = tensors.get_tensor(name).to(torch.float64)
    return weights


def load(
    checkpoint_dir: str | Path,
    eps_scale: bool = False,
    block_starts: Sequence[int] | None = None,
) -> Model:
    """Read config.json and every safetensors file of a checkpoint.

    `eps_scale` is for a model with ordinary residuals: the norm that reads a site uses n^2 * eps,
    n being the number of sources that site would have with the given `block_starts`. As
    RMSNorm(x / n, eps) = RMSNorm(x, n^2 * eps), such a model equals the Attention-Residuals model
    whose queries are all zero.
    """
    folder = Path(checkpoint_dir)
    config = json.loads((folder / "config.json").read_text())
    weights = read_weights(folder)
    spec = spec_of(config, weights)
    if eps_scale:
        if block_starts is None or spec.block_starts is not None:
            raise ValueError("eps_scale needs block_starts and a model with ordinary residuals")
        spec.eps_scale_starts = check_starts(block_starts, spec.sublayers)
    if spec.tied:
        weights.pop(spec.names["head"], None)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != (wanted := _shapes(spec)):
        odd = sorted(dict(found.items() ^ wanted.items()))
        raise ValueError(f"missing, unexpected or misshapen tensors: {odd}")
    return Model(spec, weights)


def agreement(model: Model, cases: Sequence[dict]) -> dict[str, float]:
    """Largest differences from `cases` (the list in an expected.json).

    `logprob` is over all prompt and generated log-probabilities, `excess` the same as a multiple of
    the bound 1e-4 + 2e-5 * |logprob|, `gap` over the leads of the greedy choices; `tokens` counts
    the agreeing greedy tokens up to a choice whose lead is below 2e-3, `of` those looked at.
    """
    worst = {"logprob": 0.0, "excess": 0.0, "gap": 0.0, "tokens": 0, "of": 0}
    for case in cases:
        prompt, output = case["prompt"], case["output"]
        table = model.logprobs(prompt + output)[:-1]
        wanted = case["prompt_logprobs"][1:] + case["output_logprobs"]
        for row, token, want in zip(table, (prompt + output)[1:], wanted, strict=True):
            difference = abs(row[token].item() - want)
            worst["logprob"] = max(worst["logprob"], difference)
            worst["excess"] = max(worst["excess"], difference / (1e-4 + 2e-5 * abs(want)))
        generated = table[len(prompt) - 1 :]
        top = generated.topk(2).values
        for lead, want in zip((top[:, 0] - top[:, 1]).tolist(), case["output_gap"], strict=True):
            worst["gap"] = max(worst["gap"], abs(lead - want))
        sure = next((i for i, gap in enumerate(case["output_gap"]) if gap < 2e-3), len(output))
        tokens, _, _ = model.greedy(prompt, sure)
        worst["tokens"] += sum(a == b for a, b in zip(tokens, output, strict=False))
        worst["of"] += sure
    return worst


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m attnres_serve.oracle CHECKPOINT", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    model = load(folder)
    print(f"{folder.name}: {model.spec.layers} layers, block starts {model.spec.block_starts}")
    if not (folder / "expected.json").exists():
        print("no expected.json")
        return 0
    result = agreement(model, json.loads((folder / "expected.json").read_text()))
    print("  ".join(f"{key} {value:.3g}" for key, value in result.items()))
    return int(result["excess"] > 1 or result["tokens"] < result["of"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
