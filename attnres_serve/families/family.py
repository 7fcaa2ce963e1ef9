"""What the project knows of a family of backbones, as data and as functions of a config.json."""

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
# A family has one of them.
EMBEDDINGS = (EMBEDDING, "backbone.embeddings.weight", BAILING_EMBEDDING)
PREFIX = "attnres_"  # of our own model types


# How many layers behind the last predict further tokens; a model is served without them.
FURTHER = "num_nextn_predict_layers"


@dataclass(frozen=True)
class Held:
    """One tensor that has another form on disk.

    Attributes:
        shape: its shape.
        parts: shapes of the tensors on disk that it stands for, by their names.
        unpack: gives those tensors by their names; views of it where they can be.
    """

    shape: Shape
    parts: Mapping[str, Shape]
    unpack: Callable[["Tensor"], Mapping[str, "Tensor"]]


@dataclass(frozen=True)
class Head:
    """What a checkpoint has beside its model to predict further tokens, and vLLM takes drafts from.

    Attributes:
        reads: of the model: "normed", what the last norm gives, or "mixed", what that norm reads.
        layer: how the names of the tensors of its layer begin, with {} for the layer's number.
        others: the other tensors by name, each with its shape in the model's sizes: "d" for the
            hidden size, "dd" for twice that, "v" for the vocabulary.
        is_behind: whether its layers are numbered, and made, as if they followed the model's last.
        keys: those of config.json that state how many layers it has; the first that is there does.
        usual: that number where none is stated.
        cls: the class in the family's module; None where vLLM has one.
    """

    reads: str
    layer: str
    others: Mapping[str, tuple[str, ...]]
    is_behind: bool = False
    keys: tuple[str, ...] = (FURTHER,)
    usual: int | None = None
    cls: str | None = None

    def layers(self, config: Config) -> Any:
        """How many layers it has by a config.json, whatever is stated there."""
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
    """One backbone: a class of vLLM's whose decoder layers follow the residual convention.

    In it ``hidden, residual = norm(hidden, residual)`` runs before every sublayer and once at the
    end; those norms become the sites.

    Attributes, which models they are:
        name: the key in ``FAMILIES``.
        title: the name for a person.
        module, cls: the class of vLLM's.
        listed: the architecture under which vLLM lists the class; None where that is its name.
        treated_as: the architecture whose treatment by name in vLLM it shares; None for its own.
        hf: the Hugging Face model type whose config.json and tensor names it has.
        has_hf_class: whether Hugging Face has the model too.
        is_stock: whether vLLM has it with standard residuals.

    Attributes, how config.json is read:
        keys: gives what its classes read of a config.json, beside what every family's read.
        other_names: keys that vLLM's class reads, by those that mean the same.
        checks: raise CheckpointError for a value that vLLM or Hugging Face's class would stumble
            over.
        config_class: the class of the configuration in memory, as module:class, where vLLM's class
            cannot have Hugging Face's.
        adapt: sets on the configuration of Hugging Face's class what vLLM's class reads by other
            keys.
        window: gives the window that Hugging Face's class has in every layer, in tokens; None for
            none.  None where vLLM's class has no windows, and ``checks`` refuse them.
        windows_by_types: whether vLLM's class has a window only where ``layer_types`` says so.
        eps: the key of the norms' epsilon.
        usual_eps: its value where a config.json does not state it; None where it must.
        has_fixed_eps: whether vLLM's class has one epsilon in all its norms, whatever is stated;
            the norms are then given the stated one.
        is_latent: whether attention is latent, see ``families.latent``.
        has_head_norms: whether heads have a query and a key norm, whose epsilon may be its own.
        head_size: gives the size of a head, as kernels of attention count it; None without
            attention.

    Attributes, its sublayers and tensors:
        layout: gives the sublayers.
        shapes: gives the shape of every tensor, by Hugging Face's names; raises CheckpointError
            where config.json leaves a size open.
        in_memory: gives what of a ``state_dict`` has another form on disk, by its names; nothing
            where no class of Hugging Face's says so.
        fused: linear layers of which vLLM makes one.
        reordered: linear layers whose rows vLLM brings into another order when it loads them.
        draft: the head of its checkpoints; None where vLLM has no class of one, or it was not
            tried.

    Attributes, what an engine needs for it, and cannot:
        cache_elements: gives the elements of the KV cache for a token.
        state_bytes: gives the bytes of what recurrent layers keep of a sequence, of a config.json
            and the bytes of an activation.
        has_float32_states: whether it keeps them in float32 unless ``--mamba-ssm-cache-dtype``
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
        """Our name for it in the ``architectures`` of a config.json."""
        return f"AttnRes{self.stock_architecture}"

    @property
    def model_type(self) -> str:
        """Our name for it in the ``model_type`` of a config.json."""
        return PREFIX + self.name

    def epsilon(self, config: Config) -> Any:
        """The norms' epsilon by a config.json, whatever is stated there."""
        return config.get(self.eps, self.usual_eps)

    def check(self, config: Config) -> None:
        """Raise CheckpointError unless vLLM and Hugging Face's class read ``config`` alike."""
        for check in self.checks:
            check(self.name, config)
