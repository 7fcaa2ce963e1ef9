"""The effect of edits on the predictions after a token, in three lines."""

from attnres_serve.tracing.answer import Prediction, TraceAnswer


def lines(trace: TraceAnswer, token: int) -> str:
    """The most probable tokens after one token, and the mean logprob of the text.

    Args:
        trace: a trace with logprobs.
        token: position of a traced token.
    """
    assert trace.logprobs is not None, "a trace with logprobs"
    (text,) = [one.text for one in trace.tokens if one.position == token]
    runs = [("without edits", trace.logprobs.unedited), ("with edits", trace.logprobs.edited or [])]
    rows = [
        f"  {name:13}  mean logprob {_mean(run)}; next {_most_probable(run, token)}"
        for name, run in runs
        if run
    ]
    return "\n".join([f"after token {token}, {text!r}:", *rows])


def _mean(run: list[Prediction]) -> str:
    """The mean logprob of the next tokens in the text."""
    logprobs = [prediction.next for prediction in run if prediction.next is not None]
    return f"{sum(logprobs) / len(logprobs):.4f}" if logprobs else "none (one token)"


def _most_probable(run: list[Prediction], token: int) -> str:
    (here,) = [prediction for prediction in run if prediction.position == token]
    return ", ".join(f"{one.text!r} {one.logprob:.4f}" for one in here.top)
