"""docs/build/upstream/echo-of-several-answers.md"""

from typing import Any

PROMPT: list[Any] = [None, {5: -1.0}]


def fault() -> bool:
    """The logprobs of the prompt are lost where the first output of an answer is merged."""
    found = output(0, [])
    found.add(output(1, PROMPT), aggregate=True)
    return found.prompt_logprobs != PROMPT


def output(index: int, logprobs: list | None) -> Any:
    """What an engine streams of an answer: a token, and of its first output those of the prompt."""
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    answer = CompletionOutput(index, "a", [5], 0.0, [{5: Logprob(-2.0)}])
    return RequestOutput("name", None, [3, 5], logprobs, [answer], finished=False)
