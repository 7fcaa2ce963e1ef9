"""The flags of a vLLM release by its parser, and their changes since the release before.

The release's code makes the parser, with the packages of this environment.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from attnres_serve.compat.flags import table
from attnres_serve.compat.flags.flag import Flag, from_row

MOST = 5  # further packages for a new vLLM


def read(folder: Path) -> list[Flag] | None:
    """The flags of the vLLM in a folder; None if its code does not run here.

    Required packages that this environment lacks are installed in the folder.
    """
    packages = folder / "packages"
    for _ in range(MOST):
        child = subprocess.run(
            [sys.executable, "-m", table.READING],
            env=os.environ | {"PYTHONPATH": f"{folder}:{packages}", "VLLM_TARGET_DEVICE": "cpu"},
            capture_output=True,
            text=True,
        )
        if not child.returncode:
            return [*map(from_row, json.loads(child.stdout.splitlines()[-1]))]
        missing = re.search(r"No module named '(\w+)'", child.stderr)
        if not missing or missing[1].lower() not in _required(folder):
            return None
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        if subprocess.run([*pip, f"--target={packages}", missing[1]]).returncode:
            return None
    return None


def _required(folder: Path) -> set[str]:
    """The names of the packages that the wheel in a folder requires."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    return {one.lower() for one in re.findall(r"^Requires-Dist: ([\w-]+)", text, re.M)}


def _change(key: str, before: object, now: object) -> str:
    if isinstance(before, tuple) and isinstance(now, tuple):
        signed = [f"+{one}" for one in now if one not in before]
        signed += [f"-{one}" for one in before if one not in now]
        return f"{key} {' '.join(signed)}"
    return f"{key} is {now!r}, was {before!r}"


def rows(version: str, flags: list[Flag] | None) -> Iterator[str]:
    """A line for each flag that changed since the previous release in the table."""
    if flags is None:
        yield "flags: its parser does not run beside these packages; read them once it is installed"
        return
    older = [one for one in table.releases() if Version(one) < Version(version)]
    before = (older or table.releases())[-1]
    old = {flag.name: flag for flag in table.shipped(before)}
    new = {flag.name: flag for flag in flags}
    for name in sorted({*old, *new}):
        if name not in new:
            yield f"flag {old[name].long}: gone since {before}"
        elif name not in old:
            yield f"flag {new[name].long}: new since {before}"
        elif (a := vars(old[name])) != (b := vars(new[name])):
            changes = ", ".join(_change(key, a[key], b[key]) for key in a if a[key] != b[key])
            yield f"flag {new[name].long}: {changes}"
    yield f"vLLM {version}: {len(new)} flags, {len({*new} - {*old})} new since {before}"
