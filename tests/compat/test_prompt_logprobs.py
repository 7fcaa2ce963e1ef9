"""Logprobs of the prompt, where outputs of several answers are merged."""

import pytest

from attnres_serve.compat.workarounds import prompt_logprobs

pytest.importorskip("vllm")

from vllm.outputs import RequestOutput

from tests.compat.faults.prompt_logprobs import PROMPT, output

# The logprobs of the prompt in two outputs that are merged, of the answers 0 and ``other``.
MERGED = {
    "the first of both": (PROMPT, 1, PROMPT, PROMPT),
    "a later one and the first of another": ([], 1, PROMPT, PROMPT),
    "the first two of one": (PROMPT, 0, [], PROMPT),
    "later ones": ([], 1, [], []),
    "without logprobs": (None, 1, None, None),
}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestOutput, "add", RequestOutput.add)


def merged(name: str) -> list | None:
    first, other, second, _ = MERGED[name]
    result = output(0, first)
    result.add(output(other, second), aggregate=True)
    assert len(result.outputs) == 1 + bool(other)
    return result.prompt_logprobs


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", MERGED)
def test_none_are_lost(name: str) -> None:
    prompt_logprobs.PATCH.apply()
    assert merged(name) == MERGED[name][3]
