"""Reading of bodies by vLLM's models: unknown fields are logged once, and no body gives a 500."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from attnres_serve.compat import host

MOST = 100  # logged names; a client may invent any number
LONGEST = 60  # characters of a name
MISSHAPEN = "A field of the body has another type than it should; see /openapi.json"

_logged: set[str] = set()


class Reader:
    """A wrapper of a pydantic validator for bodies.

    vLLM ignores unknown fields without a log line, and some of its models read a field before its
    type is checked.
    """

    def __init__(self, validator: Any) -> None:
        self._validator = validator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._validator, name)

    def validate_python(self, body: Any, **how: Any) -> Any:
        """The model of a body.

        Raises:
            ValidationError: the body is invalid.
        """
        try:
            read = self._validator.validate_python(body, **how)
        except (AttributeError, KeyError, TypeError):  # a model read a field of another type
            kind = PydanticCustomError("value_error", MISSHAPEN)
            error = InitErrorDetails(type=kind, loc=(), input=None)
            raise ValidationError.from_exception_data("body", [error]) from None
        for name, value in (getattr(read, "model_extra", None) or {}).items():
            if value is not None:  # a client's default
                tell(name)
        return read


def tell(name: str) -> None:
    """Log a warning for a field that no route reads, once per process."""
    name = name[:LONGEST]
    if name not in _logged and len(_logged) < MOST:
        _logged.add(name)
        host.logger().warning(
            "AttnRes: a request has the field %r, which this server does not read; it is ignored "
            "here and in every later request.",
            name,
        )
