"""``make`` alone, and what `make serve` says before its server does."""

import re
from pathlib import Path
from typing import Any

import pytest
from commands import run, script
from serving import ROOT


def make(*words: str) -> str:
    return run("make", *words).stdout


def set_up(folder: Path, device: str, says: str, status: int) -> Any:
    """The set-up with a stand-in for Python and pip, which says something by its arguments."""
    script(folder / "env" / "bin" / "python", says)
    env = {"PATH": "/usr/bin:/bin", "VENV": str(folder / "env"), "DEVICE": device}
    return run(ROOT / "requirements" / "setup.sh", "serve", env=env, status=status)


def test_make_alone_lists_the_targets() -> None:
    """Those that are no part of another one, each with what it does."""
    listed = set(re.findall(r"^  make (\S+) +\S", make(), re.M))
    phony = " ".join(re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)).split()
    assert listed - {"test-vllm-VERSION"} == {*phony} - {"help", "setup-test"}
    assert make("help") == make()


def test_make_serve_says_how_to_call_the_commands() -> None:
    planned = make("--dry-run", "serve", "MODEL=m", "VENV=env")
    assert "env/bin/attnres-serve check m" in planned and "env/bin/attnres-serve --help" in planned


@pytest.mark.parametrize(
    ("torch", "status"), [("2.13.0+cpu", 1), ("2.13.0", 0), ("2.13.0+cu130", 0)]
)
def test_a_build_for_cpu_is_refused_where_cuda_was_asked_for(
    torch: str, status: int, tmp_path: Path
) -> None:
    done = set_up(tmp_path, "cuda", f'case "$*" in *version*) echo {torch} ;; esac', status)
    if status:
        assert f"setup: pip's sources gave torch {torch}, a build for CPU" in done.stderr


def test_what_pip_cannot_read_ends_the_set_up(tmp_path: Path) -> None:
    """Nothing is installed from other indexes than those that were meant."""
    asked = tmp_path / "asked"
    says = f'echo "$@" >> {asked}\ncase "$*" in *"config list") exit 2 ;; esac'
    done = set_up(tmp_path, "cpu", says, status=1)
    assert done.stderr.startswith("setup: pip cannot read its configuration")
    assert asked.read_text().splitlines()[1:] == ["-m pip --disable-pip-version-check config list"]


def test_pictures_can_be_made_after_a_setup() -> None:
    for name in ("cpu", "cuda"):
        pins = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert re.search(r"^matplotlib==", pins, re.M)
