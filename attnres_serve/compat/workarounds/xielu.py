"""The parameters of Apertus' activation, which vLLM rounds to bfloat16.

vLLM 0.32: ``XIELU`` makes its parameters and constants in bfloat16 for every dtype of the model.
In a float32 model they have only 8 bits of precision, so activations are off by up to 0.2 %.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def _in_the_models_type(original: Any) -> Any:
    """Give the layer the model's dtype."""
    import torch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{"dtype": torch.get_default_dtype(), **kwargs})

    return __init__


PATCH = Patch(
    targets=("vllm.model_executor.layers.activation:XIELU.__init__",),
    make=_in_the_models_type,
    why="the activation was computed in bfloat16",
    models="AttnRes models with the activation xIELU",
    first=(0, 28),
    report="xielu-in-bfloat16",
)
