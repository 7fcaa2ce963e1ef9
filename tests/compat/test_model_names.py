"""Whoever asks for a model that there is not learns which there are."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.serving import BaseServing

from attnres_serve.compat.workarounds import model_names


@pytest.mark.parametrize(
    ("names", "adapters", "listed"),
    [
        (["mine"], {}, "there is `mine`."),
        (["mine", "m/mine"], {"tuned": None}, "there is `mine`, `m/mine`, `tuned`."),
        (["mine", "/m/mine"], {}, "there is `mine`."),
        (["/m/mine"], {"tuned": None}, "there is `tuned`."),
        (["/m/mine"], {}, "GET /v1/models lists those that do."),
    ],
)
def test_a_missing_model(names, adapters, listed) -> None:
    """Of a path of the machine, which is a name as well, nothing is told."""
    model_names.PATCH.apply()
    model_names.PATCH.apply()
    serving = BaseServing.__new__(BaseServing)
    serving.request_logger = None
    serving.models = SimpleNamespace(
        base_model_paths=[SimpleNamespace(name=name) for name in names],
        is_base_model=lambda name: name in names,
        lora_requests=adapters,
    )
    answer = asyncio.run(serving._check_model(CompletionRequest(model="yours", prompt="a")))
    assert answer.error.message == f"The model `yours` does not exist; {listed}"
    assert (answer.error.code, answer.error.type) == (404, "NotFoundError")
    for name in (*names, *adapters):
        assert asyncio.run(serving._check_model(CompletionRequest(model=name, prompt="a"))) is None
