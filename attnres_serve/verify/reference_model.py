"""``attnres_serve.reference_model``: verify's hand-written model as a torch module."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.verify import compare, oracle


class ReferenceModel(nn.Module):
    """The equations of arXiv 2603.15031; the parameters are a checkpoint's tensors by name."""

    def __init__(self, model: oracle.Model, dtype: torch.dtype) -> None:
        super().__init__()
        self._spec = model.spec
        for name, tensor in model.weights.items():
            *parts, leaf = name.split(".")
            place: Any = self
            for part in parts:
                place = place._modules.setdefault(part, nn.Module())
            place.register_parameter(leaf, nn.Parameter(tensor.to(dtype, copy=True)))

    def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Log-probabilities ``[T, vocabulary]`` of the token after each of ``T`` token ids.

        Raises:
            SettingError: there is no token, or a token is not in the vocabulary.
        """
        tokens, end = torch.as_tensor(ids).tolist(), self._spec.vocab
        if not tokens or any(token not in range(end) for token in tokens):
            raise SettingError(
                f"ids: found {tokens!r:.60}; expected a list of token ids from 0 to {end - 1}."
            )
        return oracle.Model(self._spec, dict(self.named_parameters())).logprobs(tokens)


def reference_model(
    path: str | os.PathLike[str], dtype: torch.dtype = torch.float64
) -> ReferenceModel:
    """The independent model of a checkpoint, with gradients, without kernels and caches.

    Args:
        path: the checkpoint's folder, or a model id whose files are in the Hugging Face cache.
        dtype: float32 or float64, of parameters and all computations.

    Raises:
        CheckpointError: the checkpoint cannot be served, or the model lacks its family.
        SettingError: the dtype is not supported.
    """
    if dtype not in (torch.float32, torch.float64):
        raise SettingError(f"dtype: found {dtype}; expected torch.float32 or torch.float64.")
    folder = hub.on_this_machine(os.fspath(path))
    parsed = check_folder(folder).translated(str(path))
    if parsed.family not in oracle.BASES:
        raise CheckpointError(
            f"{path} is of the family {parsed.family}, which the reference model lacks; it has "
            f"{', '.join(oracle.BASES)}."
        )
    model = compare.reference(folder, parsed)
    assert isinstance(model, oracle.Model)
    return ReferenceModel(model, dtype)
