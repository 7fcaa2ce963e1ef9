"""Fields that no route reads."""

import pytest
from fastapi import FastAPI

pytest.importorskip("vllm")

from bounded_app import BODIES

from attnres_serve.server.bounds import reading


@pytest.fixture
def told(warned, monkeypatch) -> list[str]:
    """What is warned of, in a process that has told nothing yet."""
    monkeypatch.setattr(reading, "_logged", set())
    return warned


def read(app: FastAPI, path: str, body: dict):
    """The model that a route makes of a body."""
    (route,) = (route for route in app.routes if route.path == path)
    found, errors = route.body_field.validate(body, {}, loc=())
    assert not errors
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "unknown",
    [
        *({"max_token": 3}, {"guided_json": {"type": "object"}}, {"extra_body": {"top_k": 1}}),
        *({"prompt_cache_options": {"a": 1}, "best_off": 3}, {"frobnicate": [], "store_": False}),
    ],
    ids=str,
)
def test_a_field_that_no_route_reads_is_told_of_once(vllms_app, told, path, unknown):
    """And the rest of the body is read as without it."""
    for _ in range(3):
        found = read(vllms_app, path, BODIES[path] | unknown)
    expected = read(vllms_app, path, BODIES[path])
    dropped = {"request_id", *unknown}
    assert found.model_dump(exclude=dropped) == expected.model_dump(exclude=dropped)
    assert [name for line in told for name in unknown if f"{name!r}" in line] == [*unknown]
    assert len(told) == len(unknown)


def test_no_field_is_told_of_that_is_read_or_null(vllms_app, told):
    read(vllms_app, "/v1/completions", BODIES["/v1/completions"] | {"n": 2, "nothing": None})
    assert not told


def test_a_client_cannot_fill_the_log(vllms_app, told):
    for first in range(0, 1000, 10):
        names = {f"{number}-{'x' * 5000}": 1 for number in range(first, first + 10)}
        read(vllms_app, "/v1/completions", BODIES["/v1/completions"] | names)
    assert len(told) == reading.MOST and max(map(len, told)) < 300


def test_invocations_tells_of_fields_too(completions_of_invocations, told):
    completions_of_invocations.validate_python({"prompt": "a", "max_token": 1})
    assert len(told) == 1 and "'max_token'" in told[0]
