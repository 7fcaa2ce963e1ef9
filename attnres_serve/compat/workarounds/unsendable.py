"""Requests that vLLM cannot send to its engine.

It learns so when they count as running already: the client gets a 500, and the request stays behind
among those that run.
"""

from typing import Any

from attnres_serve.compat.workarounds.request_refusals import refuse_by


def refuse_unsendable(client) -> None:
    """Have an engine refuse requests that it cannot be sent."""
    refuse_by(client, problem)


def problem(request) -> str | None:
    """Error sentence for the first part of a request that has no encoding; None if all have one.

    Args:
        request: as vLLM's input processor makes it.
    """
    sampling = request.sampling_params
    parts: dict[str, Any] = {"`priority`": request.priority}
    if sampling is not None:  # parameters of a plugin of vLLM's, of any JSON
        parts["`vllm_xargs` or `kv_transfer_params`"] = sampling.extra_args
    for part, value in parts.items():
        reason = _reason(value)
        if reason is not None:
            return f"{part} {reason}."
    return None


def _reason(value: Any) -> str | None:
    import msgspec

    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return "has an integer of more than 64 bits; send a smaller one"
    except RecursionError:
        return "is nested too deep; send it flatter"
    except TypeError:  # an object for which vLLM has a way of its own
        return None
    return None
