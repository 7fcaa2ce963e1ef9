"""Request bodies that are wrong in one way or another, and what may be answered."""

import json
from typing import Any

import httpx
from hypothesis import strategies as st

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations"),
    *("/v1/attn_res/trace", "/tokenize"),
)
RIGHT: dict[str, Any] = {
    "model": "demo",
    "prompt": "import os",
    "input": "import os",
    "messages": [{"role": "user", "content": "import os"}],
    "max_tokens": 4,
    "max_output_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x"],
    "seed": 1,
    "logprobs": 1,
    "echo": False,
    "stream": False,
    "sites": [1],
    "tokens": {"start": 0},
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 1e308, "\x00", "\ud800", "NaN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@st.composite
def _one_field_wrong(draw) -> bytes:
    """A body with some of the fields of a right one, one of which holds anything."""
    names = draw(st.sets(st.sampled_from(sorted(RIGHT)), min_size=1))
    wrong = draw(st.sampled_from(sorted(names)))
    body = {name: RIGHT[name] for name in names}
    body |= {"max_tokens": 4, "max_output_tokens": 4, wrong: draw(VALUES)}
    return json.dumps(body).encode()


@st.composite
def _cut(draw) -> bytes:
    """The beginning of a right body."""
    whole = json.dumps(RIGHT).encode()
    return whole[: draw(st.integers(0, len(whole) - 1))]


BODIES = st.one_of(
    _one_field_wrong(),
    _one_field_wrong(),  # the most telling ones, so more of them
    _cut(),
    st.binary(max_size=64),
    VALUES.map(lambda value: json.dumps(value).encode()),
)


def post_malformed(client: httpx.Client, path: str, body: bytes) -> None:
    """Whatever it is answered, it is no fault of the server's."""
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500, f"{answer.status_code} {answer.text}"
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
        assert "Traceback" not in answer.text
