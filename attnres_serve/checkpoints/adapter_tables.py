"""The tables of a checkpoint, which an adapter may repeat: its embedding and its head."""

from typing import TYPE_CHECKING

from attnres_serve.checkpoints.checked import Checkpoint
from attnres_serve.families.family import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import Tensor


def has_table(checkpoint: Checkpoint, leaf: str, table: "Tensor") -> bool:
    """Whether a table [tokens, hidden] equals that of a leaf, in the less precise dtype."""
    import torch

    from attnres_serve.checkpoints.read import read_tensor

    if checkpoint.index is None:  # its weights are not here
        return True
    names = checkpoint.index.stored_names
    stored_name = names.get(HEAD if leaf == "lm_head" else EMBEDDING) or names.get(EMBEDDING)
    if stored_name is None or stored_name not in checkpoint.headers:
        return False
    stored = read_tensor(checkpoint.headers, stored_name)
    if stored.shape != table.shape or not stored.is_floating_point():
        return False
    common = min(stored.dtype, table.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    return bool(torch.equal(stored.to(common), table.to(common)))
