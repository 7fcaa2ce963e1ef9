"""What the command line refuses."""

import pytest

from attnres_serve import cli


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that is refused in exactly one line; returns that line."""
    assert cli.main([*words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("attnres-serve: ") and err.count("\n") == 1
    return err
