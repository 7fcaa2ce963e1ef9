"""The float64 models with a depth lens: the judges of ``lens``.

A vector is read by being what the last norm is given, whatever the model does behind it.  Nothing
of what serves a lens is imported.
"""

from collections.abc import Sequence

import edited_oracle
import torch
from edited_oracle import Edit
from torch import Tensor

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import Rewritten
from attnres_serve.verify.rewritten.model import Run

Key = tuple[int | None, str]  # site, or None where all sites read it alike, and name of the vector


def vectors(
    model: oracle.Model, edits: Sequence[Edit], x: Tensor, y: Sequence[Tensor]
) -> dict[Key, Tensor]:
    """Mixes and sums ``[tokens, hidden]``, from the embedding x and all outputs y."""
    found: dict[Key, Tensor] = {}
    for site in edited_oracle.mixing_sites(model):
        found[site, "mix"] = edited_oracle.mix(model, edits, site, x, y[:site])[0]
        sources = model.sources(site, x, y[:site])
        for name, source in zip(edited_oracle.sources_at(model, site), sources, strict=True):
            own = (site if name == "partial" else None), name
            torch.testing.assert_close(found.setdefault(own, source), source)
    return found


def lens(model: oracle.Model, ids: Sequence[int], edits: Sequence[Edit] = ()) -> dict[Key, Tensor]:
    """Logprobs ``[tokens, vocabulary]`` by every mix and sum."""
    x, y = model.embed(ids), []
    for site in range(model.spec.final):
        y.append(model.sublayer(site, edited_oracle.mix(model, edits, site, x, y)[0]))
    return {key: model.head(one) for key, one in vectors(model, edits, x, y).items()}


def lens_by_class(model: Rewritten, ids: Sequence[int]) -> dict[Key, Tensor]:
    """The same by Hugging Face's class, whose own code is behind the last norm."""
    plain, last = model.run(ids, mix=model.mixed), len(model.norms) - 1

    def read(vector: Tensor) -> Tensor:
        run = model.run(
            ids, mix=lambda site, stream: vector if site == last else model.mixed(site, stream)
        )
        return run.logits.log_softmax(-1)

    x, y = plain.stream[0], Run(plain.stream, plain.logits).outputs
    return {key: read(one) for key, one in vectors(model.depth, [], x, y).items()}
