"""vLLM's linear-attention layers on CPU against Hugging Face's in float64, without an engine.

Three sequences come in chunks and steps of decode, in batches as a scheduler mixes them.  FLA's
Kimi Delta Attention is compared with FLA's own class.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fla_models
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

from checkpoints import write_house
from in_process import vllm_config, world
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.linear import bailing_linear_attn
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadata

from attnres_serve.model import kda, linear_attention
from attnres_serve.verify.rewritten.wide import wide_module

NAME = "model.layers.0.self_attn"
HIDDEN, HEADS, SIZE, EPS = 24, 4, 12, 1e-3  # vLLM's own KDA has 1e-5 whatever is asked for
LENGTHS = 9, 2, 14
# Batches of (sequence, first token, end): decodes before prompts, as vLLM sorts them.
BATCHES = (
    ((0, 0, 5), (1, 0, 1)),
    ((1, 1, 2), (0, 5, 8), (2, 0, 4)),
    ((0, 8, 9), (2, 4, 13)),
    ((2, 13, 14),),
)
BLOCKS = 5, 2, 7  # of the sequences
FAR = 2e-5  # float32 against float64: a few hundred roundings of 2^-24, of numbers of size one


@pytest.fixture(scope="module", autouse=True)
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_house(tmp_path_factory.mktemp("any") / "model", "llama", layers=2, block_size=2)
    with world(folder):
        linear_attention.replace_for_cpu()
        yield folder


def sizes(**own: Any) -> SimpleNamespace:
    """What every layer's configuration has, and what a kind's has beside it."""
    return SimpleNamespace(hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=EPS, **own)


def built(folder: Path, cls: Any, config: Any, **options: Any) -> tuple[Any, VllmConfig]:
    """A layer of vLLM's class, and the configuration that it is in."""
    engine = vllm_config(folder, **options)
    with set_current_vllm_config(engine), set_default_torch_dtype(engine.model_config.dtype):
        return cls(config, engine, NAME), engine


