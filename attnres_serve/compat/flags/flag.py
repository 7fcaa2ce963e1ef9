"""A flag of vLLM's parser, as a row of a table."""

from dataclasses import asdict, dataclass
from typing import Any

STORE, APPEND, SWITCH, ADAPTERS = "store", "append", "switch", "adapters"
TEXT = "text"


@dataclass(frozen=True)
class Flag:
    """A flag, or vLLM's positional argument for the model.

    Attributes:
        spellings: such as ``("--tensor-parallel-size", "-tp")``; empty for a positional argument.
        name: of its value.
        off: spellings that turn a switch off.
        action: ``store``, ``append``, ``adapters``, or ``switch``, which takes no value.
        kind: of a value, one of ``kinds.KINDS``; None if only vLLM can read it.
        is_optional: whether ``None`` and an empty argument mean no value.
        count: of values: None for one, ``?`` for one or none, ``+`` for one or more, or a number.
        alone: the value without an argument, if it may be missing.
        choices: the valid values; None for any.
        default: its default; None if computed, or no plain value.
        of_engine: whether vLLM's engine has it, not only its server.
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
    """The fields of a flag that differ from the defaults, for JSON."""
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
