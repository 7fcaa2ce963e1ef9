"""Checks of the size of heads that config.json states, for families that read it in their way."""

from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families.checks import check_even, head_sizes
from attnres_serve.families.family import Config


def fixed(name: str, config: Config) -> None:
    """Raise CheckpointError if config.json states a head size that vLLM ignores."""
    if not (sizes := head_sizes(config)):
        return
    hidden, heads, _ = sizes
    if (head := config.get("head_dim")) not in (None, hidden // heads):
        raise CheckpointError(
            f"head_dim is {head!r}, but vLLM's {name} has hidden_size / num_attention_heads "
            f"({hidden // heads}) always; remove the key if the model was trained so."
        )


def even_if_stated(name: str, config: Config) -> None:
    """Raise CheckpointError if an odd head size is stated."""
    if head_sizes(config):
        check_even(config.get("head_dim"))


def stated(name: str, config: Config) -> None:
    """Raise CheckpointError if no head size is stated: the classes' defaults differ."""
    if not is_count(head := config.get("head_dim")):
        raise CheckpointError(
            f"head_dim is {head!r}; config.json of {name} must state it, a whole number of at "
            "least 1."
        )
