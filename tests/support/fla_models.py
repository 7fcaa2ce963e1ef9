"""flash-linear-attention's own classes on a CPU, in float64 where they are asked for it.

They compute with Triton kernels. Each of these is replaced by FLA's naive function of the same
module, recompiled for float64, or by its plain equation where FLA has none. All else is FLA's: the
order of the sublayers, which sources a site sees, the block boundaries, the norms' eps, the layers,
the config's defaults and how a checkpoint is read and written.
"""

import importlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.fla import HF_OF_FLA
from checkpoints.tensors import TOKENIZER_FILES, TOKENIZER_SOURCE, draw, renamed
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import conv1d, linear, rms_norm, silu, softplus

from attnres_serve.verify.rewritten.wide import wide_module

# By model types: FLA's package below fla.models, and how the names of its classes begin.
CLASSES = {
    "transformer": ("transformer", "Transformer"),
    "gated_deltanet": ("gated_deltanet", "GatedDeltaNet"),
    "kda": ("kda", "KDA"),
}
DELTA = tuple(name for name in CLASSES if name != "transformer")  # with a recurrence
GATES = {"swish": silu, "silu": silu, "sigmoid": torch.sigmoid}


def imported(name: str) -> Any:
    """A module of FLA's, which has Triton's interpreter where this process imported Triton so."""
    language = getattr(sys.modules.get("triton"), "language", None)
    interpreted = language and not isinstance(language.sum, sys.modules["triton"].JITFunction)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        if interpreted:
            patch.setenv("TRITON_INTERPRET", "1")
        return importlib.import_module(name)


def classes(model_type: str) -> tuple[Any, Any]:
    """The classes of a configuration and of the causal language model."""
    package, name = CLASSES[model_type]
    module = imported(f"fla.models.{package}")
    return getattr(module, f"{name}Config"), getattr(module, f"{name}ForCausalLM")


