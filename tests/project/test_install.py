"""The set-up installs by uv with pip's sources, and by pip where uv cannot."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from commands import script
from serving import ROOT

UV_DOES = 'echo "$@" > "$ASKED"; echo "$SSL_CERT_FILE $ALL_PROXY" >> "$ASKED"'
UV_FAILS = """echo "Resolved 3 packages in 1ms"
echo "error: Failed to fetch a"
echo "  cause: invalid peer certificate"
echo "hint: read the manual"
exit 1
"""
PIP = """case "$1" in
config) printf "%b" "$LISTED" ;;
*) echo "pip $*" >> "$ASKED"; echo "Collecting a"; echo "Successfully installed a" ;;
esac
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    script(tmp_path / "pip", PIP)
    monkeypatch.setattr(module, "PIP", (str(tmp_path / "pip"),))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    for name in ("SSL_CERT_FILE", "ALL_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_uv_gets_the_sources_of_pip(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of install precede those for all commands, and variables precede both."""
    script(tmp_path / "uv", UV_DOES)
    listed = (
        "global.index-url='https://a.test/simple'",
        "install.index-url='https://b.test/simple'",
        "global.extra-index-url='file:///c https://d.test'",
        "global.find-links='/nowhere'",
        ":env:.find-links='/wheels\\n/more'",
        ":env:.cert='/own.pem'",
        "global.proxy='http://proxy.test:3128'",
        "freeze.timeout='10'",
    )
    monkeypatch.setenv("LISTED", "".join(f"{line}\\n" for line in listed).replace("\\n/", "\\\\n/"))
    assert install.main(["--no-deps", "a==1"]) == 0
    asked, variables = (tmp_path / "asked").read_text().splitlines()
    assert asked == (
        f"pip install --python {sys.executable} --index-strategy unsafe-best-match "
        "--index-url https://b.test/simple --extra-index-url file:///c --extra-index-url "
        "https://d.test --find-links /wheels --find-links /more --no-deps a==1"
    )
    assert variables == "/own.pem http://proxy.test:3128"
    monkeypatch.setenv("SSL_CERT_FILE", "/uv.pem")  # uv's own precede
    assert install.main(["--index-url", "https://torch.test", "torch"]) == 0
    asked, variables = (tmp_path / "asked").read_text().splitlines()
    assert "b.test" not in asked and asked.endswith("--index-url https://torch.test torch")
    assert variables.startswith("/uv.pem ")


@pytest.mark.parametrize(
    ("uv", "reason"),
    [
        (UV_FAILS, "uv failed (cause: invalid peer certificate)"),
        ("exit 3", "uv failed (without a word)"),
        ("#!/no/such/shell", "uv cannot start ("),
        (None, "uv==0.13.9 cannot be had (no matching distribution)"),
    ],
)
def test_pip_is_the_way_back(
    uv: str | None,
    reason: str,
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line says why; byte code is left to the first import, as uv leaves it."""
    monkeypatch.setattr(install.sys, "executable", str(tmp_path / "python"))
    if uv:
        path = script(tmp_path / "uv", uv)
        if uv.startswith("#!"):
            path.write_text(f"{uv}\n")
    else:
        refusing = f'case "$*" in *{install.UV}*) echo {reason[26:-1]} >&2; exit 1;; esac'
        script(tmp_path / "pip", f"{refusing}\n{PIP}")
        monkeypatch.setattr(install.shutil, "which", lambda *_, **__: None)
    assert install.main(["a==1"]) == 0
    shown = capfd.readouterr().out.splitlines()
    (line,) = [line for line in shown if line.startswith("setup: ")]
    assert f"because {reason}" in line
    assert shown[-1] == "Successfully installed a" and "Collecting a" not in shown
    asked = (tmp_path / "asked").read_text()
    assert asked == "pip install --no-compile --progress-bar off a==1\n"


@pytest.mark.parametrize(
    ("listed", "by_uv"),
    [
        ("global.require-hashes='true'", False),
        ("install.only-binary=':all:'", False),
        (":env:.pre='1'", False),
        ("global.pre='false'", True),
        ("global.progress-bar='off'", True),
        ("wheel.pre='1'", True),  # of another command
    ],
)
def test_what_uv_is_not_told_pip_does(
    listed: str,
    by_uv: bool,
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script(tmp_path / "uv", UV_DOES)
    monkeypatch.setenv("LISTED", f"{listed}\\n")
    assert install.main(["a==1"]) == 0
    assert (tmp_path / "asked").read_text().startswith("pip install --python") == by_uv
    name = listed.partition("=")[0].rpartition(".")[2]
    assert (f"pip is configured to {name}" in capfd.readouterr().out) != by_uv


def test_an_empty_environment_gets_pip_and_uv(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pip of the Python that made it, and by ensurepip where that has none."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    script(python, 'echo "$*" >> "$ASKED"\n[ "$2" = ensurepip ] || exit $FAILS')
    monkeypatch.setattr(install, "find_spec", lambda _: None)
    monkeypatch.setattr(install, "PIP", ("python", "-m", "pip"))
    monkeypatch.setattr(install.sys, "executable", str(python))
    monkeypatch.setattr(install.sys, "_base_executable", str(python))
    for fails, others in (("0", []), ("1", ["-m ensurepip"])):
        monkeypatch.setenv("FAILS", fails)
        asked.write_text("")
        assert install.main([]) == 0
        first, *rest = asked.read_text().splitlines()
        assert f"-m pip --python {python} install" in first and rest == others
        assert all(tool in first for tool in install.TOOLS)
    monkeypatch.setattr(install, "find_spec", lambda _: True)
    asked.write_text("")
    assert install.main([]) == 0 and asked.read_text() == ""


def test_a_question_says_nothing(
    install: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path / "uv", UV_FAILS)
    script(tmp_path / "pip", "echo none; exit 1")
    assert install.main(["--dry-run", "torch==2"]) == 1
    assert capfd.readouterr().out == ""


def test_lines_that_say_the_same_for_every_package_are_left_out(install: ModuleType) -> None:
    lines = [
        "Resolved 157 packages in 2s",
        "Downloading torch (190.1MiB)",
        "Downloading six (11.1KiB)",
        "Downloading numba (3.6MiB)",
        "  Downloading vllm-0.32-cp38.whl (126.6 MB)",
        "  Downloading six-1.whl (11 kB)",
        " Downloaded torch",
        " + six==1",
        "Installed 157 packages in 1s",
    ]
    assert list(install.telling(lines)) == [lines[0], lines[1], lines[4], lines[8]]
