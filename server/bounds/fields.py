"""Fields that vLLM would not answer rightly, refused by name.

Of OpenAI's API it drops some, which are refused where they would change the answer.  Those that
only name the caller or say where to cache (``user``, ``metadata``, ``prompt_cache_key``,
``safety_identifier``, ...) change none and may be given.  And it answers some by a 500 that have
another shape than they should, because it reads them before their types are checked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations")
CHATS = ("/v1/chat/completions", "/v1/chat/completions/batch")
RESPONSES = "/v1/responses"
# Where vLLM reads a body without asking for its type.
UNTYPED = (
    *("/invocations", "/scale_elastic_ep"),
    *("/inference/v1/abort_requests", "/abort_requests"),
)
# The values with which a field says what happens anyway; behind a dot is a field of a field.
UNREAD: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "stream_options.include_obfuscation": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# Those of ``/v1/responses`` beside them.
UNREAD_OF_RESPONSES: dict[str, tuple[Any, ...]] = {
    "access_programs": (None, {}),
    "context_management": (None, []),
    "conversation": (None,),
    "image": (None, {}),
    "include": (None, [], ["message.output_text.logprobs"]),
    "max_tool_calls": (None,),
    "reasoning.context": (None, "auto"),
    "reasoning.generate_summary": (None,),
    "reasoning.mode": (None, "standard"),
    "reasoning.summary": (None,),
    "stream_options": (None, {}, {"include_obfuscation": False}),
    "text.verbosity": (None, "medium"),
}
UNREAD_OF_MESSAGES = ("audio", "function_call", "refusal")
# And where vLLM looks for no calls of tools in answers; on the other routes it says so itself.
UNCALLED: dict[str, tuple[Any, ...]] = {"tools": (None, []), "tool_choice": (None, "auto", "none")}
CALLED = ("function", "custom", "namespace")  # tools that a client runs; vLLM would run none


def problem(path: str, asked: Any, calls_tools: bool) -> str | None:
    """One sentence about the first invalid field of a body; None if all are valid."""
    if not isinstance(asked, dict):
        return "The body has to be a JSON object." if path in UNTYPED else None
    if path in ROUTES:
        messages = list(_objects(asked.get("messages")))
        return (
            misshapen(asked)
            or misshapen_messages(path, asked)
            or _first(misshapen_message, messages)
            or unread(asked, UNREAD)
            or _first(unread_of_message, messages)
        )
    if path == RESPONSES:
        own = UNREAD_OF_RESPONSES | ({} if calls_tools else UNCALLED)
        items = _objects(asked.get("input"))
        return (
            misshapen(asked, flat=True) or unread(asked, UNREAD | own) or _first(half_read, items)
        )
    return None


def unread(asked: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> str | None:
    """The sentence about the first field of a body that would be dropped, None if there is none."""
    for name, usual in fields.items():
        if _at(asked, name) not in usual:
            return f"{name!r} is not supported by this server; leave it out."
    best_of, answers = asked.get("best_of"), asked.get("n")
    if best_of is not None and best_of != (1 if answers is None else answers):
        return "'best_of' is not supported by this server; ask for `n` answers and choose."
    return None


def unread_of_message(message: Mapping[str, Any]) -> str | None:
    """The sentence about a field of a message that would be dropped, None if there is none."""
    for name in UNREAD_OF_MESSAGES:
        if message.get(name) not in (None, ""):
            return f"{name!r} of a message is not supported by this server; leave it out."
    return None


def half_read(item: Mapping[str, Any]) -> str | None:
    """The sentence about an item of ``/v1/responses`` that vLLM reads the first part of at most."""
    content, summary = item.get("content"), item.get("summary")
    if item.get("role") == "assistant" and isinstance(content, list):
        first = content[0] if content else None
        has_text = isinstance(first, dict) and isinstance(first.get("text"), str)
        if (has_text and len(content) > 1) or ("type" in item and not has_text):
            return (
                "'input' has a message of the assistant whose `content` is not one part with a "
                "`text`, and this server reads no other; send one."
            )
    if item.get("type") == "reasoning":
        parts = content or summary
        if isinstance(parts, list) and len(parts) > 1:
            return (
                "'input' has reasoning of several parts, of which this server reads the first; "
                "send them as one."
            )
    return None


def misshapen(asked: Mapping[str, Any], flat: bool = False) -> str | None:
    """The sentence about a field of a body that vLLM would fail at, None if there is none.

    Args:
        asked: the body.
        flat: whether its tools have their kind and name beside each other.
    """
    if not isinstance(asked.get("structured_outputs"), dict | None):
        return "'structured_outputs' has to be an object."
    tools = asked.get("tools")
    if not isinstance(tools, list):
        return None
    if flat and not all(isinstance(tool, dict) and tool.get("type") in CALLED for tool in tools):
        return "'tools' has to be a list of functions; this server runs no other kind of tool."
    if not flat and not all(map(_is_tool, tools)):
        return "'tools' has to be a list of objects, each with a `function` that has a `name`."
    return None


def misshapen_messages(path: str, asked: Mapping[str, Any]) -> str | None:
    """The sentence about messages of a chat that are no list, None if they are one or missing."""
    if path not in CHATS or isinstance(asked.get("messages", []), list):
        return None
    return "'messages' has to be a list of objects, each with a `role`."


def misshapen_message(message: Mapping[str, Any]) -> str | None:
    """The sentence about a field of a message that vLLM would fail at, None if there is none."""
    if isinstance(message.get("tool_calls"), list | None):
        return None
    return "'tool_calls' of a message has to be a list of objects."


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects of a list, and of the lists in it."""
    for one in value if isinstance(value, list) else []:
        if isinstance(one, dict):
            yield one
        elif isinstance(one, list):
            yield from _objects(one)


def _first(
    say: Callable[[Mapping[str, Any]], str | None], objects: Iterable[Mapping[str, Any]]
) -> str | None:
    return next(filter(None, map(say, objects)), None)


def _at(asked: Mapping[str, Any], name: str) -> Any:
    outer, _, inner = name.partition(".")
    found = asked.get(outer)
    if inner:
        return found.get(inner) if isinstance(found, dict) else None
    return found


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and "name" in function
