"""AttnResSpec: the normalised description of a model's depth attention.

Whatever unit or convention a checkpoint format uses, its AttnRes settings become one of these.
Sublayers are numbered 0 to 2L-1 (attention, MLP, attention, ...), as in arXiv 2603.15031.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from attnres_serve.errors import CheckpointError

MAX_LAYERS = 10_000  # no model has as many; a damaged config must not fill the memory
HOUSE_KEYS = ("block_size", "block_starts", "final_mix", "key_norm_eps")


@dataclass(frozen=True)
class AttnResSpec:
    """Depth attention of one model.

    Attributes:
        num_layers: transformer layers L.
        block_starts: ascending sublayers at which a new block begins; the first is 0, so the
            token embedding is always a finished block of its own.
        final_mix: whether the last norm reads a mix of all sources; otherwise it reads the
            running partial sum.
        key_norm_eps: epsilon of the RMSNorm over keys.

    Raises:
        CheckpointError: when a value cannot describe a model.
    """

    num_layers: int
    block_starts: tuple[int, ...]
    key_norm_eps: float
    final_mix: bool = True

    def __post_init__(self) -> None:
        starts = self.block_starts
        _check_layers(self.num_layers)
        if not starts or not all(type(s) is int for s in starts) or starts[0] != 0:
            raise CheckpointError(
                f"attn_res.block_starts is {list(starts)!r}; expected whole sublayer numbers "
                "that begin with 0."
            )
        if any(a >= b for a, b in pairwise(starts)):
            raise CheckpointError(
                f"attn_res.block_starts is {list(starts)!r}; expected ascending numbers "
                "without repetition."
            )
        if starts[-1] >= self.num_sublayers:
            raise CheckpointError(
                f"attn_res.block_starts ends with {starts[-1]}, but the model has only "
                f"{self.num_sublayers} sublayers (numbered from 0); remove the starts behind it."
            )
        if type(self.final_mix) is not bool:
            raise CheckpointError(
                f"attn_res.final_mix is {self.final_mix!r}; expected true or false."
            )
        if not is_number(self.key_norm_eps) or self.key_norm_eps <= 0:
            raise CheckpointError(
                f"attn_res.key_norm_eps is {self.key_norm_eps!r}; expected a positive number."
            )

    @property
    def num_sublayers(self) -> int:
        return 2 * self.num_layers

    @property
    def num_blocks(self) -> int:
        """Blocks of sublayers; the embedding is not counted."""
        return len(self.block_starts)

    @property
    def is_full(self) -> bool:
        """Full AttnRes: every sublayer is a block of its own."""
        return len(self.block_starts) == self.num_sublayers

    @classmethod
    def uniform(
        cls, num_layers: int, block_size: int, key_norm_eps: float, final_mix: bool = True
    ) -> "AttnResSpec":
        """Blocks of ``block_size`` sublayers; the last one takes what remains."""
        _check_layers(num_layers)
        if not is_count(block_size):
            raise CheckpointError(
                f"the block size is {block_size!r}; expected a whole number of at least 1, "
                "counted in sublayers (1 is Full AttnRes)."
            )
        starts = tuple(range(0, 2 * num_layers, block_size))
        return cls(num_layers, starts, key_norm_eps, final_mix)

    @classmethod
    def from_house(cls, attn_res: Any, num_layers: Any, rms_norm_eps: Any) -> "AttnResSpec":
        """Read the ``attn_res`` dictionary of the house format; unknown keys are an error."""
        if not isinstance(attn_res, dict):
            raise CheckpointError(
                f"attn_res is {attn_res!r}; expected an object such as {{'block_size': 4}}."
            )
        unknown = sorted(set(attn_res) - set(HOUSE_KEYS))
        if unknown:
            raise CheckpointError(
                f"attn_res has the unknown key {unknown[0]!r}; the known ones are "
                f"{', '.join(HOUSE_KEYS)}."
            )
        if ("block_size" in attn_res) == ("block_starts" in attn_res):
            raise CheckpointError(
                "attn_res must have exactly one of block_size (in sublayers) and block_starts; "
                f"found {sorted(attn_res)}."
            )
        eps = attn_res.get("key_norm_eps", rms_norm_eps)
        final_mix = attn_res.get("final_mix", True)
        if "block_size" in attn_res:
            return cls.uniform(num_layers, attn_res["block_size"], eps, final_mix)
        starts = attn_res["block_starts"]
        if not isinstance(starts, (list, tuple)):
            raise CheckpointError(
                f"attn_res.block_starts is {starts!r}; expected a list of sublayer numbers."
            )
        return cls(num_layers, tuple(starts), eps, final_mix)

    def to_house(self) -> dict[str, Any]:
        """The ``attn_res`` dictionary of the house format, as stored in the HF config."""
        house = asdict(self)
        del house["num_layers"]
        house["block_starts"] = list(self.block_starts)
        return house


def _check_layers(num_layers: Any) -> None:
    if not is_count(num_layers) or num_layers > MAX_LAYERS:
        raise CheckpointError(
            f"num_hidden_layers is {num_layers!r}; expected a whole number from 1 to {MAX_LAYERS}."
        )


def is_count(value: Any) -> bool:
    """A positive whole number (True is not one)."""
    return type(value) is int and value >= 1


def is_number(value: Any) -> bool:
    """A finite number (Python's JSON reader knows NaN and Infinity)."""
    return type(value) is int or (type(value) is float and isfinite(value))
