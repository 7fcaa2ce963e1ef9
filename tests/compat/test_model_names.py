"""Whoever asks for a model that there is not learns which there are."""

import pytest

pytest.importorskip("vllm")

from attnres_serve.compat.workarounds import model_names
from tests.compat.faults.model_names import asked


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
    answer = asked("yours", names, adapters)
    assert answer.error.message == f"The model `yours` does not exist; {listed}"
    assert (answer.error.code, answer.error.type) == (404, "NotFoundError")
    for name in (*names, *adapters):
        assert asked(name, names, adapters) is None
