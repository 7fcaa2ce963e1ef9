"""Hidden states between a model's layers, for EAGLE draft heads."""

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from attnres_serve.model.site_norm import SiteNorm, State

Add = Callable[[list[Tensor], int, Tensor, Tensor | State | None], list[Tensor]]


def adder(sites: Mapping[int, SiteNorm], layers: Collection[int], stream: str) -> Add:
    """A replacement of the decoder's ``_maybe_add_hidden_state``.

    Args:
        sites: all sites of the model.
        layers: the layers before which it adds a stream; the number of layers means the end.
        stream: see ``SiteNorm.stream``.
    """
    following = {norm.site.layer: norm for _, norm in sorted(sites.items(), reverse=True)}
    end = 1 + max(layer for layer in following if layer is not None)
    following[end] = sites[max(sites)]

    def add(
        streams: list[Tensor], layer: int, hidden: Tensor, residual: Tensor | State | None
    ) -> list[Tensor]:
        if layer in layers:
            if residual is not None:  # after the embedding
                norm = following[layer]
                hidden = norm.stream(stream, hidden, norm.receive(residual))
            streams.append(hidden)
        return streams

    return add
