"""The facts of one model family, as data and as functions of a config.json."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnres_serve.depth.layout import Layout
from attnres_serve.families.limits import UNTRIED, Limit

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, Any]  # the content of a config.json
Shape = tuple[int, ...]
Check = Callable[[str, Config], None]  # of a family's name and a config.json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BAILING_EMBEDDING = "model.word_embeddings.weight"
# A family has one of these.
EMBEDDINGS = (EMBEDDING, "backbone.embeddings.weight", BAILING_EMBEDDING)
PREFIX = "attnres_"  # of our model types


# The number of layers after the last that predict further tokens; the model runs without them.
FURTHER = "num_nextn_predict_layers"


@dataclass(frozen=True)
class Held:
    """A tensor in memory that has another form on disk.

    Attributes:
        shape: its shape.
        parts: shapes of the corresponding tensors on disk, by name.
        unpack: gives those tensors by name, as views if possible.
    """

    shape: Shape
    parts: Mapping[str, Shape]
    unpack: Callable[["Tensor"], Mapping[str, "Tensor"]]


@dataclass(frozen=True)
class Head:
    """The layers of a checkpoint that predict further tokens; vLLM drafts with them.

    Attributes:
        reads: its input: "normed", the last norm's output, or "mixed", that norm's input.
        layer: the prefix of its layer's tensor names, with {} for the layer's number.
        others: the other tensors by name, each with its shape in the model's sizes: "d" for the
            hidden size, "dd" for twice that, "v" for the vocabulary.
        is_behind: whether its layers are numbered, and built, after the model's last layer.
        keys: keys of config.json for its number of layers; the first one present counts.
        usual: that number if none is stated.
        cls: the class in the family's module; None if vLLM has one.
    """

    reads: str
    layer: str
    others: Mapping[str, tuple[str, ...]]
    is_behind: bool = False
    keys: tuple[str, ...] = (FURTHER,)
    usual: int | None = None
    cls: str | None = None

    def layers(self, config: Config) -> Any:
        """The number of its layers as config.json states it, unchecked."""
        return next((config[key] for key in self.keys if config.get(key) is not None), self.usual)

    @property
    def architecture(self) -> str | None:
        """Our name for its class, if vLLM has none."""
        return self.cls and f"AttnRes{self.cls}"


def _usual_head_size(config: Config) -> int | None:
    if "num_attention_heads" not in config:
        return None
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: a vLLM class whose decoder layers follow the residual convention.

    ``hidden, residual = norm(hidden, residual)`` runs before every sublayer and once at the end;
    those norms become the sites.

    Attributes, which models they are:
        name: the key in ``FAMILIES``.
        title: the name for people.
        module, cls: the vLLM class.
        listed: the architecture under which vLLM lists the class; None if that is its name.
        treated_as: the architecture whose special cases in vLLM it shares; None for none.
        hf: the Hugging Face model type with the same config.json and tensor names.
        has_hf_class: whether Hugging Face has the model too.
        is_stock: whether vLLM has it with standard residuals.

    Attributes, how config.json is read:
        keys: gives the keys of config.json that its classes read, besides the common ones.
        other_names: keys that vLLM's class reads, by their synonyms.
        checks: raise CheckpointError for a value that vLLM or Hugging Face's class fails on.
        config_class: the class of the configuration in memory, as module:class, if vLLM's class
            cannot take Hugging Face's.
        adapt: sets attributes of Hugging Face's configuration that vLLM's class reads under
            other keys.
        window: gives the window of every layer in Hugging Face's class, in tokens; None for
            none.  None if vLLM's class has no windows; ``checks`` then refuse them.
        windows_by_types: whether vLLM's class has windows only in layers that ``layer_types``
            names.
        eps: the key of the norms' epsilon.
        usual_eps: its value if config.json does not state it; None if it must.
        has_fixed_eps: whether vLLM's class ignores the stated epsilon; loading then sets the
            stated one in all norms.
        is_latent: whether attention is latent, see ``families.latent``.
        has_head_norms: whether heads have a query and a key norm, which may have another epsilon.
        head_size: gives the size of a head as attention kernels count it; None without
            attention.

    Attributes, its sublayers and tensors:
        layout: gives the sublayers.
        shapes: gives the shape of every tensor, by Hugging Face's names; raises CheckpointError
            if config.json leaves a size open.
        in_memory: gives the tensors of a ``state_dict`` with another form on disk, by name; none
            without a class of Hugging Face.
        fused: linear layers that vLLM fuses into one.
        reordered: linear layers whose rows vLLM reorders at load.
        draft: the head of its checkpoints; None if vLLM has no class for it, or it was not
            tried.

    Attributes, what an engine needs for it, and cannot:
        cache_elements: gives the elements of the KV cache for a token.
        state_bytes: gives the bytes of recurrent state for a sequence, from a config.json
            and the bytes of an activation.
        has_float32_states: whether that state is in float32 unless ``--mamba-ssm-cache-dtype``
            says otherwise, whatever the activations are.
        idle_elements: gives the elements of the experts that a token does not see.
        limits: what vLLM's class cannot have.
    """

    # Which models they are.
    name: str
    title: str
    module: str
    cls: str
    listed: str | None = None
    treated_as: str | None = None
    hf: str
    has_hf_class: bool = True
    is_stock: bool = True

    # How config.json is read.
    keys: Callable[[], Collection[str]]
    other_names: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...]
    config_class: str | None = None
    adapt: Callable[[Any], None] = lambda config: None
    window: Callable[[Config], int | None] | None
    windows_by_types: bool = True
    eps: str = "rms_norm_eps"
    usual_eps: float | None = 1e-6
    has_fixed_eps: bool = False
    is_latent: bool = False
    has_head_norms: bool = False
    head_size: Callable[[Config], int | None] = _usual_head_size

    # Its sublayers and tensors.
    layout: Callable[[Config], Layout] = lambda config: Layout.of(config.get("num_hidden_layers"))
    shapes: Callable[[Config], dict[str, Shape]]
    in_memory: Callable[[Config], Mapping[str, Held]] = lambda config: {}
    fused: tuple[tuple[str, ...], ...]
    reordered: tuple[str, ...] = ()
    draft: Head | None = None

    # What an engine needs for it, and cannot.
    cache_elements: Callable[[Config], int]
    state_bytes: Callable[[Config, int], int] = lambda config, width: 0
    has_float32_states: bool = False
    idle_elements: Callable[[Config], int] = lambda config: 0
    limits: frozenset[Limit] = UNTRIED

    @property
    def stock_architecture(self) -> str:
        """Its name in the ``architectures`` of a config.json with standard residuals."""
        return self.listed or self.cls

    @property
    def architecture(self) -> str:
        """Our name in the ``architectures`` of a config.json."""
        return f"AttnRes{self.stock_architecture}"

    @property
    def model_type(self) -> str:
        """Our name in the ``model_type`` of a config.json."""
        return PREFIX + self.name

    def epsilon(self, config: Config) -> Any:
        """The norms' epsilon as config.json states it, unchecked."""
        return config.get(self.eps, self.usual_eps)

    def check(self, config: Config) -> None:
        """Raise CheckpointError unless vLLM and Hugging Face's class read ``config`` alike."""
        for check in self.checks:
            check(self.name, config)
