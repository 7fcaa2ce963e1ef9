"""Names of the fields that a route of OpenAI's API reads; vLLM drops any other without a word."""

import difflib
from collections.abc import Collection, Iterator
from typing import Any, get_args

from fastapi import FastAPI
from pydantic import AliasChoices, BaseModel

from attnres_serve.server.bounds import fields
from attnres_serve.server.bounds.fail_fast import routes_in

# Documented by OpenAI; they name the caller or say where to cache, and change no answer.
HARMLESS = {
    *("metadata", "safety_identifier", "user"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
}


def of_app(app: FastAPI) -> dict[str, frozenset[str]]:
    """From the path of a route of OpenAI's to the names of what its body may have.

    A route that reads its body by itself has no model and is left out.
    """
    paths = {*fields.ROUTES, fields.RESPONSES} - set(fields.UNTYPED)
    found: dict[str, frozenset[str]] = {}
    for route in routes_in(app.routes):
        path, body = getattr(route, "path", ""), getattr(route, "body_field", None)
        models = list(_models(body.field_info.annotation)) if body and path in paths else []
        if models:
            more = fields.UNREAD_OF_RESPONSES if path == fields.RESPONSES else {}
            others = {name.partition(".")[0] for name in fields.UNREAD | more} | {"best_of"}
            found[path] = frozenset(others | HARMLESS).union(*map(_names, models))
    return found


def problem(asked: Any, known: Collection[str] | None) -> str | None:
    """The sentence about a field that no one reads, None if there is none.

    A field that is null asks for nothing: clients send those that they leave at their defaults so.

    Args:
        asked: the body.
        known: names of the fields that are read; None where they are not known.
    """
    if not known or not isinstance(asked, dict):
        return None
    unknown = sorted(name for name in asked.keys() - set(known) if asked[name] is not None)
    if not unknown:
        return None
    near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.75)
    advice = f"did you mean {near[0]!r}?" if near else "leave it out."
    return f"{unknown[0]!r} is no field that this server reads; {advice}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models of an annotation, which may be a union of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for alias in (field.alias, field.validation_alias):
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
            yield from (choice for choice in choices if isinstance(choice, str))
