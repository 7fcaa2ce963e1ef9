"""Bodies are read up to their first wrong entry.

Pydantic makes an error of everything that is wrong before anything can answer, and of an entry that
may be of many kinds one for each kind: of a list of ``{}`` of 12 kB on ``/v1/responses`` 5 GB.
What has no such end, objects and ``/invocations``, which reads its body itself, has the bound on
entries alone (``limits``).
"""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic_core import SchemaValidator

from attnres_serve import compat

LISTS = ("list", "tuple", "set", "frozenset")


def read_to_first_error(app: FastAPI) -> None:
    """Have the routes of an app end a list in a body at the first entry that is wrong.

    What is right is read as before.  Where pydantic or FastAPI cannot do that, the log says so.
    """
    try:
        for adapter in [field._type_adapter for field in _bodies(app.routes)]:
            # Validators that models have already would be taken for their schemas.
            adapter.validator = SchemaValidator(
                _fail_fast(adapter.core_schema), _use_prebuilt=False
            )
    except (AttributeError, TypeError) as error:
        compat.logger().warning(
            "AttnRes: bodies are read to their end, which takes long where much is wrong, because "
            "this pydantic or FastAPI is of another version than was tested (%s).",
            error,
        )


def _bodies(routes: Any) -> Iterator[Any]:
    """What FastAPI reads bodies by, also of routes in routers in it."""
    for route in routes:
        if getattr(route, "body_field", None) is not None:
            yield route.body_field
        yield from _bodies(getattr(getattr(route, "router", None), "routes", ()))


def _fail_fast(schema: Any) -> Any:
    """A schema of pydantic's, or a part of one, whose lists end at their first wrong entry."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_fail_fast, schema))
    if not isinstance(schema, dict):
        return schema
    found = {key: _fail_fast(value) for key, value in schema.items()}
    return found | {"fail_fast": True} if schema.get("type") in LISTS else found
