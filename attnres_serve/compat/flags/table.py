"""The flags of the installed vLLM: from a table, or read once from its parser.

``table.json`` has those of the versions that the tests ran with, a line for each flag.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from attnres_serve import cache_folder
from attnres_serve.compat import versions
from attnres_serve.compat.flags.flag import Flag, from_row, to_row

TABLE = Path(__file__).with_name("table.json")
IN = "in"  # the releases that have a row
LONGEST = 120  # seconds to import vLLM and to read its parser
READING = "attnres_serve.compat.flags.reading"


@cache
def of_installed() -> tuple[tuple[Flag, ...], bool]:
    """The flags of the installed vLLM, and whether they are all that its parser has.

    They are not where another package's platform may add some, and where vLLM is not installed or
    cannot be imported: then those of the newest tested version are given.
    """
    release = versions.installed()[1].partition("+")[0]
    is_whole = not entry_points(group="vllm.platform_plugins")
    if found := shipped(release):
        return found, is_whole
    rows = _remembered(release) if release else None
    if rows is None:
        return shipped(releases()[-1]), False
    return tuple(map(from_row, rows)), is_whole


def releases() -> list[str]:
    """The releases of vLLM whose flags are in the table, oldest first."""
    found = {release for row in _rows() for release in row[IN]}
    return sorted(found, key=lambda release: [*map(int, release.split("."))])


def shipped(release: str) -> tuple[Flag, ...]:
    """The flags of a release in the table; empty where it has none."""
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
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else []


def _remembered(release: str) -> list[dict[str, Any]] | None:
    """The flags of another release, read by importing it once; None where that fails.

    They are kept beside the compiled kernels, where something can be written there.
    """
    file = None
    with suppress(OSError, ValueError):
        file = cache_folder.made() / f"flags-{release}.json"
        return json.loads(file.read_text(encoding="utf-8"))
    try:
        told = subprocess.run(
            [sys.executable, "-P", "-m", READING],
            capture_output=True,
            timeout=LONGEST,
            check=True,
        )
        rows = json.loads(told.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    if file is not None:
        with suppress(OSError):
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(rows), encoding="utf-8")
            part.replace(file)
    return rows
