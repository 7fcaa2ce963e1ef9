"""Fields that vLLM would not answer rightly, refused by name.

Of OpenAI's API it drops some, which are refused where they would change the answer.  Those that
only name the caller or say where to cache (``user``, ``metadata``, ``prompt_cache_key``,
``safety_identifier``, ...) change none and may be given.  And it answers some by a 500 that have
another shape than they should, because it reads them before their types are checked.
"""

from collections.abc import Mapping
from typing import Any

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations")
# The values with which a field says what happens anyway.
UNREAD: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


def unread(asked: Mapping[str, Any]) -> str | None:
    """The sentence about the first field of a body that would be dropped, None if there is none."""
    for name, usual in UNREAD.items():
        if name in asked and asked[name] not in usual:
            return f"{name!r} is not supported by this server; leave it out."
    best_of, answers = asked.get("best_of"), asked.get("n")
    if best_of is not None and best_of != (1 if answers is None else answers):
        return "'best_of' is not supported by this server; ask for `n` answers and choose."
    return None


def misshapen(asked: Mapping[str, Any]) -> str | None:
    """The sentence about a field of a body that vLLM would fail at, None if there is none."""
    if not isinstance(asked.get("structured_outputs"), dict | None):
        return "'structured_outputs' has to be an object."
    tools = asked.get("tools")
    if isinstance(tools, list) and not all(map(_is_tool, tools)):
        return "'tools' has to be a list of objects, each with a `function` that has a `name`."
    return None


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and "name" in function
