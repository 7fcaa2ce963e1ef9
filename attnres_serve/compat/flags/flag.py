"""One flag of vLLM's parser, as a row of a table."""

from dataclasses import asdict, dataclass
from typing import Any

STORE, APPEND, SWITCH, ADAPTERS = "store", "append", "switch", "adapters"
TEXT = "text"


@dataclass(frozen=True)
class Flag:
    """A flag, or vLLM's positional argument for the model.

    Attributes:
        spellings: such as ``("--tensor-parallel-size", "-tp")``; none for a positional argument.
        name: of its value.
        off: spellings that turn a switch off.
        action: what is done with a value: ``store``, ``append``, ``adapters``; a ``switch`` takes
            none.
        kind: of a value, one of ``kinds.KINDS``; None where vLLM alone can read it.
        is_optional: whether ``None`` and an empty word stand for no value.
        count: of values: None for one, ``?`` for one or none, ``+`` for one or more, or a number.
        alone: what stands for a missing value, where one may be missing.
        choices: the values that it takes; None for any.
        default: its value where it is not given; None where that is computed, or no plain value.
        of_engine: whether vLLM's engine has it, and not its server alone.
    """

    spellings: tuple[str, ...]
    name: str
    off: tuple[str, ...] = ()
    action: str = STORE
    kind: str | None = TEXT
    is_optional: bool = False
    count: str | int | None = None
    alone: Any = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    of_engine: bool = True

    @property
    def long(self) -> str:
        return next((word for word in self.spellings if word.startswith("--")), self.spellings[0])


def to_row(flag: Flag) -> dict[str, Any]:
    """What a flag has that others have not, for JSON."""
    usual = asdict(Flag((), ""))
    return {key: value for key, value in asdict(flag).items() if value != usual[key]}


def from_row(row: dict[str, Any]) -> Flag:
    choices = row.get("choices")
    return Flag(
        **{
            **row,
            "spellings": tuple(row.get("spellings", ())),
            "off": tuple(row.get("off", ())),
            "choices": None if choices is None else tuple(choices),
        }
    )
