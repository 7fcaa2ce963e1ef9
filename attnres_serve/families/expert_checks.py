"""Checks of a mixture of experts: how many layers have one, and how experts are grouped."""

from typing import Any

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Check, Config


def some(dense: str, usual: int) -> Check:
    """A check that some layer has experts, because vLLM's class fails without one.

    Args:
        dense: the key that states how many of the first layers have none.
        usual: its value if config.json does not state it.
    """

    def check(name: str, config: Config) -> None:
        layers: Any = config.get("num_hidden_layers")
        stated = config.get(dense, usual)
        if is_count(layers) and type(stated) is int and stated >= layers:
            raise CheckpointError(
                f"{dense} is {stated} and num_hidden_layers {layers}, so no layer has experts; "
                f"vLLM's {name} needs one that has. State a {dense} of {layers - 1} at most if the "
                "model was trained so."
            )

    return check


def groups(experts: str) -> Check:
    """A check of the groups that experts are chosen from.

    Args:
        experts: the key of their number.
    """

    def check(name: str, config: Config) -> None:
        count: Any = config.get(experts)
        number, chosen = config.get("n_group", 1), config.get("topk_group", 1)
        fits = is_count(number) and is_count(chosen) and chosen <= number
        if not fits or (
            experts in config and (not is_count(count) or count % number or count < 2 * number)
        ):
            raise CheckpointError(
                f"n_group is {number!r} and topk_group {chosen!r} with {experts} {count!r}; {name} "
                "needs groups of one size, of at least two experts, and topk_group of them at most."
            )

    return check
