"""Penalties that overflow logits, or the scores of a beam search.

vLLM accepts any positive ``repetition_penalty``.  It divides positive logits and multiplies
negative ones in float32: with an infinite logit there are no probabilities, and an arbitrary token
is sampled.  With logprobs of processed logits, the JSON encoder raises.  A score is divided by the
length to the power of ``length_penalty``, and the error of an overflow names no field.
"""

from typing import Any

from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds.request_refusals import refusal, refuse_by

LEAST, MOST = 1e-30, 1e30  # logits up to 1e8 stay finite
STEEPEST = 50.0  # a million tokens to this power is 1e300


def refuse_overflowing(client) -> None:
    """Refuse requests with such penalties."""
    refuse_by(client, lambda request: problem(request.sampling_params))


def problem(sampling) -> str | None:
    """Error sentence for a penalty out of range; None without one.

    Args:
        sampling: vLLM's ``SamplingParams``, or None.
    """
    if sampling is None or LEAST <= sampling.repetition_penalty <= MOST:
        return None
    penalty = sampling.repetition_penalty
    return f"`repetition_penalty` is {penalty:g}; expected {LEAST:g} to {MOST:g}, and 1 for none."


def _refusing_overflowing(original: Any) -> Any:
    """Refuse beam searches with such a length penalty."""

    def beam_search(self, prompt, request_id, params, *rest, **options):
        if not abs(params.length_penalty) <= STEEPEST:
            raise refusal(
                f"`length_penalty` is {params.length_penalty:g}; expected {-STEEPEST:g} to "
                f"{STEEPEST:g}."
            )
        return original(self, prompt, request_id, params, *rest, **options)

    return beam_search


PATCH = Patch(
    targets=("vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",),
    make=_refusing_overflowing,
    why="a `length_penalty` that overflows was refused without a field",
    models="every model of our server",
    first=(0, 28),
)
