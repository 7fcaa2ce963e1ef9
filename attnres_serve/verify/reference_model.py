"""``attnres_serve.reference_model``: verify's hand-written model as a torch module."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.errors import CheckpointError, SettingError, first_line
from attnres_serve.verify import oracle

DTYPES = (torch.float32, torch.float64)


class ReferenceModel(nn.Module):
    """A checkpoint as the equations of arXiv 2603.15031 say, without kernels and caches.

    Its parameters are the checkpoint's tensors under their own names, in ``dtype``.

    Args:
        model: the checkpoint in float64.
        dtype: of all that is computed.
    """

    def __init__(self, model: oracle.Model, dtype: torch.dtype) -> None:
        super().__init__()
        self._spec = model.spec
        for name, tensor in model.weights.items():
            *parts, leaf = name.split(".")
            place: nn.Module = self
            for part in parts:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_parameter(leaf, nn.Parameter(tensor.to(dtype)))

    def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
        """The log-probabilities of the token after each position.

        Args:
            ids: ``T`` token ids of one sequence.

        Returns:
            ``[T, vocabulary]``, differentiable with respect to the parameters.

        Raises:
            SettingError: there is no token, or one is not in the vocabulary.
        """
        tokens, vocabulary = torch.as_tensor(ids).tolist(), self._spec.vocab
        if not tokens or any(token not in range(vocabulary) for token in tokens):
            raise SettingError(
                f"ids: found {tokens!r:.60}; expected token ids of one sequence, from 0 to "
                f"{vocabulary - 1}."
            )
        return oracle.Model(self._spec, dict(self.named_parameters())).logprobs(tokens)


def reference_model(
    path: str | os.PathLike[str], dtype: torch.dtype = torch.float64
) -> ReferenceModel:
    """Verify's independent model of a checkpoint, which shares no code with what serves.

    Args:
        path: the checkpoint's folder, or a model id whose files are in the Hugging Face cache.
        dtype: ``torch.float32`` or ``torch.float64``.

    Raises:
        CheckpointError: the folder cannot be served, or is of a family that this model lacks; it is
            a ValueError, as is SettingError.
        SettingError: the dtype is another.
    """
    if dtype not in DTYPES:
        raise SettingError(f"dtype: found {dtype}; expected torch.float32 or torch.float64.")
    folder = hub.on_this_machine(os.fspath(path))
    base = check_folder(folder).translated(str(path)).base
    if base not in oracle.BASES:
        raise CheckpointError(
            f"{path} is of the family {base}, which the reference model lacks; it has "
            f"{', '.join(oracle.BASES)}."
        )
    try:
        return ReferenceModel(oracle.load(folder), dtype)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} has no reference model ({first_line(error)}); serve it to trace it instead."
        ) from error
