"""The dry run of a model at load time, which checks that every expected site runs.

The decoder's ``forward`` runs once on a single token while attention and MLP pass their input
through, so that vLLM's control flow decides which norms run.  It needs no weights, no KV cache and
no attention backend.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnres_serve.compat import decoder
from attnres_serve.model.site_norm import SiteNorm, SiteOrderError, recorded_sites


def run_dry(model: nn.Module, installed: dict[int, SiteNorm]) -> None:
    """Run ``model`` with its sublayers stubbed out and check which sites ran.

    Args:
        model: vLLM's decoder with its sites installed.
        installed: the sites expected to run on this pipeline stage.

    Raises:
        SiteOrderError: a site did not run, or not in order; the message names the first one.
    """
    cause: Exception | None = None
    with torch.no_grad(), _stubbed_sublayers(model), recorded_sites() as ran:
        try:
            decoder.forward_one_token(model, installed[min(installed)].weight)
        except Exception as error:  # a plain norm may raise anything on a depth state
            cause = error
    expected = sorted(installed)
    if ran == expected and cause is None:
        return
    missing = next((index for index in expected if index not in ran), None)
    what = (
        f"the sites ran in the order {ran}"
        if missing is None
        else f"the site before {installed[missing].site.name} did not run"
    )
    if cause:  # torch's errors continue with the tensors' values
        what += f" ({type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''})"
    raise SiteOrderError(
        f"{what}: the layers of vLLM's {type(model).__name__} do not follow the residual "
        "convention that AttnRes needs, so this model is not served."
    ) from cause


@contextmanager
def _stubbed_sublayers(model: nn.Module) -> Iterator[None]:
    stubs = [
        child
        for layer in model.layers[model.start_layer : model.end_layer]
        for child in layer.children()
        if not decoder.is_norm(child)
    ]
    for module in stubs:
        module.forward = _pass_through
    try:
        yield
    finally:
        for module in stubs:
            del module.forward


def _pass_through(
    *args: Any, hidden_states: Tensor | None = None, output: Tensor | None = None, **_: Any
) -> Any:
    """Return a sublayer's input: the first floating-point argument, which excludes positions."""
    if hidden_states is None:
        hidden_states = next(x for x in args if x is not None and x.is_floating_point())
    if output is not None:  # some attention layers write their result here
        output.copy_(hidden_states)
    return hidden_states
