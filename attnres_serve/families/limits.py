"""Limits of vLLM's classes, which the families' files state in ``limits``."""

from enum import Enum


class Limit(Enum):
    """A limit of vLLM's class of a family, or of its layers.

    A row of ``compat.rules`` refuses what it excludes.  For prefix caching a workaround does, and
    for shown layers the checks of drafts.
    """

    FLOAT16 = "In float16 they scale the residual, and a depth state has none to scale."
    SEQUENCE_PARALLEL = "Expert, tensor and data parallelism split the residual over workers."
    LIGHTNING = "The kernel of lightning attention for GPUs computes prompts wrongly."
    BOTH_CACHES = "On a CPU a pipeline stage needs a KV cache and recurrent states, if others do."
    EXPERTS = "A pipeline stage needs a layer with experts."
    LINEAR_ATTENTION = "They have linear attention, which was run with vLLM 0.32 and later."
    DRAFTS = "Their states cannot go back to a token before a rejected draft, or not on a CPU."
    EAGER_ON_GPU = "On a GPU their linear attention is no operator of torch's."
    ADAPTERS = "They take no LoRA adapters."
    ADAPTERS_OF_WORKERS = "Several workers cut their LoRA adapters otherwise than their weights."
    PREFIX_CACHING = "On a CPU vLLM cannot continue a cached prefix."
    SHOWN_LAYERS = "The class has no hook for what goes between layers, which EAGLE's heads read."
    STOCK_ON_CPU = "The class itself, with standard residuals, runs on a GPU alone."


# Of a family that states none: the hook has not been tried.
UNTRIED = frozenset({Limit.SHOWN_LAYERS})
