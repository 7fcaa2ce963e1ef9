"""The sequences of a forward pass, from vLLM's metadata, as arguments of the recurrence."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context


class Batch(NamedTuple):
    """Arguments of ``kernels.recurrence.recurrence`` with these names."""

    slots: Tensor
    starts: Tensor
    has_history: Tensor


def layer_of(name: str) -> Any:
    """The layer of this name in the running model."""
    return get_forward_context().no_compile_layers[name]


def current(name: str) -> Batch | None:
    """The batch of a layer of lightning attention; None in a pass without sequences.

    Profiling passes have no sequences.
    """
    metadata = _metadata(name)
    if metadata is None:
        return None
    count = metadata.num_decodes + metadata.num_prefills
    starts = metadata.query_start_loc[: count + 1]
    had = metadata.seq_lens[:count] > starts.diff()
    return Batch(metadata.state_indices_tensor[:count], starts, had)


class Run(NamedTuple):
    """The sequences of a batch that a layer computes in one call.

    Attributes:
        tokens: ``[t]``, its tokens of the pass; None for all tokens.
        before: ``[N]``, the slots that hold the sequences' states; None if they are the slots that
            the run writes.
        batch: the sequences, with the slots that the run writes.
    """

    tokens: Tensor | None
    before: Tensor | None
    batch: Batch


def runs(name: str) -> list[Run]:
    """The runs of a delta-rule layer in a pass, in order.

    vLLM gives a sequence with drafts a slot for each of its tokens.  A run has one token of each
    such sequence and writes the state after it into the token's slot, so that the next pass can
    begin from the last accepted token.
    """
    metadata = _metadata(name)
    if metadata is None:
        return []
    count = metadata.num_decodes + metadata.num_prefills
    if not metadata.num_spec_decodes:
        return [Run(None, None, _of_delta_rule(metadata, count))]
    result = []
    if count:
        rest = _of_delta_rule(metadata, count)
        result.append(Run(metadata.non_spec_token_indx.long(), None, rest))
    starts, slots = metadata.spec_query_start_loc.long(), metadata.spec_state_indices_tensor.long()
    lengths, tokens = starts.diff(), metadata.spec_token_indx.long()
    accepted = (metadata.num_accepted_tokens.long() - 1).clamp(min=0)  # by the pass before
    before = slots.gather(1, accepted.unsqueeze(1)).squeeze(1)
    for step in range(int(lengths.max())):
        going = lengths > step
        written = slots[:, step]
        count = int(going.sum())
        ones = torch.ones(count, dtype=torch.bool)
        batch = Batch(written[going].int(), torch.arange(count + 1, dtype=torch.int32), ones)
        result.append(Run(tokens[starts[:-1][going] + step], before[going], batch))
        before = written
    return result


def _metadata(name: str) -> Any:
    metadata: Any = get_forward_context().attn_metadata
    return metadata and metadata.get(name)


def _of_delta_rule(metadata: Any, count: int) -> Batch:
    slots = metadata.non_spec_state_indices_tensor[:count]
    had = metadata.has_initial_state
    if had is None:  # a pass of decodes
        had = torch.ones_like(slots, dtype=torch.bool)
    return Batch(slots, metadata.non_spec_query_start_loc[: count + 1], had[:count])
