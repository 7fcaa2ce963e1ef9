"""vLLM's own decoders with sites for norms.

A class is made for every architecture of ``families.FAMILIES`` when vLLM asks for it by name
(``attnres_serve.backbones:AttnResLlamaForCausalLM``).  Attention, MLP, parallelism, quantisation,
LoRA and caching stay vLLM's; what changes is the norms, the weights' names and what travels between
pipeline stages.
"""

import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from attnres_serve import backend_choice, compat, formats, heap, plan, quantised, settings
from attnres_serve.base_tensors import BaseTensors
from attnres_serve.configs import spec_of
from attnres_serve.errors import CheckpointError
from attnres_serve.families import BY_ARCHITECTURE, FAMILIES, FINAL_NORM, SITE_NORMS
from attnres_serve.rehearsal import rehearse
from attnres_serve.residual import SiteNorm
from attnres_serve.schedule import site_name, sites
from attnres_serve.spec import AttnResSpec
from attnres_serve.tensors import (
    FLOATS,
    PARTS,
    TIED,
    Stored,
    check_part,
    check_spare_bias,
    check_tied,
    expected_parts,
    same_tensor,
    site_of,
    split,
    tensor_name,
)
from attnres_serve.weights import DTYPES

if TYPE_CHECKING:
    from vllm.model_executor.models.llama import LlamaForCausalLM as _Base
else:
    _Base = object


