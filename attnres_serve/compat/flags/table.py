"""The flags of the installed vLLM: from a table, or read once from its parser.

``table.json`` has the flags of the tested versions, one per line.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from secrets import token_hex
from typing import Any

from attnres_serve import cache_folder
from attnres_serve.compat import versions
from attnres_serve.compat.flags.flag import Flag, from_row, to_row

TABLE = Path(__file__).with_name("table.json")
IN = "in"  # the releases with a row
LONGEST = 120  # seconds to import vLLM and to read its parser
READING = "attnres_serve.compat.flags.reading"


@cache
def of_installed() -> tuple[tuple[Flag, ...], bool]:
    """The flags of the installed vLLM, and whether they are complete.

    They may be incomplete if another package's platform adds some. If vLLM is missing or cannot be
    imported, they are those of the newest tested version, and count as incomplete.
    """
    version = versions.installed()[1]
    release, _, build = version.partition("+")
    is_whole = not entry_points(group="vllm.platform_plugins")
    is_released = re.fullmatch(r"(cpu|cu\d+|rocm\d+|xpu)?", build) is not None
    flags = shipped(release) if is_released else ()
    flags = flags or (_remembered(version) if version else ())
    return (flags, is_whole) if flags else (shipped(releases()[-1]), False)


def releases() -> list[str]:
    """The releases of vLLM whose flags are in the table, oldest first."""
    from packaging.version import Version

    return sorted({release for row in _rows() for release in row[IN]}, key=Version)


def shipped(release: str) -> tuple[Flag, ...]:
    """The flags of a release in the table; empty for an unknown release."""
    rows = ({**row} for row in _rows() if release in row[IN])
    return tuple(from_row(row) for row in rows if row.pop(IN))


def remember(release: str, flags: Iterable[Flag]) -> None:
    """Write the flags of a release into the table, which ships with the package."""
    known = {json.dumps({**row, IN: []}): {*row[IN]} - {release} for row in _rows()}
    for flag in flags:
        known.setdefault(json.dumps({**to_row(flag), IN: []}), set()).add(release)
    rows = [{**json.loads(row), IN: sorted(held)} for row, held in known.items() if held]
    rows.sort(key=lambda row: (row["name"], row[IN]))
    lines = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    _rows.cache_clear()


@cache
def _rows() -> list[dict[str, Any]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def _remembered(version: str) -> tuple[Flag, ...]:
    """The flags of another version, read by importing it once; empty on failure.

    They are cached beside the compiled kernels if possible.
    """
    file = None
    with suppress(OSError, ValueError):
        file = cache_folder.made() / f"flags-{version}-{_digest()}.json"
        return _flags(file.read_text(encoding="utf-8"))
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", READING],
            capture_output=True,
            timeout=LONGEST,
            check=True,
        )
        text = child.stdout.decode().splitlines()[-1]
        flags = _flags(text)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()
    if file is not None:
        with suppress(OSError):
            part = file.with_suffix(f".{token_hex(8)}")
            part.write_text(text, encoding="utf-8")
            part.replace(file)
    return flags


def _flags(text: str) -> tuple[Flag, ...]:
    return tuple(from_row(row) for row in json.loads(text))


def _digest() -> str:
    """A hash of the code that reads a parser; results of older code are not reused."""
    folder = Path(__file__).parent
    sources = [(folder / name).read_bytes() for name in ("flag.py", "kinds.py", "reading.py")]
    return hashlib.sha256(b"\n".join(sources)).hexdigest()[:16]
