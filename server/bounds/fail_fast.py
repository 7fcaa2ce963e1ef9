"""Validation of bodies that ends at the first invalid list entry, and bounds integers.

Pydantic collects every error before it answers, and one for each type of a union: 12 kB of ``{}``
in a list sent to ``/v1/responses`` took 5 GB.  Objects have no such bound; 4 MiB of invalid entries
in one object take 300 MB.

Pydantic accepts integers of any length, but vLLM sends 64 bits to its engine: a longer one would be
a 500 and leave its request among the running ones.
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
    """Let the routes of an app stop at the first invalid entry of a list in a body.

    They also refuse integers of more than 64 bits.  Valid bodies are read as before.  If pydantic
    or FastAPI does not support this for a route, a warning is logged.
    """
    unbounded = {}
    for route in routes_in(app.routes):
        try:
            for adapter in adapters(route):
                # Otherwise the models' existing validators would be used instead of the new
                # schemas.
                bounded = SchemaValidator(_bounded(adapter.core_schema), _use_prebuilt=False)
                adapter.validator = Reader(bounded)  # type: ignore[assignment]
        except Exception as error:  # another version may lack anything used here
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
    """The routes, including those of nested routers."""
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
    """A copy of a pydantic schema, or of a part of it, with bounds for lists and integers.

    Args:
        schema: the schema, which is not changed.
        most: the largest integer.  Workers keep some as signed ones (``seed``).
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(one, most) for one in schema)
    if not isinstance(schema, dict):
        return schema
    # In a union with float, a larger integer would become a float and lose digits.
    inner = 2**64 - 1 if schema.get("type") == "union" else 2**63 - 1
    bounded = {key: _bounded(value, inner) for key, value in schema.items()}
    if schema.get("type") in LISTS:
        bounded["fail_fast"] = True
    if schema.get("type") == "int":
        bounded = {"ge": -(2**63), "le": most} | bounded
    return bounded
