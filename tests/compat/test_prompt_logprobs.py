"""Logprobs of the prompt, where outputs of several answers are merged."""

import pytest

from attnres_serve.compat.workarounds import prompt_logprobs

pytest.importorskip("vllm")

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

PROMPT = [None, {5: Logprob(-1.0)}]


def output(index: int, logprobs: list | None) -> RequestOutput:
    """What an engine streams of an answer: a token, and of its first output those of the prompt."""
    answer = CompletionOutput(index, "a", [5], 0.0, [{5: Logprob(-2.0)}])
    return RequestOutput("name", None, [3, 5], logprobs, [answer], finished=False)


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
    found = output(0, first)
    found.add(output(other, second), aggregate=True)
    assert len(found.outputs) == 1 + bool(other)
    return found.prompt_logprobs


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", MERGED)
def test_none_are_lost(name: str) -> None:
    prompt_logprobs.PATCH.apply()
    assert merged(name) == MERGED[name][3]


def test_vllm_loses_those_of_another_answer() -> None:
    own = getattr(RequestOutput.add, "__wrapped__", RequestOutput.add)
    found = output(0, [])
    own(found, output(1, PROMPT), True)
    assert found.prompt_logprobs == []
