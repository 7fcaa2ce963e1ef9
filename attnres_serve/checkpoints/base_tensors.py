"""The tensors, except those of AttnRes, that a checkpoint must hold, by their house names.

vLLM's loaders silently cut a weight that is too large and skip an unexpected bias. For quantised
weights they do not check that all came. So it is checked here.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnres_serve.checkpoints import quantized
from attnres_serve.checkpoints.names import is_ignored
from attnres_serve.checkpoints.tensors import Stored, check_dtype, check_shape
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES, experts
from attnres_serve.families.family import HEAD, Held

if TYPE_CHECKING:
    from torch import Tensor


class BaseTensors:
    """The tensors that a family's configuration requires of a checkpoint.

    Attributes:
        config: the family's config.json.
        needed: shape of every weight, unquantised.
        reordered: linear layers that vLLM reorders at load, see ``Family``.
        quantisation: the ``quantization_config``; empty without one.
    """

    def __init__(self, family_name: str, config: Mapping[str, Any]) -> None:
        """Read a configuration.

        Args:
            family_name: a key of ``families.FAMILIES``.
            config: its config.json, with the ``quantization_config`` if there is one.

        Raises:
            CheckpointError: config.json does not state a size, or has a quantisation that is no
                object.
        """
        facts = FAMILIES[family_name]
        self.needed, self.reordered = facts.shapes(config), facts.reordered
        self.config, self.layout, self._fused = config, facts.layout(config), facts.fused
        self.quantisation: Mapping[str, Any] = config.get("quantization_config") or {}
        if not isinstance(self.quantisation, Mapping):
            raise CheckpointError(
                f"quantization_config is {self.quantisation!r}; expected null or an object."
            )
        self._in_memory = facts.in_memory
        self._model = f"a {family_name} model with {config['num_hidden_layers']} layers"
        self._linears = {
            name.removesuffix(".weight") for name, shape in self.needed.items() if len(shape) == 2
        }

    def check(self, name: str, stored_name: str, stored: Stored) -> None:
        """Check one tensor of the base model.

        Args:
            name: its house name.
            stored_name: its name in the checkpoint.
            stored: its shape and type.

        Raises:
            CheckpointError: it is misshapen, of a type that cannot be read, or left over.
        """
        stem, _, leaf = name.rpartition(".")
        if self.quantisation and stem in self._linears and leaf != "bias":
            quantized.check_leaf(stored_name, leaf, stored, self.needed[f"{stem}.weight"])
        elif name in self.needed:
            check_shape(stored_name, stored.shape, self.needed[name])
            check_dtype(stored_name, stored.dtype)
        elif not self.is_known(name):
            raise CheckpointError(
                f"the checkpoint holds the tensor {stored_name}, which {self._model} does not "
                "have; the configuration and the weights do not belong together."
            )

    def held(self, stored_name: str, name: str) -> Held | None:
        """The form of a tensor that was stored as in memory; None for one in the form of disk.

        Args:
            stored_name: its name in the checkpoint.
            name: its house name.

        Raises:
            CheckpointError: it packs the experts of a layer in an unknown way.
        """
        if name in self.needed or self.is_known(name):
            return None
        packed = None if self.quantisation else self._held.get(name)
        if packed is None and experts.is_packed(name):
            kind = "a quantized model" if self.quantisation else self._model
            raise CheckpointError(
                f"the tensor {stored_name} packs the experts of a layer as transformers holds them "
                f"in memory, which is not read for {kind}; save the model by save_pretrained, "
                "which writes one tensor for each."
            )
        return packed

    def packed(self, names: Collection[str]) -> dict[str, Held]:
        """Tensors in the form of memory that hold several of these, and nothing else."""
        # Only for experts, as asking Hugging Face's class takes a second.
        if not any(map(experts.ONE_EXPERT.match, names)):
            return {}
        return {
            stored_name: held
            for stored_name, held in self._held.items()
            if len(held.parts) > 1 and held.parts.keys() <= {*names}
        }

    @cached_property
    def _held(self) -> Mapping[str, Held]:
        return self._in_memory(self.config)

    def is_known(self, name: str) -> bool:
        """Whether a tensor is allowed though the model does not need it, by its house name."""
        return (
            is_left_over(name, self.config)
            or self.is_spare_bias(name)
            or (bool(self.quantisation) and quantized.is_cache_scale(name, self.needed))
        )

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, so that a stored head is a copy."""
        return bool(self.config.get("tie_word_embeddings"))

    def is_spare_bias(self, name: str) -> bool:
        """Whether this is a bias that the model does not have; it is harmless if zero."""
        stem, _, leaf = name.rpartition(".")
        return (
            leaf == "bias"
            and name not in self.needed
            and stem in self._linears
            and quantized.may_have_spare_biases(self.quantisation)
        )

    def check_whole(
        self,
        tensors: Mapping[str, Stored],
        stored_names: Mapping[str, str],
        here: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Check that tensors which were checked one by one are complete.

        Args:
            tensors: shape and type by house names.
            stored_names: the checkpoint's names by house names.
            here: whether this pipeline stage needs a tensor.

        Raises:
            CheckpointError: a tensor is missing, or a quantised layer is incomplete.
        """
        layers = self._layers(tensors) if self.quantisation else {}
        missing = []
        for name in self.needed:
            if not here(name):
                continue
            stem = name.removesuffix(".weight")
            if stem in layers:
                leaf_names = {leaf: stored_names[f"{stem}.{leaf}"] for leaf in layers[stem]}
                method = self.quantisation.get("quant_method")
                is_held = quantized.check_linear(stem, layers[stem], leaf_names, method) is not None
            else:
                is_held = name in tensors
            if not is_held:
                missing.append(name)
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            tied = missing == [HEAD] and not self.is_tied
            way = " Set tie_word_embeddings to true if its head is the embedding."
            raise CheckpointError(
                f"the checkpoint lacks the tensor {missing[0]} (in house names){more}, which "
                f"{self._model} needs.{way if tied else ''}"
            )
        if self.quantisation:
            quantized.check_fused(layers, self._fused)
            quantized.check_experts(layers)
            quantized.check_entries(self.quantisation, _modules(layers, stored_names))

    def _layers(self, tensors: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
        """The tensors of every linear layer by their names within it."""
        layers: dict[str, dict[str, Stored]] = {}
        for name, stored in tensors.items():
            stem, _, leaf = name.rpartition(".")
            if stem in self._linears:
                layers.setdefault(stem, {})[leaf] = stored
        return layers


def is_left_over(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor, by its house name, is in many checkpoints but unused.

    These are rotary tables, copies for a tied head, and those of ``is_ignored``."""
    tied = name == HEAD and config.get("tie_word_embeddings")
    return tied or name.endswith("rotary_emb.inv_freq") or is_ignored(name, config)


def check_spare_bias(name: str, tensor: "Tensor") -> None:
    """Raise CheckpointError if a bias that the model does not have is not zero.

    vLLM would skip it silently.
    """
    if tensor.any():
        raise CheckpointError(
            f"the checkpoint holds the bias {name}, which is not zero and which the model does not "
            "have by config.json; the configuration and the weights do not belong together."
        )


def _modules(
    layers: Mapping[str, Mapping[str, Stored]], stored_names: Mapping[str, str]
) -> dict[str, str]:
    """The checkpoint's names of linear layers, by their house names."""
    return {
        stem: stored_names[f"{stem}.{leaf}"].removesuffix(f".{leaf}")
        for stem, leaves in layers.items()
        for leaf in leaves
    }
