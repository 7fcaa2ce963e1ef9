"""The keys of compiled code tell what it was made from and for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnres_serve.compat import engine_config
from attnres_serve.kernels import fingerprint


def test_every_change_of_the_source_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a link, as the kernels of a checkout are; and other files are not source."""
    package, linked = tmp_path / "package", tmp_path / "linked"
    package.mkdir()
    linked.mkdir()
    (package / "kernels").symlink_to(linked)
    monkeypatch.setattr(fingerprint, "PACKAGE", package)
    seen = []
    for path, content in (
        (package / "plan.py", "A = 1"),
        (package / "plan.py", "A = 2"),
        (linked / "loop.cpp", "A = 2"),
        (linked / "loops.cpp", "A = 2"),
        (linked / "loops.h", "A = 2"),
    ):
        path.write_text(content)
        seen.append(fingerprint.source.__wrapped__())
    assert len(set(seen)) == len(seen)
    (package / "page.js").write_text("let a")
    assert fingerprint.source.__wrapped__() == seen[-1]
    monkeypatch.undo()
    names = {path.name for path in fingerprint.PACKAGE.iterdir()}
    assert {"plugin.py", "kernels"} <= names


def test_every_file_of_the_kernels_is_source() -> None:
    """Or an edit of it would run what was compiled before; see ``fingerprint.SUFFIXES``."""
    files = [path for path in (fingerprint.PACKAGE / "kernels").resolve().rglob("*.*")]
    suffixes = {path.suffix for path in files if "__pycache__" not in path.parts}
    assert suffixes == set(fingerprint.SUFFIXES)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no narrower vectors to ask for"
)
def test_code_for_other_vectors_is_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        config = SimpleNamespace(additional_config={"attnres_algorithm": "auto"})
        engine_config.tell_origin(config)
        assert config.additional_config.pop("attnres_algorithm") == "auto"
        (words,) = config.additional_config.values()
        assert words.startswith(fingerprint.source())
        return words

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    wide = told()
    assert told() == wide
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert told() != wide
