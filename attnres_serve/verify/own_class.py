"""The model class that a checkpoint was written by, as the reference of ``verify``.

The class is found by the checkpoint's format, never by transformers' tables: to them a model_type
is enough, and some checkpoints with Attention Residuals have that of a model without.
"""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from torch import Tensor

# Files that their projects publish, to be put on PYTHONPATH.
MODULES = {"open_attnres": "modeling_attnres", "delta_attnres": "modeling_{model_type}"}
NO_CLASS = {
    "house": "it has no Hugging Face class",
    "alice_ai": "it has no Hugging Face class",
    "fla": "its classes compute by Flash Attention, which has no float32, or kernels of a GPU",
    "kimi_linear": "its class (transformers' Kimi Linear) has no Attention Residuals",
    "nanogpt": "its class is code inside checkpoints, which is never run",
    "qwen3_ar": "its class is code inside checkpoints, which is never run",
    "torchtitan": "it has no Hugging Face class (transformers' Qwen3 has no Attention Residuals)",
}


def load(folder: Path) -> Callable[[list[int]], "Tensor"]:
    """The checkpoint in its own class and float32: log-probabilities ``[T, vocabulary]`` for ids.

    Raises:
        CheckpointError: there is no such class, or it cannot be run here.
    """
    import torch

    from attnres_serve.compat.workarounds import torch_vector_math

    torch_vector_math.settle()  # the engine, whose plugin does this, starts later
    found = check_folder(folder)
    parsed = found.translated(str(folder))
    module = MODULES.get(parsed.format)
    if module is None:
        raise CheckpointError(
            f"--against hf does not know the {parsed.format} format of {folder}: "
            f"{NO_CLASS[parsed.format]}; compare with --against fp64."
        )
    module = module.format_map(found.config)
    (architecture,) = found.config["architectures"]
    _require_importable(module, architecture, folder)
    try:
        own = getattr(importlib.import_module(module), architecture)
        model, report = own.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        model.eval()(torch.tensor([[0]]), use_cache=False)
    except Exception as error:  # whatever foreign code may raise
        raise CheckpointError(
            f"{architecture} of {module} cannot run {folder} with the installed transformers "
            f"({first_line(error)}); mend that module, or compare with --against fp64."
        ) from error
    if odd := sorted({name for kind in report.values() for name in kind}):
        # It would compute with random numbers in their place.
        raise CheckpointError(
            f"{architecture} of {module} has other tensors than {folder}, {odd[0]} for one; give "
            "the version of the module that wrote it, or compare with --against fp64."
        )
    return lambda ids: _logprobs(model(torch.tensor([ids]), use_cache=False).logits[0])


def _logprobs(logits: "Tensor") -> "Tensor":
    return logits.double().log_softmax(-1)


def _require_importable(module: str, architecture: str, folder: Path) -> None:
    spec = find_spec(module)
    if spec is None:
        raise CheckpointError(
            f"the module {module} with {architecture}, the class of {folder}, cannot be imported; "
            f"put the folder of its {module}.py on PYTHONPATH, or compare with --against fp64."
        )
    if folder.resolve() in Path(spec.origin or "").resolve().parents:
        raise CheckpointError(
            f"{spec.origin} is code inside the checkpoint, which is never run; put a copy that you "
            "trust on PYTHONPATH, or compare with --against fp64."
        )
