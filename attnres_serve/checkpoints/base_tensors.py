"""Which tensors of the base model a checkpoint must hold, quantised or not, by their house names.

vLLM's loaders cut a weight that is too large without a word, leave out a bias that they do not
expect, and do not ask whether everything came where weights are quantised, so it is checked here.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

from attnres_serve.checkpoints import quantized
from attnres_serve.checkpoints.names import is_left_over
from attnres_serve.checkpoints.tensors import Stored, check_dtype, check_shape
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES, experts
from attnres_serve.families.family import HEAD, Held


class BaseTensors:
    """What the configuration of a base model asks of a checkpoint.

    Attributes:
        config: the config.json of the family.
        needed: shape of every weight, unquantised.
        reordered: linear layers that vLLM does not run as they are stored, see ``Family``.
        quantisation: the ``quantization_config``, empty where there is none.
    """

    def __init__(self, base: str, config: Mapping[str, Any]) -> None:
        """Read a configuration.

        Args:
            base: the family, a key of ``families.FAMILIES``.
            config: its config.json, with the ``quantization_config`` if there is one.

        Raises:
            CheckpointError: config.json leaves a size to a default, or has a quantisation that is
                no object.
        """
        family = FAMILIES[base]
        self.needed, self.reordered = family.shapes(config), family.reordered
        self.config, self.layout, self._fused = config, family.layout(config), family.fused
        self.quantisation: Mapping[str, Any] = config.get("quantization_config") or {}
        if not isinstance(self.quantisation, Mapping):
            raise CheckpointError(
                f"quantization_config is {self.quantisation!r}; expected null or an object."
            )
        self._in_memory = family.in_memory
        self._model = f"a {base} model with {config['num_hidden_layers']} layers"
        self._linears = {
            name.removesuffix(".weight") for name, shape in self.needed.items() if len(shape) == 2
        }

    def check(self, name: str, own: str, stored: Stored) -> None:
        """Check one tensor of the base model.

        Args:
            name: its house name.
            own: its name in the checkpoint.
            stored: its shape and type.

        Raises:
            CheckpointError: it is misshapen, of a type that cannot be read, or left over.
        """
        stem, _, leaf = name.rpartition(".")
        if self.quantisation and stem in self._linears and leaf != "bias":
            quantized.check_leaf(own, leaf, stored, self.needed[f"{stem}.weight"])
        elif name in self.needed:
            check_shape(own, stored.shape, self.needed[name])
            check_dtype(own, stored.dtype)
        elif not self.is_known(name):
            raise CheckpointError(
                f"the checkpoint holds the tensor {own}, which {self._model} does not have; the "
                "configuration and the weights do not belong together."
            )

    def held(self, own: str, name: str) -> Held | None:
        """What a tensor is that a checkpoint holds in the form of memory; None for one of disk.

        Args:
            own: its name in the checkpoint.
            name: its house name.

        Raises:
            CheckpointError: it packs the experts of a layer, and how is not known.
        """
        if name in self.needed or self.is_known(name):
            return None
        found = None if self.quantisation else self._held.get(name)
        if found is None and experts.is_packed(name):
            kind = "a quantized model" if self.quantisation else self._model
            raise CheckpointError(
                f"the tensor {own} packs the experts of a layer as transformers holds them in "
                f"memory, which is not read for {kind}; save the model by save_pretrained, which "
                "writes one tensor for each."
            )
        return found

    def packed(self, names: Collection[str]) -> dict[str, Held]:
        """The tensors in the form of memory that hold several of these, and nothing else."""
        if not any(map(experts.ONE.match, names)):  # asking Hugging Face's class takes a second
            return {}
        return {
            own: held
            for own, held in self._held.items()
            if len(held.parts) > 1 and held.parts.keys() <= {*names}
        }

    @cached_property
    def _held(self) -> Mapping[str, Held]:
        return self._in_memory(self.config)

    def is_known(self, name: str) -> bool:
        """Whether a tensor that the model does not need may be there, by its house name."""
        return (
            is_left_over(name, self.config)
            or self.is_spare_bias(name)
            or (bool(self.quantisation) and quantized.is_cache_scale(name, self.needed))
        )

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, so that a head that is stored is a copy of it."""
        return bool(self.config.get("tie_word_embeddings"))

    def is_spare_bias(self, name: str) -> bool:
        """Whether this is a bias that the model has not and that does no harm if it is zero."""
        stem, _, leaf = name.rpartition(".")
        return (
            leaf == "bias"
            and name not in self.needed
            and stem in self._linears
            and quantized.may_have_spare_biases(self.quantisation)
        )

    def check_whole(
        self,
        found: Mapping[str, Stored],
        own_names: Mapping[str, str],
        here: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Check whether tensors that were checked one by one are all that the model needs.

        Args:
            found: shape and type by house names.
            own_names: the checkpoint's own names by house names.
            here: whether a tensor is needed here, and not on another pipeline stage only.

        Raises:
            CheckpointError: a tensor is missing, or what a quantisation wrote is not whole.
        """
        layers = self._layers(found) if self.quantisation else {}
        missing = []
        for name in self.needed:
            if not here(name):
                continue
            stem = name.removesuffix(".weight")
            if stem in layers:
                own = {leaf: own_names[f"{stem}.{leaf}"] for leaf in layers[stem]}
                method = self.quantisation.get("quant_method")
                is_held = quantized.check_linear(stem, layers[stem], own, method) is not None
            else:
                is_held = name in found
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
            quantized.check_entries(self.quantisation, _modules(layers, own_names))

    def _layers(self, found: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
        """The tensors of every linear layer by what they are called below it."""
        layers: dict[str, dict[str, Stored]] = {}
        for name, stored in found.items():
            stem, _, leaf = name.rpartition(".")
            if stem in self._linears:
                layers.setdefault(stem, {})[leaf] = stored
        return layers


def _modules(
    layers: Mapping[str, Mapping[str, Stored]], own_names: Mapping[str, str]
) -> dict[str, str]:
    """The checkpoint's own names of linear layers, by their house names."""
    return {
        stem: own_names[f"{stem}.{leaf}"].removesuffix(f".{leaf}")
        for stem, leaves in layers.items()
        for leaf in leaves
    }
