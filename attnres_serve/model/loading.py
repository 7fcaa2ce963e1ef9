"""Loading of a checkpoint's tensors into the parameters of a model."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnres_serve.checkpoints.base_tensors import BaseTensors
from attnres_serve.checkpoints.edited import of_every_source
from attnres_serve.checkpoints.finite import check_finite
from attnres_serve.checkpoints.names import (
    PARTS,
    expected_parts,
    is_draft,
    is_ignored,
    is_of_images,
    is_unread,
    site_of,
)
from attnres_serve.checkpoints.read import DTYPES
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensors import FLOATS, Stored
from attnres_serve.compat import decoder, host
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.formats.format import Format
from attnres_serve.model.config import spec_of
from attnres_serve.model.edited_sites import EditedSites
from attnres_serve.model.origin import Origin
from attnres_serve.model.quantized_weights import require_one_quantisation
from attnres_serve.model.site_norm import SiteNorm
from attnres_serve.start import events

if TYPE_CHECKING:
    from vllm.model_executor.models.llama import LlamaForCausalLM as _Base
else:
    _Base = object


class LoadingMixin(_Base):
    """The loading of a checkpoint into a vLLM model class.

    Attributes:
        attn_res_format: the checkpoint's format, see ``formats``.
        attn_res_base: the family's tensors, without those of AttnRes.
        attn_res_parameters: see ``parameters_of``.
        attn_res_dtype: dtype of activations and, by default, of weights.
        attn_res_has_draft_head: whether vLLM takes drafts from the checkpoint's draft head.
        attn_res_loaded: whether a whole checkpoint has been loaded, and no other is expected.
        attn_res_takes_house_names: whether tensors may have house names in any format.
        attn_res_draft_head: house names of the tensors of the checkpoint's draft head.
        attn_res_origin: the folder that a partial update reads its other tensors from.
        attn_res_edited: the sites with the edits in them; None for a model without edits.
    """

    attn_res_format: Format
    attn_res_base: BaseTensors
    attn_res_parameters: dict[tuple[int, str], list[str]]
    attn_res_dtype: torch.dtype
    attn_res_has_draft_head: bool
    attn_res_loaded: bool
    attn_res_takes_house_names = False
    attn_res_draft_head: frozenset[str] = frozenset()
    attn_res_origin: Origin
    attn_res_edited: EditedSites | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a whole checkpoint of any served format.

        Raises:
            CheckpointError: a tensor of this stage is missing, unexpected or misshapen, or has a
                number that is not finite.
            SettingError: weights are loaded already, and no update was begun.
        """
        if self.attn_res_loaded:
            raise SettingError(
                "the weights of this model are loaded, and are not replaced one by one; call "
                'collective_rpc("reload_weights") of the engine with all of them.'
            )
        index = self.attn_res_index(self.attn_res_takes_house_names)
        loaded: set[str] = super().load_weights(self._by_module(weights, index))
        loaded |= self._write_edits()
        # No parameter keeps uninitialised memory, even if no folder could be validated before.
        index.close(self.attn_res_is_here)
        if index.base.quantisation:
            require_one_quantisation(self, index, loaded)
        _log_ignored(index, self.attn_res_has_draft_head)
        events.tell("loaded")
        self.attn_res_loaded = True
        config = self.attn_res_base.config
        self.attn_res_draft_head |= {name for name in index.stored if is_draft(name, config)}
        return loaded

    def attn_res_index(self, takes_house_names: bool) -> TensorIndex:
        """An empty index of a checkpoint of this model."""
        spec = spec_of(self.config)
        return TensorIndex(self.attn_res_format, self.attn_res_base, spec, takes_house_names)

    def _write_edits(self) -> set[str]:
        """Write edits into the sites; return the names of biases, which a checkpoint may lack."""
        if self.attn_res_edited is None:
            return set()
        self.attn_res_edited.keep()
        biases = {id(module.bias) for module in self.modules() if isinstance(module, SiteNorm)}
        return {name for name, parameter in self.named_parameters() if id(parameter) in biases}

    def _by_module(
        self, weights: Iterable[tuple[str, Tensor]], index: TensorIndex
    ) -> Iterator[tuple[str, Tensor]]:
        """Rename the stream; an AttnRes tensor becomes a parameter of the norm at its site.

        Args:
            weights: the checkpoint's tensors by their names in it.
            index: the index that takes them.
        """
        for stored_name, tensor in weights:
            dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
            parts = index.take(stored_name, Stored(tuple(tensor.shape), dtype))
            first = next(iter(parts))
            if decoder.is_ours_to_look_at(stored_name) and not is_ignored(first, index.base.config):
                check_finite(stored_name, tensor, self.attn_res_served_in(first, parts[first]))
            for name, piece in index.pieces(stored_name, tensor):
                index.check_values(name, piece)
                if (site := parts[name]) is None:
                    if not is_ignored(name, index.base.config):
                        yield name, piece
                    continue
                for parameter in self.attn_res_parameters[site]:
                    values = piece.reshape(-1)
                    if site[1] == "bias":
                        like = decoder.parameter(self, parameter)
                        values = of_every_source(values, like.numel())
                    yield parameter, values
        if self.attn_res_format.lacks_first_site:
            hidden = index.base.config["hidden_size"]
            for part in PARTS:  # vLLM requires all parameters; no result depends on these
                for parameter in self.attn_res_parameters.get((0, part), ()):
                    yield parameter, torch.zeros(hidden)

    def attn_res_served_in(self, name: str, site: tuple[int, str] | None) -> torch.dtype:
        """The dtype that a tensor is cast to, by its house name and its site."""
        if site is not None:
            return torch.float32
        dtype = getattr(decoder.parameter(self, name), "dtype", None)
        return dtype if DTYPES.get(dtype) in FLOATS else self.attn_res_dtype

    def attn_res_is_here(self, name: str) -> bool:
        """Whether this pipeline stage needs a tensor, by its house name."""
        site = site_of(name, self.attn_res_base.layout)
        if site is None:
            return decoder.is_on_this_stage(self, name)
        return bool(self.attn_res_parameters[site])