def fill(module: nn.Module) -> None:
    """Random weights that float32 has exactly."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        spread = 1.0 if parameter.dim() < 2 or "conv" in name else parameter.shape[-1] ** -0.5
        parameter.data = (spread * torch.randn(parameter.shape)).to(parameter.dtype)


def served(layer: Any, engine: VllmConfig, xs: list[Tensor], metadata: Any, call: Any) -> list:
    """What the layer answers for each sequence, its caches full of garbage before."""
    process_weights_after_loading(layer, engine.model_config, torch.device("cpu"))
    shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
    layer.kv_cache = tuple(
        torch.full((max(BLOCKS) + 1, *shape), 7.0, dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    answers: list[list[Tensor]] = [[] for _ in xs]
    for parts in BATCHES:
        starts = torch.tensor([0, *(end - begin for _, begin, end in parts)]).cumsum(0).int()
        given = torch.cat([xs[n][begin:end] for n, begin, end in parts])
        padded = torch.cat([given, given.new_ones(1, HIDDEN)])  # a token of no sequence
        with (
            torch.inference_mode(),
            set_current_vllm_config(engine),
            set_forward_context({NAME: metadata(parts, starts)}, engine),
        ):
            out = call(layer, padded.to(engine.model_config.dtype))
        for (n, _, _), begin, end in zip(parts, starts, starts[1:], strict=False):
            answers[n].append(out[begin:end].double())
    return [torch.cat(answer) for answer in answers]


def counts(parts: tuple) -> dict[str, int]:
    decodes = sum(end - begin == 1 and begin > 0 for _, begin, end in parts)
    tokens = sum(end - begin for _, begin, end in parts)
    return {
        "num_decodes": decodes,
        "num_decode_tokens": decodes,
        "num_prefills": len(parts) - decodes,
        "num_prefill_tokens": tokens - decodes,
    }


def delta_metadata(parts: tuple, starts: Tensor) -> GDNAttentionMetadata:
    own = counts(parts)
    had = torch.tensor([begin > 0 for _, begin, _ in parts])
    return GDNAttentionMetadata(
        **own,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=int(starts[-1]),
        has_initial_state=had if own["num_prefills"] else None,
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=torch.tensor([BLOCKS[n] for n, *_ in parts]).int(),
    )


def inputs() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(length, HIDDEN) for length in LENGTHS]


def check(found: list[Tensor], judge: Any, xs: list[Tensor]) -> None:
    with torch.inference_mode():
        for answer, x in zip(found, xs, strict=True):
            torch.testing.assert_close(answer, judge(x.double()[None])[0], rtol=FAR, atol=FAR)


def kda_judge(lower_bound: float | None, full_rank: bool) -> nn.Module:
    config = sizes(
        linear_num_heads=HEADS,
        linear_head_dim=SIZE,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
        linear_lower_bound=lower_bound,
    )
    kimi = wide_module("transformers.models.kimi_linear.modeling_kimi_linear")
    judge = kimi.KimiLinearDeltaAttention(config, 0)
    if lower_bound is not None:
        glm = wide_module("transformers.models.glm5_next.modeling_glm5_next")
        judge.forget_gate = glm.Glm5NextTextForgetGate(config)
    if full_rank:
        judge.g_a_proj = nn.Identity()
        judge.g_b_proj = nn.Linear(HIDDEN, HEADS * SIZE, bias=False)
    fill(judge)
    return judge


@pytest.mark.parametrize("full_rank", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -2.0])
def test_kimi_delta_attention(replaced: Path, lower_bound: float | None, full_rank: bool) -> None:
    linear = {
        "head_dim": SIZE,
        "num_heads": HEADS,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": lower_bound,
        "use_full_rank_gate": full_rank,
    }
    cls, config = kimi_gdn_linear_attn.KimiGatedDeltaNetAttention, sizes(linear_attn_config=linear)
    layer, engine = built(replaced, cls, config)
    judge = kda_judge(lower_bound, full_rank)
    gate = judge.forget_gate
    first = [judge.q_proj, judge.k_proj, judge.v_proj]
    if full_rank:
        first += [judge.g_b_proj, gate.f_a_proj, judge.b_proj]
    else:
        first += [judge.b_proj, gate.f_a_proj]
        layer.g_a_proj.weight.data.copy_(judge.g_a_proj.weight)
        layer.g_b_proj.weight.data.copy_(judge.g_b_proj.weight)
    joined = torch.cat([one.weight for one in first])
    layer.in_proj_qkvgfab.weight.data[: len(joined)].copy_(joined)
    layer.f_b_proj.weight.data.copy_(gate.f_b_proj.weight)
    layer.dt_bias.data.copy_(gate.dt_bias)
    layer.A_log.data.copy_(gate.A_log.flatten())
    layer.conv1d.weight.data.copy_(judge.conv1d.weight)
    layer.o_norm.weight.data.copy_(judge.o_norm.weight)
    layer.o_proj.weight.data.copy_(judge.o_proj.weight)
    xs = inputs()
    found = served(layer, engine, xs, delta_metadata, lambda layer, x: layer(x, positions=None))
    check(found, judge.double(), xs)


@pytest.mark.filterwarnings("ignore")  # FLA's, that there is no GPU
@pytest.mark.parametrize("lower_bound", [None, -2.0])
def test_kimi_delta_attention_of_flas(replaced: Path, lower_bound: float | None) -> None:
    """With a bias in the output gate, by FLA's class: the bound is one without `safe_gate` too."""
    config = sizes(
        linear_num_key_heads=HEADS,
        linear_key_head_dim=SIZE,
        linear_conv_kernel_dim=3,
        gate_lower_bound=lower_bound,
    )
    layer, engine = built(replaced, partial(kda.KDALayer.recurrence, None), config)
    fla = fla_models.imported("fla.layers.kda")
    judge = fla.KimiDeltaAttention(
        hidden_size=HIDDEN,
        head_dim=SIZE,
        num_heads=HEADS,
        conv_size=3,
        norm_eps=EPS,
        lower_bound=lower_bound,
    )
    fill(judge)
    given = dict(judge.named_parameters())
    first = ("q_proj", "k_proj", "v_proj", "b_proj", "f_proj.0")
    given["in_proj_qkvgfab.weight"] = torch.cat([given[f"{one}.weight"] for one in first])
    given["conv1d.weight"] = torch.cat([given[f"{one}_conv1d.weight"] for one in "qkv"])
    for name, parameter in layer.named_parameters():
        fused = name.replace("_a_proj", "_proj.0").replace("_b_proj", "_proj.1")
        parameter.data.copy_(given[fused])
    xs = inputs()
    found = served(layer, engine, xs, delta_metadata, lambda layer, x: layer(x, positions=None))
    with fla_models.on_cpu():
        check(found, lambda x: judge.double()(x)[0], xs)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_gated_delta_net(replaced: Path, key_heads: int) -> None:
    config = sizes(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=SIZE,
        linear_value_head_dim=SIZE - 2,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
        dtype=torch.float32,
    )
    cls = partial(qwen_gdn_linear_attn.QwenGatedDeltaNetAttention, gqa_interleaved_layout=True)
    layer, engine = built(replaced, cls, config)
    qwen = wide_module("transformers.models.qwen3_next.modeling_qwen3_next")
    judge = qwen.Qwen3NextGatedDeltaNet(config, 0)
    fill(judge)
    given = dict(judge.named_parameters())
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(given[name])
    xs = inputs()
    found = served(layer, engine, xs, delta_metadata, lambda layer, x: layer(x))
    check(found, judge.double(), xs)