class AttnResMixin(_Base):
    """What an AttnRes model adds to a model class of vLLM's."""

    model: nn.Module
    make_empty_intermediate_tensors: object

    def __init__(self, *, vllm_config, prefix: str = "", **kwargs) -> None:
        compat.permit_amx()
        compat.forget_shared_memory()
        compat.give_loops_room()
        if compat.on_cpu():
            heap.keep_freed()
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        config = vllm_config.model_config.hf_config
        self.attn_res_format = formats.by_name(config.attn_res_format)
        self.attn_res_num_layers = config.num_hidden_layers
        base = BY_ARCHITECTURE[type(self).__name__]
        self.attn_res_base = BaseTensors(base, config.to_dict())
        self.attn_res_sites: dict[int, SiteNorm] = {}
        self.attn_res_parameters: dict[tuple[int, str], list[str]] = {}
        self.attn_res_loaded = False
        self.attn_res_backend: str | None = None
        if config.attn_res_qk_norm_eps is not None:
            _set_qk_norm_eps(self.model, config.attn_res_qk_norm_eps)
        if not vllm_config.model_config.enforce_eager:
            compat.tell_origin(vllm_config)
            compat.keep_order_of_mutations()
            compat.accept_compiled_code()
        spec = spec_of(config)
        if spec is None:
            return
        algorithm = settings.algorithm(vllm_config.additional_config)
        self.attn_res_backend, backend = backend_choice.choose(vllm_config)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.attn_res_sites = install_sites(self.model, spec, algorithm, backend, tokens)
        self.attn_res_parameters = parameters_of(self.attn_res_sites, spec)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors = (
            compat.empty_intermediate_tensors(
                rows_received(spec, min(self.attn_res_sites)), config.hidden_size
            )
        )
        rehearse(self.model, self.attn_res_sites)
        compat.logger().info(
            "%s AttnRes checkpoint on %s: %d blocks over %d sublayers%s, algorithm %s, backend %s",
            config.attn_res_format,
            type(self).__name__,
            spec.num_blocks,
            spec.num_sublayers,
            " (Full AttnRes)" if spec.is_full else "",
            algorithm,
            self.attn_res_backend,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint of any served format; after the first time, also a part of one.

        Raises:
            CheckpointError: a tensor of this stage is missing, left over or misshapen.
        """
        named: dict[str, str] = {}
        found: dict[str, Stored] = {}
        loaded = super().load_weights(self._by_module(weights, named, found))
        if not self.attn_res_loaded:
            self._require_all(named, found, loaded)
        self.attn_res_loaded = True
        return loaded

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Auxiliary hidden states would be hidden + residual, which a depth state is not."""
        raise CheckpointError(
            "EAGLE-type speculation needs auxiliary hidden states, which AttnRes models do not "
            "have; start without it."
        )

    def attn_res_executed(self) -> dict[str, dict[str, int]]:
        """Forward passes since the start by algorithm, eager and compiled.

        Warm-up and profiling passes are included.
        """
        if not self.attn_res_sites:
            return {}
        counts = self.attn_res_sites[max(self.attn_res_sites)].executed
        assert counts is not None, "install_sites lets the last site count"
        return {
            name: dict(zip(("eager", "compiled"), row, strict=True))
            for name, row in zip(settings.ALGORITHMS, counts.tolist(), strict=True)
        }

    def _by_module(
        self, weights: Iterable[tuple[str, Tensor]], named: dict[str, str], found: dict[str, Stored]
    ) -> Iterator[tuple[str, Tensor]]:
        """Rename the stream; an AttnRes tensor becomes a parameter of the norm at its site.

        Args:
            weights: the checkpoint's tensors by its own names.
            named: gets those names by house names.
            found: gets what the tensors are, by house names.
        """
        layers = self.attn_res_num_layers
        tied: dict[str, Tensor] = {}
        whole = (split(self.attn_res_format, *named_tensor) for named_tensor in weights)
        for original, tensor in chain.from_iterable(whole):
            name = self.attn_res_format.rename(original)
            if name in named:
                raise CheckpointError(same_tensor(named[name], original))
            named[name] = original
            if name in TIED and self.config.tie_word_embeddings:
                tied[name] = tensor.to("cpu", copy=True)  # loaders may free it with its file
                check_tied(tied)
            stored = Stored(tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype)))
            found[name] = stored
            site = site_of(name, layers)
            if site is None:
                self.attn_res_base.check(name, original, stored)
                if self.attn_res_base.is_spare_bias(name):
                    check_spare_bias(original, tensor)
                yield name, tensor
                continue
            if site not in self.attn_res_parameters:
                raise CheckpointError(
                    f"{original} is an AttnRes tensor for which the configuration has no site."
                )
            check_part(original, stored, *site, self.config.hidden_size, layers)
            for parameter in self.attn_res_parameters[site]:
                yield parameter, tensor.reshape(-1)

    def _require_all(
        self, named: Mapping[str, str], found: Mapping[str, Stored], loaded: Collection[str]
    ) -> None:
        """Raise unless all came that this stage needs.

        No part of a checkpoint is left at what memory held, also where no folder could be judged
        before, and where vLLM quantises other layers than the checkpoint does.
        """
        layers = self.attn_res_num_layers
        for (site, part), parameters in self.attn_res_parameters.items():
            if parameters and tensor_name(site, part, layers) not in found:
                raise CheckpointError(
                    f"the checkpoint lacks the {PARTS[part]} of {site_name(site, layers)}; a "
                    "missing one is never taken as zero."
                )
        self.attn_res_base.require(found, named, partial(compat.is_on_this_stage, self))
        if self.attn_res_base.quantisation:
            self._require_one_quantisation(named, found, loaded)

    def _require_one_quantisation(
        self, named: Mapping[str, str], found: Mapping[str, Stored], loaded: Collection[str]
    ) -> None:
        """Raise if vLLM reads ``quantization_config`` otherwise than the checkpoint is quantised.

        It would cast weights of another type, and multiply by scales that nothing filled.
        """
        for name in filter(quantised.is_weight, found):
            parameter, dtype = compat.parameter(self, name), found[name].dtype
            wanted = dtype if parameter is None else DTYPES.get(parameter.dtype, dtype)
            if dtype != wanted and not {dtype, wanted} <= {*FLOATS}:
                raise CheckpointError(
                    f"the tensor {named[name]} holds {dtype}, but by quantization_config vLLM "
                    f"reads {wanted}; quantization_config must say how each layer is quantised."
                )
        if missing := compat.unfilled(self, loaded):
            raise CheckpointError(
                f"vLLM needs {missing[0]} by quantization_config, and no tensor of the checkpoint "
                "gives it; quantization_config must name the layers that are quantised, and the "
                "checkpoint must hold all that their quantisation wrote."
            )


