"""The learned tensors of sites, with edits of every token written into them."""

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


def of_every_source(bias: Tensor, sources: int) -> Tensor:
    """A stored bias as ``[sources]``; a recency bias is the last one, and the others are 0."""
    return pad(bias.reshape(-1), (sources - bias.numel(), 0))


def edited(edit: SiteEdit, query: Tensor, bias: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The query of a site under edits, and its bias ``[n]`` float32.

    Args:
        edit: of the site, which has ``n`` sources.
        query: of any shape and floating dtype, which it keeps where the factor is 0 or 1; else
            it is float32 afterwards.
        bias: ``[n]``; None for zeros.
        name: how a person calls the site.

    Raises:
        SettingError: the model's bias masks every source that edits leave.
    """
    edit_bias = torch.tensor(edit.bias, dtype=torch.float32, device=query.device)
    query = query * edit.factor if edit.factor in (0, 1) else query.float() * edit.factor
    if bias is None or edit.gives:
        return query, edit_bias
    model_bias = bias.float()
    is_masked = (model_bias <= MASKED) | (edit_bias <= MASKED)
    both = (model_bias * edit.factor + edit_bias).masked_fill(is_masked, MASKED)
    if not both.is_meta and bool((both <= MASKED).all()):
        raise SettingError(
            f"the edits leave {name} no source that the model's own bias does not mask; leave at "
            "least one."
        )
    return query, both


def edited_tensors(
    spec: AttnResSpec, learned: Mapping[str, Tensor], edits: Mapping[int, SiteEdit]
) -> dict[str, Tensor]:
    """The tensors of a model in which every site has separate ones, and a bias for each source.

    Args:
        spec: of the model before the edits; ``learned`` are its tensors of sites, by house names.
        edits: by the indices of the sites.
    """
    tensors = {}
    for site in sites(spec):
        if site.mixes:
            of_site = partial(tensor_name, site.tensors, layout=spec.layout)
            query, count = learned[of_site("proj")].reshape(1, -1), site.num_sources
            if (bias := learned.get(of_site("bias"))) is not None:
                bias = of_every_source(bias, count)
            edit = edits.get(site.index, SiteEdit(1.0, (0.0,) * count))
            parts = *edited(edit, query, bias, site.name), learned[of_site("norm")]
            for part, tensor in zip(("proj", "bias", "norm"), parts, strict=True):
                tensors[tensor_name(site.index, part, spec.layout)] = tensor
    return tensors
