"""What the tests know of a family."""

from dataclasses import dataclass, field
from typing import Any

from facts.shared import Config

USUAL = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}


@dataclass(frozen=True)
class Facts:
    """A family.

    Attributes:
        title: how the names of its classes begin.
        options: keys that its config.json has and not every family's.
        biased: projections that always have a bias.
        has_head_norms: whether heads have a query and a key norm.
        has_gate: whether attention has a gate on what it returns.
        has_stages: whether vLLM's class can be split into pipeline stages.
        sublayers: of every layer, as the names of their queries call them.
        variants: further keys of config.json with which a model is served and compared, by a name.
        workaround: what mends plain vLLM where its answers are wrong without, as module:function.
        tiny: of a config.json what is not a name: four layers of 128 channels, in float32.
        is_tiny: whether checkpoints are made of its sizes by Hugging Face's class.
        norms: those before the sublayers of a layer, by the names of their kinds.
        final_norm: the one before the head.
        caches_prefixes: whether vLLM has a prefix cache for it on CPU.
        refused: keys of config.json with which vLLM would serve another model than Hugging Face's.
    """

    title: str
    options: tuple[str, ...] = ("head_dim",)
    biased: tuple[str, ...] = ()
    has_head_norms: bool = False
    has_gate: bool = False
    workaround: str | None = None
    has_stages: bool = True
    sublayers: tuple[str, ...] = ("self_attention", "mlp")
    tiny: Config = field(default_factory=dict)
    is_tiny: bool = True
    norms: dict[str, str] = field(default_factory=lambda: USUAL)
    final_norm: str = "norm"
    caches_prefixes: bool = True
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    refused: tuple[dict[str, Any], ...] = ()
