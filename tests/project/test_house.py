"""The floors of the house: no import runs up, none runs in a circle, and nothing stands outside."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from serving import ROOT

from attnres_serve.families import FAMILIES

PACKAGE = ROOT / "attnres_serve"
# From the ground up.  A room imports rooms of its own floor or of one below.
FLOORS = (
    ("cache_folder", "errors", "kernels", "logprobs", "sentences"),
    ("address", "depth", "settings", "mistakes", "texts"),
    ("families", "start"),
    ("formats", "compat", "lora", "output"),
    ("checkpoints",),
    ("model",),
    ("bench",),
    ("verify", "tracing", "plugin"),
    ("worker", "server", "lens", "weight_sender"),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
DOORS = ("__init__", "__main__")
LONGEST = 400  # lines of a file
# Rooms that import vLLM, and the one other file: the baseline of `bench` runs without the plugin.
ASKERS = ("compat.", "model.", "bench.engine")
# Files beside these rooms that read attributes of vLLM's configuration.
READERS = {
    "bench.engine",
    "plugin",
    "server.endpoints",
    "server.routes.edits",
    "server.routes.info",
    "server.routes.trace",
    "tracing.lens",
}


def files(package: Path = PACKAGE) -> Iterator[tuple[str, Path]]:
    """Every module of the package by its dotted name below it."""
    # rglob does not follow the links to kernels/ and server/
    for folder in (package, *(link.resolve() for link in package.iterdir() if link.is_symlink())):
        start = package if folder == package else folder.parent
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(start).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def nodes(path: Path) -> Iterator[ast.AST]:
    """All that the source of a file consists of."""
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """What a file imports, wherever it does: top-level packages, and what of each."""
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                package, _, below = f"{within}{name.name}".partition(".")
                yield package, below


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, by their names below the package."""
    return {below for package, below in imports(path) if package == "attnres_serve"}


def room(module: str) -> str:
    return module.partition(".")[0]


def running_up(modules: dict[str, set[str]]) -> list[str]:
    """The imports that run up, in words."""
    return [
        f"{module} imports {target}, which is {FLOOR[room(target)] - FLOOR[room(module)]} up"
        for module, targets in modules.items()
        for target in sorted(targets)
        if room(module) in FLOOR
        and room(target) in FLOOR
        and FLOOR[room(target)] > FLOOR[room(module)]
    ]


def circle(modules: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, from one of them back to it; none where there is none."""
    # A target is a module, or a name in one.
    graph = {
        module: {name if name in modules else parent(name) for name in targets} - {module}
        for module, targets in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def parent(module: str) -> str:
    return module.rpartition(".")[0]


MODULES = {module: imported(path) for module, path in files()}


def test_no_import_runs_up() -> None:
    assert running_up(MODULES) == []


def test_no_import_runs_in_a_circle() -> None:
    assert circle(MODULES) == []


@pytest.mark.parametrize(
    ("modules", "up", "around"),
    [
        ({"depth.a": {"model.b"}, "model.b": set()}, 1, 0),
        ({"model.b": {"depth.a.name"}, "depth.a": set()}, 0, 0),
        ({"model.a": {"model.b.name"}, "model.b": {"model.a"}}, 0, 3),
    ],
)
def test_both_are_found_where_they_are(modules: dict, up: int, around: int) -> None:
    assert (len(running_up(modules)), len(circle(modules))) == (up, around)


def test_every_room_has_its_floor() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__pycache__"} == {*FLOOR, *DOORS}


def test_those_who_ask_know_nothing_of_models() -> None:
    """They see a server's answers alone; one of them starts a server, and reads its flags."""
    apart = {"model", "compat", "checkpoints", "bench", "server", "worker"}
    found = {module: {*map(room, targets)} for module, targets in MODULES.items()}
    starter = "lens.temporary_server"
    if all("arguments" in target for target in MODULES[starter] if room(target) == "compat"):
        found[starter] -= {"compat"}
    asking = {module: rooms & apart for module, rooms in found.items() if room(module) == "lens"}
    assert len(asking) > 10 and {module: rooms for module, rooms in asking.items() if rooms} == {}


def test_vllm_is_imported_where_the_floors_say() -> None:
    found = {module for module, path in files() if "vllm" in {name for name, _ in imports(path)}}
    assert {module for module in found if not module.startswith(ASKERS)} == set()
    assert "bench.engine" in found


def test_vllms_configuration_is_read_where_the_floors_say() -> None:
    found = {
        module
        for module, path in files()
        if not module.startswith(("compat.", "model."))
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("model_config", "hf_config")
    }
    assert found == READERS


def test_files_stay_small() -> None:
    long = {module: len(path.read_text().splitlines()) for module, path in files()}
    assert {module: lines for module, lines in long.items() if lines > LONGEST} == {}


def texts(source: str) -> Iterator[str]:
    """The strings of a source, except those that stand by themselves, such as docstrings."""
    tree = ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def families_named(source: str) -> set[str]:
    """Families and modules of theirs that a source has in its strings, as identifiers."""
    modules = {family.module.split(".")[-1] for family in FAMILIES.values()}
    words = {word for text in texts(source) for word in re.findall(r"\w+", text)}
    return words & (modules | {*FAMILIES})


def test_what_asks_vllm_names_no_family() -> None:
    """A family's limits stand in its file."""
    found = {
        module: families_named(path.read_text(encoding="utf-8"))
        for module, path in files()
        if module.startswith(("compat.", "plugin"))
    }
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "planted",
    [
        'MODULES = ("lfm2_moe", "other")',
        'NAME = f"{MODELS}.deepseek_v2"',
        'def f():\n    "Of LFM2."\n    return vllm.models.get("kimi")',
    ],
)
def test_a_family_that_is_named_is_found(planted: str) -> None:
    assert len(families_named(planted)) == 1


@pytest.mark.parametrize(
    ("judge", "allowed"),
    [
        ("verify.oracle", ("verify.oracle",)),
        ("verify.rewritten", ("verify.oracle", "verify.rewritten")),
    ],
)
def test_a_judge_imports_nothing_else_of_ours(judge: str, allowed: tuple[str, ...]) -> None:
    files = {module: found for module, found in MODULES.items() if module.startswith(judge)}
    assert len(files) > 5
    for found in files.values():
        assert all(target.startswith(allowed) for target in found)
