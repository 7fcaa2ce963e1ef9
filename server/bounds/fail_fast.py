"""Bodies are read up to their first wrong entry, and no further than an engine can take.

Pydantic makes an error of everything that is wrong before anything can answer, and of an entry that
may be of many kinds one for each kind: of a list of ``{}`` of 12 kB on ``/v1/responses`` 5 GB.
Objects have no such end; of 4 MiB of wrong entries in one, 300 MB.

And an integer has no end for pydantic, but 64 bits in what vLLM sends to its engine: a longer one
would be a 500 and leave its request behind among those that run.
"""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter
from pydantic_core import SchemaValidator

from attnres_serve.compat import host, openai_app
from attnres_serve.server.bounds.reading import Reader

LISTS = ("list", "tuple", "set", "frozenset")


def read_to_first_error(app: FastAPI) -> None:
    """Have the routes of an app end a list in a body at the first entry that is wrong.

    And refuse integers of more than 64 bits.  What is right is read as before.  Where pydantic or
    FastAPI cannot do that for a route, the log says so.
    """
    unbounded = {}
    for route in routes_in(app.routes):
        try:
            for adapter in adapters(route):
                # Validators that models have already would be taken for their schemas.
                bounded = SchemaValidator(_bounded(adapter.core_schema), _use_prebuilt=False)
                adapter.validator = Reader(bounded)  # type: ignore[assignment]
        except Exception as error:  # whatever another version does not have
            unbounded[route.path] = error
    if unbounded:
        host.logger().warning(
            "AttnRes: bodies for %s are read to their end, which takes long where much is wrong, "
            "and their integers are not bounded, because this pydantic or FastAPI is of another "
            "version than was tested (%s).",
            ", ".join(unbounded),
            next(iter(unbounded.values())),
        )


def routes_in(routes: Any) -> Iterator[Any]:
    """The routes, and the routes of the routers among them."""
    for route in routes:
        yield route
        yield from routes_in(getattr(getattr(route, "router", None), "routes", ()))


def adapters(route: Any) -> list[TypeAdapter]:
    """The adapters that read the bodies for a route."""
    if getattr(route, "body_field", None) is not None:
        return [route.body_field._type_adapter]
    if getattr(route, "path", None) == openai_app.INVOCATIONS:
        return openai_app.adapters_of_invocations(route.endpoint)
    return []


def _bounded(schema: Any, most: int = 2**63 - 1) -> Any:
    """A schema of pydantic's, or a part of one, with ends of its lists and integers.

    Args:
        schema: is not changed; a copy is returned.
        most: of an integer.  Workers keep some with a sign (``seed``).
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(one, most) for one in schema)
    if not isinstance(schema, dict):
        return schema
    # What may be a float as well would become one beyond its end, without its last digits.
    inner = 2**64 - 1 if schema.get("type") == "union" else 2**63 - 1
    found = {key: _bounded(value, inner) for key, value in schema.items()}
    if schema.get("type") in LISTS:
        found["fail_fast"] = True
    if schema.get("type") == "int":
        found = {"ge": -(2**63), "le": most} | found
    return found
