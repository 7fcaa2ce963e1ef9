"""The parameters of Apertus' activation, which vLLM rounds to bfloat16.

vLLM 0.32: ``XIELU`` makes its parameters and constants in bfloat16, whatever the model's
type is.  A model that is served in float32 then has them, and what is computed of them, with 8 bits
of precision: its activations are off by up to 0.2 %.
"""

from typing import Any


def in_the_models_type() -> None:
    """Let the layer have the type of the model that is built (idempotent)."""
    import torch
    from vllm.model_executor.layers.activation import XIELU

    as_given: Any = XIELU.__init__
    if getattr(as_given, "has_the_models_type", False):
        return

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        as_given(self, *args, **{"dtype": torch.get_default_dtype(), **kwargs})

    __init__.has_the_models_type = True  # type: ignore[attr-defined]
    XIELU.__init__ = __init__  # type: ignore[method-assign]
