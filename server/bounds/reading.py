"""How vLLM's models read a body: unknown fields are told of once, and no shape of it is a 500."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from attnres_serve.compat import host

MOST = 100  # names that are told of; a client may invent any number
LONGEST = 60  # characters of a name
MISSHAPEN = "A field of the body has another type than it should; see /openapi.json"

_told: set[str] = set()


class Reader:
    """A validator of pydantic's, of which a body is asked.

    vLLM ignores unknown fields without a line in the log, and some of its models look into a field
    before its type is checked.
    """

    def __init__(self, validator: Any) -> None:
        self._validator = validator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._validator, name)

    def validate_python(self, body: Any, **how: Any) -> Any:
        """The model of a body.

        Raises:
            ValidationError: it is invalid.
        """
        try:
            read = self._validator.validate_python(body, **how)
        except (AttributeError, KeyError, TypeError):  # a look into what is of another type
            kind = PydanticCustomError("value_error", MISSHAPEN)
            error = InitErrorDetails(type=kind, loc=(), input=None)
            raise ValidationError.from_exception_data("body", [error]) from None
        for name, value in (getattr(read, "model_extra", None) or {}).items():
            if value is not None:  # what a client leaves at its default
                tell(name)
        return read


def tell(name: str) -> None:
    """Warn of a field that no route reads, once in a process."""
    name = name[:LONGEST]
    if name not in _told and len(_told) < MOST:
        _told.add(name)
        host.logger().warning(
            "AttnRes: a request has the field %r, which this server does not read; it is ignored "
            "here and in every later request.",
            name,
        )
