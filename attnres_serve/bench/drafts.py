"""Speculative decoding in a measurement: the requested drafts, and the accepted tokens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attnres_serve.checkpoints import draft
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError


def requested(arguments: Arguments) -> int:
    """The number of tokens drafted for a step; 0 without drafts.

    Raises:
        SettingError: the flag does not state the number.
    """
    if (content := draft.requested_config(arguments)) is None:
        return 0
    number = content.get("num_speculative_tokens")
    if type(number) is not int or number < 1:
        example = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
        raise SettingError(
            f"{draft.FLAG} is read as {json.dumps(content)}; expected one JSON object that has "
            f"num_speculative_tokens, for example '{example}'."
        )
    return number


def summary(counted: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The content of a document from vLLM's counters of all starts; None without drafts."""
    if not any(counted):
        return None
    drafts, proposed, accepted = (
        sum(one[name] for one in counted) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    places = zip(*(one["accepted_tokens_per_pos"] for one in counted), strict=True)
    return {
        "drafts": drafts,
        "proposed": proposed,
        "accepted": accepted,
        "acceptance": accepted / max(1, proposed),
        "by_position": [sum(place) / max(1, drafts) for place in places],
    }
