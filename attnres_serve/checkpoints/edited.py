"""What a site has learned, with edits that hold for every token written into it."""

import torch
from torch import Tensor

from attnres_serve.errors import SettingError
from attnres_serve.kernels.interface import MASKED
from attnres_serve.tracing.static_edits import SiteEdit


def edited(edit: SiteEdit, query: Tensor, bias: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The query and the bias of a site under edits.

    Args:
        edit: of the site, which has ``n`` sources.
        query: of any shape and floating dtype.
        bias: ``[n]``; None for zeros.
        name: how a person calls the site.

    Returns:
        The query, in its dtype where the factor is 0 or 1, and in float32 otherwise; and the bias
        ``[n]`` float32.

    Raises:
        SettingError: the model's own bias masks every source that edits leave.
    """
    given = torch.tensor(edit.bias, dtype=torch.float32, device=query.device)
    query = query * edit.factor if edit.factor in (0, 1) else query.float() * edit.factor
    if bias is None or edit.gives:
        return query, given
    own = bias.float()
    is_masked = (own <= MASKED) | (given <= MASKED)
    found = (own * edit.factor + given).masked_fill(is_masked, MASKED)
    if not found.is_meta and bool((found <= MASKED).all()):
        raise SettingError(
            f"the edits leave {name} no source that the model's own bias does not mask; leave at "
            "least one."
        )
    return query, found