def parameters_of(
    installed: dict[int, SiteNorm], spec: AttnResSpec
) -> dict[tuple[int, str], list[str]]:
    """The parameters of this pipeline stage that each AttnRes tensor of a checkpoint fills.

    There are several where sites share a query, and none where they are another stage's.
    """
    names = {"proj": "query", "norm": "key_norm", "bias": "bias"}
    parameters: dict[tuple[int, str], list[str]] = {found: [] for found in expected_parts(spec)}
    for site, part in parameters:
        parameters[site, part] = [
            f"{_module_name(index, spec.num_layers)}.{names[part]}"
            for index, norm in installed.items()
            if norm.site.mixes and norm.site.tensors == site
        ]
    return parameters


def _module_name(site: int, num_layers: int) -> str:
    if site == 2 * num_layers:
        return f"model.{FINAL_NORM}"
    return f"model.layers.{site // 2}.{SITE_NORMS[site % 2]}"


def install_sites(
    model: nn.Module, spec: AttnResSpec, algorithm: str, backend: ModuleType, tokens: int
) -> dict[int, SiteNorm]:
    """Put a ``SiteNorm`` in the place of every norm of this pipeline stage.

    Args:
        model: vLLM's decoder (``layers``, ``norm``, ``start_layer``, ``end_layer``).
        spec: its depth attention.
        algorithm: one of ``settings.ALGORITHMS``.
        backend: what computes the sites, see ``kernels.backends``.
        tokens: the most of one step.

    Returns:
        The sites of this stage by their index.
    """
    final = spec.num_sublayers
    has_final = compat.is_norm(getattr(model, FINAL_NORM))
    first, last = 2 * model.start_layer, 2 * model.end_layer - 1
    installed: dict[int, SiteNorm] = {}
    for site in sites(spec):
        if first <= site.index <= last:
            owner, name = model.layers[site.index // 2], SITE_NORMS[site.index % 2]
        elif site.index == final and has_final:
            owner, name = model, FINAL_NORM
        else:
            continue
        norm = SiteNorm(getattr(owner, name), site, spec, algorithm, backend)
        setattr(owner, name, norm)
        installed[site.index] = norm
    _look_ahead(installed, tokens)
    installed[min(installed)].enters_stage = first > 0
    installed[max(installed)].leaves_stage = not has_final
    installed[max(installed)].count_passes()
    return installed


def _look_ahead(installed: dict[int, SiteNorm], tokens: int) -> None:
    """Tell every site of a stage what the stage needs beside it."""
    every = list(installed.values())
    slots = max(norm.site.num_sources for norm in every)
    mixing = [norm for norm in every if norm.site.mixes and norm.site.index > 0]
    for norm in every:
        norm.slots = slots
        norm.ahead = [later for later in mixing if later.site.index >= norm.site.index]
    itemsize, in_place = every[0].weight.element_size(), every[0].backend.IN_PLACE
    most = plan.most_sites(tokens, every[0].hidden_size, itemsize, in_place)
    groups = plan.phase_1_groups([norm.site for norm in mixing], most)
    for group in groups:
        members = [installed[site.index] for site in group]
        for position, norm in enumerate(members):
            norm.group, norm.position = members, position
    if every[0].algorithm == "two_phase" and max(map(len, groups), default=1) == 1:
        compat.logger().warning(
            "AttnRes: no two sites of this pipeline stage gain from a common phase 1, so with "
            "two_phase every site is a single pass."
        )


def rows_received(spec: AttnResSpec, first_site: int) -> int:
    """Rows of the packed state that a pipeline stage receives: the sources of the site before."""
    return sites(spec)[first_site - 1].num_sources if first_site else 1


def _set_qk_norm_eps(model: nn.Module, eps: float) -> None:
    for layer in model.layers[model.start_layer : model.end_layer]:
        layer.self_attn.q_norm.variance_epsilon = eps
        layer.self_attn.k_norm.variance_epsilon = eps


def _make(architecture: str) -> type[nn.Module]:
    family = FAMILIES[BY_ARCHITECTURE[architecture]]
    base = getattr(importlib.import_module(family.module), family.cls)
    return type(architecture, (AttnResMixin, base), {"__module__": __name__})


def __getattr__(name: str) -> type[nn.Module]:
    if name not in BY_ARCHITECTURE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _make(name)
    return globals()[name]
