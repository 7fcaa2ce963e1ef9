"""Request bodies that are wrong in one way or another."""

import json
from typing import Any

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


# Turns of a conversation, most of which no model knows, whole or with something missing.
PARTS = st.sampled_from(
    [
        *({"type": kind, "text": "a"} for kind in ("text", "input_text", "output_text")),
        *({"type": kind, "text": "a"} for kind in ("reasoning_text", "summary_text")),
        {"type": "refusal", "refusal": "no"},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}},
        {"type": "input_image", "image_url": "http://127.0.0.1:9/a.png", "detail": "auto"},
        {"type": "input_file", "file_id": "a"},
        {},
    ]
)
CONTENT = st.none() | st.just("a") | st.lists(PARTS, max_size=3)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "x"])},
    optional={
        "content": CONTENT,
        "type": st.just("message"),
        "tool_calls": st.sampled_from([[], [CALL], [{}], None]),
        "tool_call_id": st.just("a"),
        "name": st.just("a"),
        "reasoning": st.just("a"),
    },
)
ITEMS = MESSAGES | st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                *("function_call", "function_call_output", "reasoning", "item_reference"),
                *("custom_tool_call", "custom_tool_call_output", "web_search_call", "compaction"),
                *("mcp_call", "computer_call_output", "additional_tools", "x"),
            ]
        )
    },
    optional={
        "id": st.just("a"),
        "call_id": st.just("a"),
        "name": st.just("f"),
        "arguments": st.sampled_from(["{}", "", "["]),
        "input": st.just("a"),
        "output": CONTENT,
        "content": CONTENT,
        "summary": st.lists(PARTS, max_size=2),
        "status": st.just("completed"),
        "tools": st.just([{"type": "function", "name": "f", "parameters": {}}]),
    },
)


@st.composite
def _conversation(draw) -> bytes:
    """For the routes that take one."""
    body = {"model": "demo", "max_tokens": 4, "max_output_tokens": 4}
    body["messages"] = draw(st.lists(MESSAGES, max_size=2))
    body["input"] = draw(st.lists(ITEMS, max_size=2))
    return json.dumps(body).encode()


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
    _conversation(),
    _cut(),
    st.binary(max_size=64),
    VALUES.map(lambda value: json.dumps(value).encode()),
)
