"""Events by which the processes of a start tell their supervisor how far they are.

An event is one line of stderr, because every process has that, whoever started it; the supervisor
takes the lines out (``server.start.supervisor``).
"""

import json
import os
from typing import Any

MARK = "\x1eattnres "
VARIABLE = "ATTNRES_SERVE_SUPERVISED"  # set where a supervisor listens


def is_heard() -> bool:
    """Whether a supervisor listens; vLLM's own command has none."""
    return bool(os.environ.get(VARIABLE))


def tell(event: str, **facts: Any) -> None:
    """Tell the supervisor an event; does nothing where there is none.

    Args:
        event: a word that ``server.start.console`` knows.
        facts: values that JSON can hold.
    """
    if is_heard():
        os.write(2, f"{MARK}{json.dumps({'event': event, **facts})}\n".encode())


def read(line: str) -> tuple[str, dict[str, Any] | None]:
    """Split a line into the text before an event and the event; None where it has no event."""
    text, mark, told = line.partition(MARK)
    if not mark:
        return line, None
    try:
        found = json.loads(told)
    except ValueError:
        return line, None
    return text, found if isinstance(found, dict) and "event" in found else None
