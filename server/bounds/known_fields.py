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

NOTHING: tuple[Any, ...] = (None, {}, [])
# Of clients for an older vLLM or another server: the field that has taken the place of one, and how
# it is given.
SUCCESSORS = {
    **{
        f"guided_{kind}": ("structured_outputs", f"`structured_outputs` with `{kind}` in it")
        for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
    },
    **{
        name: ("chat_template_kwargs", f"`chat_template_kwargs` with `{name}` in it")
        for name in ("enable_thinking", "thinking")
    },
    **dict.fromkeys(("max_new_tokens", "num_predict", "n_predict"), ("max_tokens", "`max_tokens`")),
    **dict.fromkeys(("stop_words", "stop_sequences"), ("stop", "`stop`")),
    "repeat_penalty": ("repetition_penalty", "`repetition_penalty`"),
}
# What a client library unpacks before it sends a body.
INSIDE = ("extra_body", "options")


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

    A field that is null or empty asks for nothing: clients send those that they leave at their
    defaults so.

    Args:
        asked: the body.
        known: names of the fields that are read; None where they are not known.
    """
    if not known or not isinstance(asked, dict):
        return None
    unknown = sorted(name for name in asked.keys() - set(known) if asked[name] not in NOTHING)
    if not unknown:
        return None
    one, also = unknown[0], unknown[1:4]
    more = ", ".join(map(repr, also)) + (" and others" if len(unknown) > 4 else "")
    others = f"; {more} {'are' if len(unknown) > 2 else 'is'} none either" if also else ""
    return f"{one!r} is no field that this server reads{others}; {_advice(one, known)}"


def _advice(name: str, known: Collection[str]) -> str:
    """What to do instead of giving a field that no one reads."""
    field, way = SUCCESSORS.get(name, ("", ""))
    if field in known:
        return f"give {way}."
    if name in INSIDE:
        return "give what is in it as fields of the body."
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"did you mean {near[0]!r}?" if near else "leave it out."


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
