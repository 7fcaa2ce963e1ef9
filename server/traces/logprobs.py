"""The logprobs of a trace: what follows each token, with the edits and without them."""

from collections.abc import Callable, Sequence
from typing import Any

from attnres_serve.depth.resolved_edits import Resolved
from attnres_serve.server.traces import replays
from attnres_serve.tracing import predicted
from attnres_serve.tracing.answer import ReplayResult


async def of(
    state,
    client,
    request: replays.ReplayRequest,
    edits: Sequence[Resolved],
    result: ReplayResult,
    texts_of: Callable[[list[int]], Sequence[str | None]],
) -> dict[str, Any]:
    """An ``answer.Logprobs``; with edits, the sequence is replayed once more without them.

    Args:
        state, client: of the server.
        request: of the replay, with logprobs.
        edits: under which it ran.
        result: of it.
        texts_of: returns the texts of token ids.
    """
    after = predicted.following(request.ids, request.positions)

    def predictions(run: ReplayResult) -> list[dict[str, Any]]:
        assert run.predicted is not None, "the request has logprobs"
        return predicted.predictions(run.predicted, request.positions, after, texts_of)

    if not edits:
        return {"unedited": predictions(result), "edited": None}
    logprobs_only = request._replace(sites=[], lens=None, vectors=False)
    unedited = await replays.replay(state, client, logprobs_only, [])
    return {"unedited": predictions(unedited), "edited": predictions(result)}
