"""The load-time check that every expected site runs.

The decoder's own forward is run once on a single token while attention and MLP pass their input
through, so that vLLM's control flow, not ours, decides which norms run.  It needs no weights, no
KV cache and no attention backend.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from attnres_serve import compat
from attnres_serve.residual import SiteNorm, SiteOrderError, recorded_sites
from attnres_serve.schedule import site_name


def rehearse(model: nn.Module, installed: dict[int, SiteNorm]) -> None:
    """Run ``model`` with its sublayers stubbed out and compare the sites that ran.

    Args:
        model: vLLM's decoder with its sites installed.
        installed: the sites expected to run on this pipeline stage.

    Raises:
        SiteOrderError: naming the first site that did not run.
    """
    cause: Exception | None = None
    with torch.no_grad(), _stubbed_sublayers(model), recorded_sites() as ran:
        try:
            compat.forward_one_token(model)
        except Exception as error:  # whatever a norm that is no site made of a depth state
            cause = error
    expected = sorted(installed)
    if ran == expected and cause is None:
        return
    missing = next((index for index in expected if index not in ran), None)
    what = (
        f"the sites ran in the order {ran}"
        if missing is None
        else f"the site before {site_name(missing, model.config.num_hidden_layers)} did not run"
    )
    if cause:  # torch's own errors go on with the tensors themselves
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
        if not compat.is_norm(child)
    ]
    for module in stubs:
        module.forward = _pass_through
    try:
        yield
    finally:
        for module in stubs:
            del module.forward


def _pass_through(*args, hidden_states=None, **_):
    return args[-1] if hidden_states is None else hidden_states
