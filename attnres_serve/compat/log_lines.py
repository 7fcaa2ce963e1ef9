"""Lines that processes of vLLM write: their level, their text, and the reason why one ended."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\([^()]+ pid=\d+\) ?")
_VLLM = re.compile(r"^([A-Z]+) [\d-]+ [\d:]+ \[[^\]]*\] ?(.*)$")
_UVICORN = re.compile(r"^([A-Z]+): {2,}(.*)$")
# Texts that tell why a process ended, without a traceback too.
_REASON = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b|^Worker proc \S+ died unexpectedly"
    r"|^ +what\(\): |^Fatal Python error: |^\S+: error: "
)
_LAST_OF_TRACEBACK = re.compile(r"^[\w.]+(?:: |$)")  # torch has exceptions of any name
_POINTER = "root cause"
ROOM = 300  # characters of a reason in a sentence


def plain(line: str) -> str:
    """A line without its colours and its end."""
    return _ANSI.sub("", line).rstrip()


def parse(line: str) -> tuple[str, str]:
    """The level of a plain line, empty where no logger wrote it, and its text."""
    text = _PREFIX.sub("", line)
    found = _VLLM.match(text) or _UVICORN.match(text)
    return (found[1], found[2]) if found else ("", text)


def is_pointer(text: str) -> bool:
    """Whether an exception says no more than that another one was told before."""
    return _POINTER in text


def first_reason(texts: Sequence[str]) -> str | None:
    """The first exception, or the like, that does not only point at another; None without any."""
    found = [texts[number].strip() for number in _reasons(texts)]
    return next((text for text in found if not is_pointer(text)), found[0] if found else None)


def last_reason(texts: Sequence[str]) -> str | None:
    """The last exception, or the like, that does not only point at another; None without any.

    An indented line behind it belongs to it.
    """
    found = list(_reasons(texts))
    told = [number for number in found if not is_pointer(texts[number])] or found
    if not told:
        return None
    more = [text for text in texts[told[-1] + 1 : told[-1] + 2] if text.startswith(" ")]
    return " ".join(text.strip() for text in [texts[told[-1]], *more])


def reason_in(log: Path) -> str:
    """The last reason in a log, cut to what a sentence has room for; its last line without one."""
    lines = map(plain, log.read_text(errors="replace").splitlines())
    texts = [text for line in lines if (text := parse(line)[1]).strip()]
    return _beginning(last_reason(texts) or texts[-1]) if texts else "without a word"


def _beginning(text: str) -> str:
    """As many of its words as a sentence has room for; the log has them all."""
    words = textwrap.shorten(text, ROOM, placeholder="", break_on_hyphens=False)
    return words or text.strip()[:ROOM]  # of a single word its beginning


def _reasons(texts: Sequence[str]) -> Iterator[int]:
    """Where exceptions, or the like, stand among texts."""
    in_traceback = False
    for number, text in enumerate(texts):
        begins = not text[:1].isspace()
        if _REASON.match(text) or (in_traceback and begins and _LAST_OF_TRACEBACK.match(text)):
            yield number
        if begins:
            in_traceback = text.startswith("Traceback")
