"""``attnres-serve inspect`` of a server that runs already, and what it refuses."""

from collections.abc import Sequence

import pytest

from attnres_serve import cli

OF_A_START = ("--dtype", "--served-model-name")  # flags of documented commands, each with a value


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints."""
    assert cli.main(["inspect", *words]) == 0
    return capsys.readouterr().out


def asking(url: str, words: Sequence[str]) -> list[str]:
    """The words of a documented command with a URL in the place of the checkpoint, the first word.

    Flags of a server that is started go.
    """
    _, *rest = words
    for flag in OF_A_START:
        if flag in rest:
            at = rest.index(flag)
            del rest[at : at + 2]
    return ["--url", url, *rest]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence by which the command refuses words; lines of its progress are before it."""
    assert cli.main(["inspect", *words]) == 2
    out, err = capsys.readouterr()
    *_, last = err.splitlines()
    assert not out and last.startswith("attnres-serve: ") and "Traceback" not in err
    return last