@pytest.mark.parametrize("interleaved", [True, False])
def test_gated_delta_net_is_vllms_where_vllm_has_it(replaced: Path, interleaved: bool) -> None:
    one = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_conv_kernel_dim": 4}
    config = sizes(linear_key_head_dim=64, linear_value_head_dim=64, **one)
    stock = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    cls = partial(stock, gqa_interleaved_layout=interleaved)
    layer, _ = built(replaced, cls, config, dtype="bfloat16")
    assert layer._forward_method == layer.forward_cpu
    config.linear_value_head_dim = 32
    layer, _ = built(replaced, cls, config, dtype="bfloat16")
    assert layer._forward_method == layer._by_recurrence


def lightning_judge(weights: dict[str, Tensor], slope: Tensor, groups: int, x: Tensor) -> Tensor:
    """Every token attends to those before it, by its own definition."""
    tokens = len(x)

    def normed(heads: Tensor, weight: Tensor, size: int) -> Tensor:
        groups = heads.unflatten(-1, (-1, size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + EPS)
        return groups.flatten(-2) * weight

    qkv = (x @ weights["query_key_value.weight"].T).view(tokens, 3, HEADS, SIZE)
    q, k, v = qkv.unbind(1)
    q = normed(q, weights["query_layernorm.weight"], SIZE)
    k = normed(k, weights["key_layernorm.weight"], SIZE)
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    decay = torch.exp(-slope.view(-1, 1, 1) * age)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5 * decay * (age >= 0)
    mixed = torch.einsum("hqk,khd->qhd", scores, v).flatten(1)
    mixed = normed(mixed, weights["g_norm.weight"], HEADS * SIZE // groups)
    gate = torch.sigmoid(x @ weights["g_proj.weight"].T)
    return (gate * mixed) @ weights["dense.weight"].T


@pytest.mark.parametrize("groups", [1, 2])
def test_lightning_attention(replaced: Path, groups: int) -> None:
    config = sizes(
        num_attention_heads=HEADS,
        head_dim=SIZE,
        num_hidden_layers=4,
        max_position_embeddings=64,
        rope_theta=10000.0,
        linear_rope=False,
        use_qk_norm=True,
        use_bias=False,
        use_qkv_bias=False,
        group_norm_size=groups,
    )
    layer, engine = built(replaced, bailing_linear_attn.BailingMoELinearAttention, config)
    fill(layer)
    xs = inputs()
    weights = {name: parameter.data.double() for name, parameter in layer.named_parameters()}
    slope = layer.tp_slope.double()

    def metadata(parts: tuple, starts: Tensor) -> LinearAttentionMetadata:
        return LinearAttentionMetadata(
            **counts(parts),
            query_start_loc=starts,
            seq_lens=torch.tensor([end for _, _, end in parts]),
            state_indices_tensor=torch.tensor([BLOCKS[n] for n, *_ in parts]).int(),
        )

    def call(layer: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        layer(x, out, torch.arange(len(x)))
        return out

    found = served(layer, engine, xs, metadata, call)
    check(found, lambda x: lightning_judge(weights, slope, groups, x[0])[None], xs)
