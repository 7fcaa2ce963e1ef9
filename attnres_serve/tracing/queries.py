"""The parameters of depth attention in a checkpoint: pseudo-queries and key norms.

A site's logits are the products of its query and the RMS-normed sources.  The weight of the key
norm and the logit scale are folded into the query, as ``kernels.reference.mix`` expects.  So the
length of this effective query, times the square root of the hidden size, bounds a source's logit.
With a query of zeros a site computes the mean of its sources.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints.checked import Checkpoint, check_folder
from attnres_serve.checkpoints.edited import of_every_source
from attnres_serve.checkpoints.names import PARTS, tensor_name
from attnres_serve.checkpoints.read import read_tensor
from attnres_serve.depth.sites import Site, sites
from attnres_serve.errors import CheckpointError


class Queries(NamedTuple):
    """The parameters of ``S`` sites; NaN where a checkpoint stores none for a site.

    Attributes:
        sites: the sites that mix.
        query: ``[S]`` float64, length of the stored pseudo-query.
        key_norm: ``[S]`` float64, root mean square of the key norm's weight.
        effective: ``[S]`` float64, length of the effective query.
        biases: for each site ``[n]`` float64 biases of its sources; empty for a model without
            biases.
        cosine: ``[S, S]`` float64, between effective queries; NaN for queries of zeros.
    """

    sites: list[Site]
    query: np.ndarray
    key_norm: np.ndarray
    effective: np.ndarray
    biases: list[np.ndarray]
    cosine: np.ndarray


def read(name: str) -> Queries:
    """The parameters of a checkpoint's sites.

    Args:
        name: folder, or a model id whose files are in the Hugging Face cache.

    Raises:
        CheckpointError: it is no AttnRes checkpoint, cannot be served, or has a tensor with NaN or
            infinity.
    """
    checkpoint = check_folder(hub.on_this_machine(name))
    spec = checkpoint.translated(name).spec
    if spec is None:
        raise CheckpointError(f"{name} has standard residuals: it has no queries.")
    mixing = [site for site in sites(spec) if site.mixes]
    stored = {
        part: torch.stack([_stored(checkpoint, site.tensors, part) for site in mixing]).numpy()
        for part in ("proj", "norm")
    }
    biases = [
        of_every_source(_stored(checkpoint, site.tensors, "bias"), site.num_sources).numpy()
        for site in (mixing if spec.has_biases else ())
    ]
    query, key_norm = stored["proj"], stored["norm"]
    folded = query * key_norm * spec.logit_scale
    length = np.linalg.norm(folded, axis=1)
    unit = folded / np.where(length == 0, np.nan, length)[:, None]
    return Queries(
        mixing,
        np.linalg.norm(query, axis=1),
        np.sqrt(np.mean(key_norm**2, axis=1)),
        length,
        biases,
        unit @ unit.T,
    )


def _stored(checkpoint: Checkpoint, site: int, part: str) -> Tensor:
    """A tensor of a site, ``[n]`` float64; NaN if the format stores none for the site."""
    assert checkpoint.parsed is not None and checkpoint.index is not None
    name = tensor_name(site, part, checkpoint.parsed.layout)
    stored_name = checkpoint.index.stored_names.get(name)
    if stored_name is None:  # the first site, which reads only the embedding
        return torch.full((checkpoint.parsed.config["hidden_size"],), torch.nan).double()
    values = read_tensor(checkpoint.headers, stored_name).double().reshape(-1)
    if not values.isfinite().all():
        raise CheckpointError(
            f"{stored_name}, the {PARTS[part]} of "
            f"{checkpoint.parsed.layout.site_name(site)}, holds numbers that are not "
            "finite; copy or download the checkpoint again."
        )
    return values
