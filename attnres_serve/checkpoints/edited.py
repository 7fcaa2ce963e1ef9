"""What a site has learned, with edits that hold for every token written into it."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnres_serve.checkpoints.names import tensor_name
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.depth.static_edits import SiteEdit
from attnres_serve.errors import SettingError
from attnres_serve.kernels.interface import MASKED


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


def edited_tensors(
    spec: AttnResSpec, learned: Mapping[str, Tensor], edits: Mapping[int, SiteEdit]
) -> dict[str, Tensor]:
    """The tensors of a model in which every site has its own, and a bias for each source.

    Args:
        spec: of the model as it was.
        learned: its tensors of sites, by house names.
        edits: by the indices of the sites.

    Raises:
        SettingError: as ``edited``.
    """
    found = {}
    for site in sites(spec):
        if site.mixes:
            of_site = partial(tensor_name, site.tensors, layout=spec.layout)
            query, count = learned[of_site("proj")].reshape(1, -1), site.num_sources
            bias = learned.get(of_site("bias"))
            if bias is not None:  # a recency bias is the last one of several
                bias = pad(bias.float().reshape(-1), (count - bias.numel(), 0))
            edit = edits.get(site.index, SiteEdit(1.0, (0.0,) * count))
            parts = dict(zip(("proj", "bias"), edited(edit, query, bias, site.name), strict=True))
            for part, tensor in (parts | {"norm": learned[of_site("norm")]}).items():
                found[tensor_name(site.index, part, spec.layout)] = tensor
    return found
