"""vLLM's decoders with sites instead of norms.

A class is made for every architecture of ``families.FAMILIES`` when vLLM imports its name
(``model.causal_lm:AttnResLlamaForCausalLM``).  Attention, MLP, parallelism, quantisation, LoRA and
caching stay vLLM's.  The norms, the names of weights and the tensors between pipeline stages
change.
"""

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attnres_serve import formats, settings
from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.compat import decoder, engine_config, host, prepare, token_shards
from attnres_serve.compat.renewal import Update
from attnres_serve.depth import static_edits
from attnres_serve.families import BY_ARCHITECTURE, latent
from attnres_serve.model import backend as backend_choice
from attnres_serve.model import linear_attention, replacing, streams
from attnres_serve.model.config import spec_of
from attnres_serve.model.dry_run import run_dry
from attnres_serve.model.edited_sites import EditedSites
from attnres_serve.model.loading import LoadingMixin, parameters_of
from attnres_serve.model.origin import Origin
from attnres_serve.model.sharded_site import Division, described, leave_sums
from attnres_serve.model.site_norm import SiteNorm
from attnres_serve.model.stage import install_sites, rows_received
from attnres_serve.settings import MIXED
from attnres_serve.start import events

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFTS = "draft_model"  # vLLM's prefix of the names of a draft model


