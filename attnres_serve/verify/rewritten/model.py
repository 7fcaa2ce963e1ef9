"""The residual stream of a Hugging Face model, rewritten by hooks on the norms of its sites.

The stream stays the plain sum x_s of the embedding and the sublayers' outputs. So the output of a
sublayer, with any norms on its output, multipliers, experts or mixers, is

    y_s = x_(s+1) - x_s

and the norm of a site reads the mix of the outputs so far instead of x_s.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnres_serve.verify import oracle
from attnres_serve.verify.rewritten import hugging_face

Mix = Callable[[int, list[Tensor]], Tensor]  # from a site and the stream before each site so far


class Site(NamedTuple):
    """A sublayer, and the path of the norm before it, relative to the decoder."""

    layer: int
    kind: str
    norm: str


class Run(NamedTuple):
    """The tensors of a model for a sequence of ``T`` tokens.

    Attributes:
        stream: the stream before each norm, ``[T, hidden]``.
        logits: ``[T, vocabulary]``.
    """

    stream: list[Tensor]
    logits: Tensor

    @property
    def outputs(self) -> list[Tensor]:
        """The output of each sublayer, ``[T, hidden]``."""
        return [after - before for before, after in pairwise(self.stream)]


@dataclass
class Rewritten:
    """A checkpoint in float64; without block starts in ``spec`` the unchanged model.

    Attributes:
        config: Hugging Face's configuration.
        norms: the paths of all sites' norms relative to the decoder, the final one last.
        spec: the sites; its sublayers are unknown.
        weights: all tensors by their names in the checkpoint, in float64.
        build: makes Hugging Face's model from its configuration and the tensors without sites'.
    """

    config: Any
    norms: tuple[str, ...]
    spec: oracle.Spec
    weights: dict[str, Tensor] = field(repr=False)
    build: Callable[[Any, Mapping[str, Tensor]], Any] = hugging_face.build

    @cached_property
    def hf(self) -> Any:
        """Hugging Face's model."""
        depth = oracle.depth_shapes(self.spec)
        base = {name: tensor for name, tensor in self.weights.items() if name not in depth}
        return self.build(self.config, base)

    def with_spec(self, spec: oracle.Spec) -> "Rewritten":
        """The same tensors, mixed by another specification; Hugging Face's model is shared."""
        other = replace(self, spec=spec)
        other.__dict__["hf"] = self.hf
        return other

    @cached_property
    def modules(self) -> list[nn.Module]:
        """The norm of every site.

        Raises:
            ValueError: the class has no norm of this name.
        """
        embedding = self.hf.get_input_embeddings()
        (decoder,) = (part for part in self.hf.children() if embedding in part.modules())
        try:
            return [decoder.get_submodule(path) for path in self.norms]
        except AttributeError as error:
            raise ValueError(f"{type(self.hf).__name__}: {error}") from error

    @cached_property
    def depth(self) -> oracle.Model:
        """The equations of the mix."""
        return oracle.Model(self.spec, self.weights)

    def mix(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        """The input of the norm of a site, from the embedding x and the outputs y_0 ..."""
        return self.depth.mix(site, x, y)[0]

    def normed(self, site: int, x: Tensor, y: Sequence[Tensor]) -> Tensor:
        """The input of the sublayer of a site, from the embedding x and the outputs y_0 ..."""
        normed: Tensor = self.modules[site](self.mix(site, x, y))
        return normed

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities ``[len(ids), vocabulary]`` of the token after each position."""
        mixes = self.spec.block_starts is not None
        return self.run(ids, mix=self.mixed if mixes else None).logits.log_softmax(-1)

    def from_normed(
        self, ids: Sequence[int], normed: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Embedding, outputs and logits with the norms' outputs ``normed``, [T, hidden] each."""
        run = self.run(ids, normed=normed)
        return run.stream[0], run.outputs, run.logits

    def mixed(self, site: int, stream: list[Tensor]) -> Tensor:
        """The input of the norm of a site, from the stream before each site so far."""
        return self.mix(site, stream[0], Run(stream, stream[0]).outputs)

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        mix: Mix | None = None,
        normed: Sequence[Tensor] | None = None,
        shift: Tensor | None = None,
    ) -> Run:
        """One evaluation.

        Args:
            ids: token ids.
            mix: computes the input of each norm; None: the class does.
            normed: the output of each norm; None: the norm computes it.
            shift: ``[T, hidden]``, added to the embedding.
        """
        stream: list[Tensor] = []
        called: list[int] = []

        def before(site: int, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            called.append(site)
            stream.append(args[0][0])
            return None if mix is None else (mix(site, stream)[None], *args[1:])

        with ExitStack() as hooks, oracle.threads_for(self.spec.hidden):

            def enter(handle: Any) -> None:
                hooks.callback(handle.remove)

            for site, norm in enumerate(self.modules):
                enter(norm.register_forward_pre_hook(lambda _, args, site=site: before(site, args)))
                if normed is not None:
                    enter(norm.register_forward_hook(lambda *_, site=site: normed[site][None]))
            if shift is not None:
                embedding = self.hf.get_input_embeddings()
                enter(embedding.register_forward_hook(lambda _, __, x: x + shift))
            logits = self.hf(torch.tensor([list(ids)]), use_cache=False).logits[0]
        if called != list(range(len(self.modules))):
            raise ValueError(
                f"{type(self.hf).__name__} runs its {len(self.modules)} norms {len(called)} times "
                "or in another order, so that its residual stream cannot be rewritten"
            )
        return Run(stream, logits)
