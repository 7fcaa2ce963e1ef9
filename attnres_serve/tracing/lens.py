"""Reads vectors of a replay by the model's own last norm and head.

The sites of every pipeline stage are listened to, and the norm and the head are on the last one.
So the vectors wait on the host until the replay ends; then the stages hand them on.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_serve.compat import decoder, replay
from attnres_serve.kernels import reference
from attnres_serve.tracing.listen import TOKENS_AT_ONCE, mixed_by
from attnres_serve.tracing.predict import Predictions
from attnres_serve.tracing.readings import MIX, Lens


class Reader:
    """Takes the vectors that a lens asks for, and predicts from them.

    Args:
        asked: by numbers.

    Attributes:
        predictions: of the tokens of one reading after the other.
    """

    def __init__(self, asked: Lens) -> None:
        self._columns: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, (site, column) in enumerate(asked.readings):
            self._columns[site].append((number, column))
        self._parts: dict[int, list[Tensor]] = defaultdict(list)
        self._rows: Tensor | None = None
        following = [*asked.following] * len(asked.readings)
        self.predictions = Predictions(range(len(following)), following, asked.top)

    def take(self, index: int, sources: Sequence[Tensor], weights: Tensor) -> None:
        """Take what is asked for of one site.

        Args:
            index: of the site.
            sources: ``n`` tensors ``[T, d]`` of the next traced tokens.
            weights: ``[T, n]`` float32, by which the site is read.
        """
        for number, column in self._columns[index]:
            vector = mixed_by(weights, sources) if column == MIX else sources[column].float()
            self._parts[number].append(vector.cpu())

    def collect(self) -> None:
        """Bring the vectors to the last pipeline stage.

        Every worker calls this where its replay has ended, also by an error: the others wait.
        """
        own = [part for number in sorted(self._parts) for part in self._parts[number]]
        self._rows = replay.collected(torch.cat(own) if own else None)

    def predict(self, worker) -> None:
        """Predict from what was collected; the workers of the last stage do so at once."""
        if self._rows is None:
            return  # the head is on another stage, or nothing was asked for
        model = decoder.inner_model(worker)
        norm = model.attn_res_sites[max(model.attn_res_sites)]
        dtype = worker.vllm_config.model_config.dtype
        with torch.inference_mode():
            for at in range(0, len(self._rows), TOKENS_AT_ONCE):
                x = self._rows[at : at + TOKENS_AT_ONCE].to(norm.weight.device)
                normed = reference.rms_norm(x, norm.norm_weight(), norm.variance_epsilon)
                self.predictions(model, at, normed.to(dtype))