def rms_norm_forward(
    self: Any, x: Tensor, residual: Tensor | None = None, prenorm: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """FLA's fused RMSNorm: adds the residual first and, with `prenorm`, returns the sum too."""
    x = x if residual is None else x + residual
    y = rms_norm(x, self.weight.shape, self.weight, self.eps)
    return (y, x) if prenorm else y


def gated_norm_forward(self: Any, x: Tensor, g: Tensor) -> Tensor:
    """FusedRMSNormGated: the gate multiplies what is normed."""
    return rms_norm(x, self.weight.shape, self.weight, self.eps) * GATES[self.activation](g)


def convolve(
    x: Tensor, weight: Tensor, bias: None, activation: str, **_: Any
) -> tuple[Tensor, None]:
    """causal_conv1d from the first token: x [batch, tokens, channels], weight [channels, W]."""
    assert bias is None and activation in ("silu", "swish")
    channels, width = weight.shape
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    return silu(conv1d(padded, weight[:, None], groups=channels)).transpose(1, 2), None


def convolution_forward(self: Any, x: Tensor, **_: Any) -> tuple[Tensor, None]:
    """ShortConvolution without a cache."""
    return convolve(x, self.weight[:, 0], self.bias, self.activation)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(swiglu(gate, up), weight, bias)


def l2_norm(x: Tensor) -> Tensor:
    """By the kernels: x / sqrt(sum x^2 + 1e-6)."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def check_flags(flags: dict[str, Any]) -> None:
    """Nothing is asked of a recurrence that is not here, and all that its kernels fuse is."""
    absent = ("allow_neg_eigval", "initial_state", "output_final_state", "cu_seqlens")
    assert not any(flags.pop(name) for name in absent) and all(flags.values()), flags


def gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    **flags: Any,
) -> tuple[Tensor, None]:
    """chunk_gated_delta_rule and fused_recurrent_gated_delta_rule, with all that they fuse."""
    check_flags(flags)
    naive = wide_module("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    log_decay = -A_log.exp() * softplus(g + dt_bias)
    times = v.shape[2] // q.shape[2]
    q, k = (l2_norm(x).repeat_interleave(times, 2) for x in (q, k))
    return naive(q, k, v, beta.sigmoid(), log_decay)[0].to(v.dtype), None


def kimi_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    safe_gate: bool = False,
    **flags: Any,
) -> tuple[Tensor, None]:
    """chunk_kda and fused_recurrent_kda; `safe_gate` is of the former's speed alone."""
    check_flags(flags)
    gates = wide_module("fla.ops.kda.gate")
    if lower_bound is None:
        log_decay = gates.naive_kda_gate(g, A_log, dt_bias)
    else:
        log_decay = gates.naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
    naive = wide_module("fla.ops.kda.naive").naive_recurrent_kda
    return naive(l2_norm(q), l2_norm(k), v, log_decay, beta.sigmoid())[0].to(v.dtype), None


def naive_mix() -> Callable[..., Any]:
    """FLA's naive function of a site and of the norm that follows it."""
    found: Callable[..., Any] = wide_module("fla.ops.attnres.naive").naive_attnres
    return found


@contextmanager
def on_cpu(mix: Callable[..., Any] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """FLA's kernels replaced for as long as it is entered, without attention's.

    Args:
        mix: of a site and of the norm that follows it, where it is not FLA's naive function.
    """
    for model_type in CLASSES:
        classes(model_type)
    mix = mix or naive_mix()
    module = imported
    with pytest.MonkeyPatch.context() as patch:
        for package, _ in CLASSES.values():
            patch.setattr(f"fla.models.{package}.modeling_{package}.fused_attnres", mix)
        patch.setattr("fla.models.modeling_utils.fused_attnres", mix)
        patch.setattr(module("fla.modules.norm.layernorm").RMSNorm, "forward", rms_norm_forward)
        gated = module("fla.modules.norm.fused_norm_gate").FusedRMSNormGated
        patch.setattr(gated, "forward", gated_norm_forward)
        convolution = module("fla.modules.causal_conv1d").ShortConvolution
        patch.setattr(convolution, "forward", convolution_forward)
        patch.setattr("fla.modules.mlp.swiglu", swiglu)
        patch.setattr("fla.modules.mlp.swiglu_linear", swiglu_linear)
        patch.setattr("fla.layers.gated_deltanet.causal_conv1d", convolve)
        for kernel in ("chunk", "fused_recurrent"):
            patch.setattr(f"fla.layers.gated_deltanet.{kernel}_gated_delta_rule", gated_delta_rule)
            patch.setattr(f"fla.layers.kda.{kernel}_kda", kimi_delta_rule)
        yield patch


@dataclass
class FlaModel:
    """A checkpoint of FLA's in its own class and float64.

    Attributes:
        config: FLA's configuration.
        cls: FLA's class.
        weights: all tensors by their names in the checkpoint.
    """

    config: Any
    cls: Any
    weights: dict[str, Tensor] = field(repr=False)

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities ``[len(ids), vocabulary]`` of the token after each position."""
        return self._run(ids)[0]

    def traced(self, ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Weights and magnitudes ``[tokens, sources]`` by site; the first one has one source."""
        sites = self._run(ids)[1]
        embedding = sites[0][1][:, :1]
        return {0: (torch.ones_like(embedding), embedding)} | dict(enumerate(sites, start=1))

    @torch.inference_mode()
    def _run(self, ids: Sequence[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        sites: list[tuple[Tensor, Tensor]] = []

        def mix(*, residuals: list[Tensor], **rest: Any) -> Tensor:
            mixed, weights = naive_mix()(residuals=residuals, **rest, return_weights=True)
            rms = torch.stack(residuals).square().mean(-1).sqrt()
            sites.append((weights[:, 0].T, rms[:, 0].T))
            return mixed

        with on_cpu(mix):
            model = self.cls(self.config).double().eval()
            odd = model.load_state_dict(self.weights, strict=not self.config.tie_word_embeddings)
            assert not odd.unexpected_keys and {*odd.missing_keys} <= {"lm_head.weight"}
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        assert logits.dtype == torch.float64
        return logits.log_softmax(-1), sites


def load(folder: Path) -> FlaModel:
    """A checkpoint that FLA's own class reads: nothing is missing, and nothing left over."""
    stated = json.loads((folder / "config.json").read_text())
    config_class, cls = classes(stated["model_type"])
    _, report = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    weights = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
    return FlaModel(config_class.from_pretrained(folder), cls, weights)


SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def drawn(model_type: str, seed: int, **options: Any) -> Any:
    """A model of FLA's with random weights; `options` are of its configuration."""
    config_class, cls = classes(model_type)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config_class(**options))
    tie = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        house = next(iter(renamed({name: parameter}, HF_OF_FLA)))
        shape = tuple(parameter.shape)
        value = draw(house, shape, seed, 1.0, tie)
        if parameter.dim() == 1 and "norm" not in name:  # constants of the recurrence
            value = (0.8 * parameter.data + 0.2 * value).bfloat16().float()
        parameter.data.copy_(value)
    return model


def write(folder: Path, model_type: str, seed: int, **options: Any) -> Path:
    """A random checkpoint that FLA's class saves; `options` are of its configuration."""
    drawn(model_type, seed, **SIZES | options).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER_SOURCE / name, folder / name)
    return folder
