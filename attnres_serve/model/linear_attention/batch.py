"""The sequences of a forward pass, as the recurrence takes them, from vLLM's metadata."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from attnres_serve.errors import SettingError


class Batch(NamedTuple):
    """Attributes are the arguments of ``kernels.recurrence.recurrence`` of these names."""

    slots: Tensor
    starts: Tensor
    has_history: Tensor


def layer_of(name: str) -> Any:
    """The layer of that name in the model that runs."""
    return get_forward_context().no_compile_layers[name]


def current(name: str) -> Batch | None:
    """The batch of the layer of that name; None in a pass without sequences, as when profiling."""
    metadata: Any = get_forward_context().attn_metadata
    metadata = metadata and metadata.get(name)
    if metadata is None:
        return None
    count = metadata.num_decodes + metadata.num_prefills
    if hasattr(metadata, "non_spec_query_start_loc"):
        return _of_delta_rule(metadata, count)
    return _of_lightning(metadata, count)


def _of_delta_rule(metadata: Any, count: int) -> Batch:
    slots = metadata.non_spec_state_indices_tensor[:count]
    had = metadata.has_initial_state
    if had is None:  # a pass of decodes
        had = torch.ones_like(slots, dtype=torch.bool)
    return Batch(slots, metadata.non_spec_query_start_loc[: count + 1], had[:count])


def _of_lightning(metadata: Any, count: int) -> Batch:
    starts = metadata.query_start_loc[: count + 1]
    had = metadata.seq_lens[:count] > starts.diff()
    return Batch(metadata.state_indices_tensor[:count], starts, had)


def refuse_speculation(drafts: int) -> None:
    """Raise where a state would have to go back to a token before a rejected draft.

    Args:
        drafts: tokens that a step proposes, 0 without speculative decoding.

    Raises:
        SettingError: it is more than 0.
    """
    if drafts:
        raise SettingError(
            f"speculative decoding with {drafts} tokens is not supported on CPU for models with "
            "linear attention, whose state cannot go back; start without --speculative-config."
        )
