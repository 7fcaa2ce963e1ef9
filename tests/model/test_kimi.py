"""Kimi Linear's adapter: a package without its own code, and the epsilons that it sets."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

pytest.importorskip("vllm")

from attnres_serve.compat.bare_package import without_init


def test_a_package_that_is_imported_stays() -> None:
    import json.decoder

    with without_init("json"):
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json
    with pytest.raises(ImportError, match="is no package"), without_init("this"):
        pass


def test_epsilons_of_norms_within_attention() -> None:
    from attnres_serve.model import kimi

    delta, latent, plain = nn.Module(), nn.Module(), nn.Module()
    delta.o_norm, latent.rms_norm_eps = SimpleNamespace(eps=1e-5), 1e-3
    for attention in (delta, latent, plain):
        kimi._set_eps(attention, 1e-3)
    assert delta.o_norm.eps == 1e-3 and latent.rms_norm_eps == 1e-6
    assert not hasattr(plain, "rms_norm_eps")
