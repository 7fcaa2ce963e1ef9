"""The depth lens: reads vectors of a replay through the model's last norm and head.

The vectors come from the sites of every pipeline stage, and the norm and the head are on the last
one.  So the vectors stay in host memory until the replay ends; then the stages send them on.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from attnres_serve.compat import decoder, logits
from attnres_serve.kernels import reference
from attnres_serve.tracing.listen import TOKENS_AT_ONCE
from attnres_serve.tracing.predict import Predictions
from attnres_serve.tracing.readings import MIX, Lens


class Reader:
    """Collects the vectors of a lens, and predicts from them.

    Args:
        lens: the lens.

    Attributes:
        predictions: the predictions of all readings in order.
    """

    def __init__(self, lens: Lens) -> None:
        self._columns: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, (site, column) in enumerate(lens.readings):
            self._columns[site].append((number, column))
        self._parts: dict[int, list[Tensor]] = defaultdict(list)
        self._rows: Tensor | None = None
        following = [*lens.following] * len(lens.readings)
        self.predictions = Predictions(range(len(following)), following, lens.top)

    def take(self, index: int, sources: Sequence[Tensor], weights: Tensor) -> None:
        """Take the readings of one site.

        Args:
            index: index of the site.
            sources: ``n`` tensors ``[T, d]`` of the next traced tokens.
            weights: ``[T, n]`` float32, the site's weights.
        """
        for number, column in self._columns[index]:
            if column == MIX:
                vector = reference.weighted(torch.stack(tuple(sources), dim=1).float(), weights)
            else:
                vector = sources[column].float()
            self._parts[number].append(vector.cpu())

    def collect(self) -> None:
        """Send the vectors to the last pipeline stage.

        Every worker calls this when its replay has ended, even after an error: the others wait.
        """
        vectors = [part for number in sorted(self._parts) for part in self._parts[number]]
        self._rows = logits.collected(torch.cat(vectors) if vectors else None)

    def predict(self, worker) -> None:
        """Predict from the collected vectors; all workers of the last stage do so together."""
        if self._rows is None:
            return  # the head is on another stage, or there is no reading
        model = decoder.inner_model(worker)
        norm = model.attn_res_sites[max(model.attn_res_sites)]
        dtype = worker.vllm_config.model_config.dtype
        with torch.inference_mode():
            for at in range(0, len(self._rows), TOKENS_AT_ONCE):
                x = self._rows[at : at + TOKENS_AT_ONCE].to(norm.weight.device)
                normed = reference.rms_norm(x, norm.norm_weight(), norm.variance_epsilon)
                self.predictions(model, at, normed.to(dtype))
