"""Dotted names in docstrings and comments: each is that of something that there is."""

import ast
import re
from collections.abc import Iterator

import pytest
from serving import ROOT

FOLDERS = ("attnres_serve", "kernels", "server", "benchmarks")
NAME = re.compile(r"``([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?``")
# Files, tensors, and an instruction of PTX.
OTHERS = (".py", ".md", ".json", ".cpp", ".toml", ".weight", "griddepcontrol.wait")
PACKAGES = ("numpy", "subprocess", "sys", "torch", "vllm")
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))  # which follows no links
}


def defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    """Full names of what the statements of a module or a class define."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{prefix}.{statement.name}"
            if isinstance(statement, ast.ClassDef):
                yield from defined(statement.body, f"{prefix}.{statement.name}")
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield f"{prefix}.{node.id}"
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield f"{prefix}.{alias.asname or alias.name}"


def ours() -> set[str]:
    """Every dotted name of the sources, from any of its parts on."""
    names = {*SOURCES}
    for module, path in SOURCES.items():
        names |= {*defined(ast.parse(path.read_text(encoding="utf-8")).body, module)}
    parts = [name.split(".") for name in names]
    return {".".join(name[first:]) for name in parts for first in range(len(name))}


OURS = ours()
MODULES = {module.rpartition(".")[2] for module in SOURCES} | {*FOLDERS}

TARGET = re.compile(r"[\w.]*:\w+(\.\w+)*")


def unresolved(source: str) -> list[str]:
    """The names in the docstrings and comments of a source that nothing has.

    A name that is not of the sources begins with a package, or with a word of the code itself.
    """
    words = set()
    for node in ast.walk(ast.parse(source)):
        parts = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
        words |= {part for part in parts if isinstance(part, str)}
        if isinstance(node, ast.Constant) and TARGET.fullmatch(str(node.value)):
            words |= {*re.split("[.:]", node.value)}  # what a patch replaces
    known = {*PACKAGES, *words - MODULES}
    return [
        name
        for name in NAME.findall(source)
        if not name.endswith(OTHERS)
        and name.removeprefix("attnres_serve.") not in OURS
        and name.partition(".")[0] not in known
    ]


def test_every_dotted_name_is_of_something() -> None:
    found = {
        module: unresolved(path.read_text(encoding="utf-8")) for module, path in SOURCES.items()
    }
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("planted", "missing"),
    [
        ('"""See ``server.supervisor``."""', ["server.supervisor"]),
        ("# as ``rules.requires`` and ``rules.require`` do", ["rules.requires"]),
        ("# of ``nobodys_module.merge``", ["nobodys_module.merge"]),
        ("# of ``Family.limit``, ``Family.limits``, ``torch.save`` and ``a.py``", ["Family.limit"]),
        (
            "def f(client):\n    # see ``client.shutdown``, ``host.clients``\n    pass",
            ["host.clients"],
        ),
    ],
)
def test_a_name_of_nothing_is_found(planted: str, missing: list[str]) -> None:
    assert unresolved(planted) == missing