def _log_ignored(index: TensorIndex, has_draft_head: bool) -> None:
    """Log which tensors of a checkpoint are ignored, and what the model lacks without them.

    Args:
        index: all tensors of the checkpoint.
        has_draft_head: whether the tensors of its draft head are read.
    """
    for name in filter(is_unread, index.stored):
        if decoder.is_first_worker():
            host.logger().info(
                "AttnRes: %s is left aside, as the code that wrote it never reads it.",
                index.stored_names[name],
            )
    drafts = sum(is_draft(name, index.base.config) for name in index.stored)
    for count, what, without in (
        (0 if has_draft_head else drafts, "predict further tokens", "drafts of its own"),
        (sum(map(is_of_images, index.stored)), "read images", "images"),
    ):
        if count and decoder.is_first_worker():
            host.logger().warning(
                "AttnRes: %d tensors that %s are left aside; the model is served without %s.",
                *(count, what, without),
            )


def parameters_of(
    installed: dict[int, SiteNorm], spec: AttnResSpec, decoder_name: str
) -> dict[tuple[int, str], list[str]]:
    """The parameters of this pipeline stage for each AttnRes tensor of a checkpoint.

    A tensor has several if sites share a query, and none if its sites are on another stage.

    Args:
        installed: the sites of this stage.
        spec: the model's depth attention.
        decoder_name: the attribute of the model that holds the decoder.
    """
    names = {"proj": "query", "norm": "key_norm", "bias": "bias"}
    parameters: dict[tuple[int, str], list[str]] = {key: [] for key in expected_parts(spec)}
    for site, part in parameters:
        parameters[site, part] = [
            f"{decoder_name}.{norm.site.norm}.{names[part]}"
            for norm in installed.values()
            if norm.site.mixes and norm.site.tensors == site
        ]
    return parameters
