"""A copy of the tree, a fault in it, and what its tests say."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.mutants.catalogue import ROOT, Fault, MisplacedError

CAUGHT, MISSED, NOT_APPLIED, NO_END = "caught", "missed", "not applied", "no end"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)
_OPTIONS = ("-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--no-header")
_ALREADY = ("-W", "ignore:Module already imported")  # pytest rewrites no assert of theirs
_moments = count(int(time.time()))


class Tree:
    """A copy of what git tracks, and what it would, in which tests run.

    Args:
        folder: where it goes; nothing is there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
            if (ROOT / name).exists():  # a tracked file may be deleted
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        for command in ("init", "--quiet"), ("add", "--all"):  # tests of pages ask git for them
            subprocess.run(["git", *command], cwd=folder, check=True)

    def run(
        self, tests: Sequence[str], engine: bool, seconds: float, *options: str
    ) -> tuple[int | None, str]:
        """Run tests with the package that is in the copy.

        Args:
            tests: what is given to pytest.
            engine: whether those that start an engine run, too.
            seconds: how long they may take.
            options: further ones of pytest's.

        Returns:
            The exit status of pytest, None where the time ran out, and what it printed.
        """
        marks = "not exhaustive and not soak" + ("" if engine else " and not engine")
        arguments = [*_OPTIONS, *_ALREADY, "-m", marks, *options, *tests]
        output = self.folder.with_name(f"{self.folder.name}-output")
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"arguments": arguments, "output": str(output)}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        in_time, _, _ = select.select([process.stdout], [], [], seconds)
        status = process.stdout.readline() if in_time else ""
        if not status:  # the time ran out, or somebody ended it
            self.end()
            return None, ""
        return int(status), output.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """Kill the tests that run, and what they started."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def write(self, path: Path, text: str) -> None:
        """Write a source at a second of its own, by which Python knows older bytecode."""
        path.write_text(text, encoding="utf-8")
        moment = next(_moments)
        os.utime(path, (moment, moment))

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.folder / "tests" / "mutants" / "warm.py")],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group that can be killed whole
        )

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self.folder),  # ahead of the editable installation
            # No library or graph that a fault made stays behind.  The key of the C++ backend's
            # library has its source in it: a fault there is compiled, the right source once.
            "XDG_CACHE_HOME": f"{self.folder}-cache",
        }

    def check_shadows(self) -> None:
        """Raise RuntimeError unless the package is imported from the copy."""
        found = subprocess.run(
            [sys.executable, "-c", "import attnres_serve; print(attnres_serve.__file__)"],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout.strip()
        if not Path(found).is_relative_to(self.folder):
            raise RuntimeError(f"tests would import {found}, not the package in {self.folder}")


def attempt(fault: Fault, tree: Tree, seconds: float) -> dict[str, Any]:
    """Plant a fault in a copied tree, run its tests and take it out again.

    Returns:
        ``outcome``, ``by`` (the first test that failed, or the reason of another outcome) and
        ``seconds``.
    """
    begin = time.monotonic()

    def told(outcome: str, by: str) -> dict[str, Any]:
        return {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - begin, 1)}

    try:
        path, at = fault.place(tree.folder)
        wrong = fault.planted(path, at)
    except MisplacedError as error:
        return told(NOT_APPLIED, str(error))
    right = path.read_text(encoding="utf-8")
    tree.write(path, wrong)
    try:
        status, output = tree.run(fault.tests, bool(fault.engine), seconds, "-x")
    finally:
        tree.write(path, right)
    if status is None:
        return told(NO_END, f"after {seconds:.0f} s")
    if status == 0:
        return told(MISSED, "")
    failed = _FAILED.search(output)
    if status not in (1, 2) or failed is None:
        return told(NOT_APPLIED, f"pytest ended with {status}: {output.strip()[-200:]}")
    return told(CAUGHT, failed[1])


class Trees:
    """Copies of the tree in a temporary folder, one for each process."""

    def __init__(self, number: int) -> None:
        self._folder = TemporaryDirectory(prefix="mutants-")
        self.trees = [Tree(Path(self._folder.name, str(at))) for at in range(number)]

    def __enter__(self) -> list[Tree]:
        return self.trees

    def __exit__(self, *_: object) -> None:
        for tree in self.trees:
            tree.end()
        self._folder.cleanup()
