"""The order in which a step reads its bank and writes to it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnres_serve.model.bank_state import BankState


def test_a_sum_is_read_before_it_becomes_a_block() -> None:
    """Of a row that is read after it was written, inductor makes wrong code in pieces."""
    given: list[Tensor] = []

    def written(delta: Tensor, bank: Tensor, row: int) -> None:
        assert row == 1
        bank[:, row] = torch.nan

    def mixed(delta: Tensor, *rest: Any) -> Tensor:
        given.append(delta)
        return delta

    context: Any = SimpleNamespace(
        site=SimpleNamespace(index=1, opens_block=True, cumulative=True),
        bank_slot=SimpleNamespace(row=2),
        backend=SimpleNamespace(add_to_row=written, single_pass=mixed),
        algorithm="single_pass",
        group=1,
    )
    learned: Any = SimpleNamespace(site_weights=lambda: None)
    state = BankState(0, torch.ones(2, 4, 3), 2, queries=())
    state.step(context, [learned], torch.full((2, 3), 2.0))
    assert torch.equal(given[0], torch.full((2, 3), 3.0))
