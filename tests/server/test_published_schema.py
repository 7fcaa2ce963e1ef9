"""Requests made from the OpenAPI document that a server publishes, and answers held to it.

``schemathesis`` makes them: whatever is asked, there is no fault of the server's, and status, type
and body of the answer are in the document.
"""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.engine

FEW = 8  # tokens of an answer, where a request does not say how many
TIMEOUT = 60  # seconds, many times what an answer takes
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# A right request for every route, which is answered by 200.
ROUTES = {
    ("GET", "/ready"): {},
    ("GET", "/v1/attn_res"): {},
    ("GET", "/v1/models/{name}"): {"path_parameters": {"name": "demo"}},
    ("POST", "/v1/attn_res/trace"): {
        "body": {
            "prompt": "import os",
            "max_tokens": 2,
            "logprobs": 2,
            "vectors": False,
            "edits": [{"sites": [3], "mean": True}],
        }
    },
    ("GET", "/v1/attn_res/statistics"): {},
    ("POST", "/v1/attn_res/statistics/start"): {"body": {"cost": 0.01}},
    ("POST", "/v1/attn_res/statistics/stop"): {},
    ("POST", "/v1/completions"): {"body": {"prompt": "import os", "logprobs": 1}},
    ("POST", "/v1/chat/completions"): {
        "body": {"messages": [{"role": "user", "content": "import os"}], "max_tokens": FEW}
    },
}


@pytest.fixture(scope="module")
def document(open_server):
    return schemathesis.openapi.from_url(f"{open_server.url}/openapi.json")


def test_every_route_of_ours_is_asked(document):
    ours = {
        (method.upper(), path)
        for path, methods in document.raw_schema["paths"].items()
        for method, operation in methods.items()
        if "Attention Residuals" in operation.get("tags", ())
    }
    assert ours and ours <= ROUTES.keys()


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_answers_are_as_published(document, route, examples):
    """The right request; then valid ones, right ones with a field of those, and invalid ones."""
    method, path = route
    operation = document[path][method]
    right = ROUTES[route]
    media_type = "application/json" if "body" in right else None
    case = operation.Case(**right, media_type=media_type)
    assert case.call_and_validate(checks=CHECKS, timeout=TIMEOUT).status_code == 200
    valid = operation.as_strategy().map(named)
    cases = [valid]
    if "body" in right:
        invalid = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
        cases += [nearly(valid, right["body"]), invalid.map(named)]

    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.one_of(cases))
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=TIMEOUT)

    ask()


def named(case: schemathesis.Case) -> schemathesis.Case:
    """The served model's name in the place of any other, so that more than the name is tried.

    Of completions and chats it asks for a short answer, where it does not say how long.
    """
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = "demo"
        if case.path.endswith("/completions"):
            case.body.setdefault("max_tokens", FEW)
    return case


@st.composite
def nearly(draw, valid: st.SearchStrategy, right: dict[str, Any]) -> schemathesis.Case:
    """The right body with one field of a valid one: often served, where the valid one is not."""
    case = draw(valid)
    if not isinstance(case.body, dict):  # a body that may be left out
        return case
    others = sorted(case.body.keys() - {"prompt", "messages"})
    chosen = draw(st.sampled_from(others)) if others else None
    case.body = right | {name: case.body[name] for name in others if name == chosen}
    return case