class AttnResMixin(LoadingMixin):
    """The additions of AttnRes to a vLLM model class."""

    make_empty_intermediate_tensors: object

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "", **kwargs: Any) -> None:
        prepare.worker(vllm_config)
        linear_attention.replace_for_cpu()
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        config = vllm_config.model_config.hf_config
        self.attn_res_format = formats.by_name(config.attn_res_format)
        family = BY_ARCHITECTURE[type(self).__name__]
        # vLLM may read it from another file.
        quantisation = getattr(config, "quantization_config", None)
        written = {**config.attn_res_config, "quantization_config": quantisation}
        self.attn_res_base = BaseTensors(family.name, written)
        self.attn_res_sites: dict[int, SiteNorm] = {}
        self.attn_res_parameters = {}
        self.attn_res_dtype = vllm_config.model_config.dtype
        self.attn_res_has_draft_head = engine_config.speculation_method(vllm_config) == settings.MTP
        self.attn_res_loaded = False
        self.attn_res_origin = Origin(vllm_config.model_config.model)
        self.attn_res_backend: str | None = None
        self.attn_res_algorithm: str | None = None
        model: nn.Module = decoder.of(self)
        if family.has_fixed_eps:
            _set_all_eps(model, family.epsilon(config.attn_res_config))
        if config.attn_res_qk_norm_eps is not None:
            _set_eps(model, ("q_norm", "k_norm"), config.attn_res_qk_norm_eps)
        if family.is_latent:
            _set_eps(model, latent.NORMS, latent.EPS)
        if not vllm_config.model_config.enforce_eager:
            engine_config.tell_origin(vllm_config)
        tokens = self.attn_res_chunk = vllm_config.scheduler_config.max_num_batched_tokens
        spec = stored = spec_of(config)
        # A draft model is another model, with other sites.
        edits = None if prefix == DRAFTS else settings.edits(vllm_config.additional_config)
        resolved = None if edits is None else static_edits.resolve(edits, spec)
        if spec is None or stored is None:
            return
        # Sites with a recency bias have one bias per source.
        if resolved is not None and not spec.has_biases:
            spec = replace(spec, recency_bias=True)
        self.attn_res_backend, backend = backend_choice.choose(vllm_config)
        algorithm = self.attn_res_algorithm = backend_choice.choose_algorithm(
            vllm_config, spec.num_blocks, spec.num_sublayers, self.attn_res_backend
        )
        least = token_shards.least(vllm_config)
        division = None if least is None else Division(least)
        most = token_shards.most(vllm_config)
        self.attn_res_sites = install_sites(model, spec, algorithm, backend, most, division)
        sharded = ""
        if least is not None:
            leave_sums(model, spec, self.attn_res_sites)
            self.attn_res_chunk = least - 1
            sharded = described(vllm_config, self.attn_res_sites, least)
        elif (shard_tokens := settings.shard_tokens(vllm_config.additional_config)) is not None:
            sharded = f", no sites sharded: no step has {shard_tokens} tokens"
        self.attn_res_parameters = parameters_of(self.attn_res_sites, stored, decoder.name_in(self))
        if resolved is not None:
            self.attn_res_edited = EditedSites(self.attn_res_sites, resolved)
        self.make_empty_intermediate_tensors = model.make_empty_intermediate_tensors = (
            decoder.empty_intermediate_tensors(
                rows_received(spec, min(self.attn_res_sites)), config.hidden_size
            )
        )
        run_dry(model, self.attn_res_sites)
        if (
            self.attn_res_has_draft_head
            and family.draft is not None
            and family.draft.reads == MIXED
        ):
            self.attn_res_sites[max(self.attn_res_sites)].keep_mix(tokens)
        self.attn_res_stream = settings.choice(vllm_config.additional_config, settings.STREAM_KEY)
        events.tell(
            "built",
            how=f"algorithm {algorithm}, backend {self.attn_res_backend}, "
            f"{str(vllm_config.model_config.dtype).removeprefix('torch.')}, "
            f"context of {vllm_config.model_config.max_model_len} tokens{sharded}",
        )
        host.logger().info(
            "%s AttnRes checkpoint on %s: %d blocks over %d sublayers%s, algorithm %s, backend "
            "%s%s",
            config.attn_res_format,
            type(self).__name__,
            spec.num_blocks,
            spec.num_sublayers,
            " (Full AttnRes)" if spec.is_full else "",
            algorithm,
            self.attn_res_backend,
            sharded,
        )

    def attn_res_begin(
        self, worker: Any, is_draft_model: bool = False, is_partial: bool = False
    ) -> Update:
        """An update of the served weights; see ``replacing.begin``."""
        return replacing.begin(worker, is_draft_model, is_partial)

    def attn_res_read(self, worker: Any, name: str | None) -> None:
        """Replace the weights by those of a folder; see ``replacing.from_folder``."""
        replacing.from_folder(worker, name)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Let the decoder return the hidden states before these layers for EAGLE draft heads."""
        super().set_aux_hidden_state_layers(layers)
        if self.attn_res_sites:
            add = streams.adder(self.attn_res_sites, layers, self.attn_res_stream)
            decoder.of(self)._maybe_add_hidden_state = add

    def get_mtp_target_hidden_states(self) -> Tensor | None:
        """The hidden states for the checkpoint's draft head; None for the decoder's output."""
        sites = self.attn_res_sites
        return sites[max(sites)].mixed if sites else None

    def attn_res_executed(self) -> dict[str, dict[str, int]]:
        """Numbers of forward passes since the start, by algorithm, eager and compiled.

        They include warm-up and profiling passes.
        """
        if not self.attn_res_sites:
            return {}
        counts = self.attn_res_sites[max(self.attn_res_sites)].executed
        assert counts is not None, "install_sites lets the last site count"
        return {
            name: dict(zip(("eager", "compiled"), row, strict=True))
            for name, row in zip(settings.ALGORITHMS, counts.tolist(), strict=True)
        }


def _set_all_eps(model: nn.Module, eps: float) -> None:
    """Set the epsilon of every norm of a decoder."""
    for module in model.modules():
        if decoder.is_norm(module):
            module.variance_epsilon = eps


def _set_eps(model: nn.Module, norms: tuple[str, ...], eps: float) -> None:
    """Set the epsilon of the named norms within attention, where they exist."""
    for layer in model.layers[model.start_layer : model.end_layer]:
        for name in norms:
            if (norm := getattr(layer.self_attn, name, None)) is not None:
                norm.variance_epsilon = eps


def _make(architecture: str) -> type[nn.Module]:
    family = BY_ARCHITECTURE[architecture]
    base = getattr(importlib.import_module(family.module), family.cls)
    return type(architecture, (AttnResMixin, base), {"__module__": __name__})


def __getattr__(name: str) -> type[nn.Module]:
    if name not in BY_ARCHITECTURE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _make(name)
    return made
