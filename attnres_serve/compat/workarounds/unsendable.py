"""Requests that vLLM cannot send to its engine.

vLLM notices this only after it counts them as running: the client gets a 500, and the request
stays among the running ones.
"""

from typing import Any

from attnres_serve.compat.workarounds.request_refusals import refuse_by


def refuse_unsendable(client) -> None:
    """Refuse requests that cannot be sent to an engine."""
    refuse_by(client, problem)


def problem(request) -> str | None:
    """Error sentence for the first part of a request that has no encoding; None if all have one.

    Args:
        request: from vLLM's input processor.
    """
    sampling = request.sampling_params
    parts: dict[str, Any] = {"`priority`": request.priority}
    if sampling is not None:  # parameters for a vLLM plugin, any JSON
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
    except TypeError:  # an object that vLLM encodes itself
        return None
    return None
