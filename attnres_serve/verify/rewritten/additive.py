"""The check that the residual stream of a model is a plain sum, which rewriting assumes."""

import torch

from attnres_serve.verify.rewritten.model import Rewritten

_BOUND = 1e-9  # of the stream's largest number; float64 loses about 1e-15


def require_additive(model: Rewritten) -> None:
    """Raise unless sublayers read only their norms, and the stream only adds their outputs.

    With fixed outputs of all norms, a shift of the embedding then arrives unchanged at every norm.
    With zero queries such a model equals the plain one, because norms do not depend on a scale.

    Raises:
        ValueError: the class scales, norms or reads the stream elsewhere.
    """
    ids = torch.arange(min(8, model.spec.vocab)).tolist()
    plain = model.run(ids)
    normed = [norm(x) for norm, x in zip(model.modules, plain.stream, strict=True)]
    draw = torch.Generator().manual_seed(0)
    shift = torch.randn(plain.stream[0].shape, generator=draw, dtype=torch.float64)
    moved = model.run(ids, normed=normed, shift=shift)
    start = moved.stream[0] - plain.stream[0]
    for path, before, after in zip(model.norms, plain.stream, moved.stream, strict=True):
        if (after - before - start).abs().max() > _BOUND * (after.abs().max() + 1):
            raise ValueError(
                f"{type(model.hf).__name__} does more with its residual stream than to add to it "
                f"before {path}, so that it cannot be rewritten"
            )
