"""Checks that a vLLM release has the functions that our patches replace, unchanged.

A function may change and keep its name: ``sources.json`` has hashes of each in the tested versions,
without comments, layout and docstring.
"""

import ast
import hashlib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe
from release import Lack, Release
from uses import Use

from attnres_serve.compat import patches, versions
from attnres_serve.compat.patch import Patch

HASHES = Path(__file__).with_name("sources.json")


def due(version: str) -> Iterator[tuple[str, Patch, str]]:
    """Each target in vLLM of the patches for a version: the patch's file, the patch, the name."""
    minor = versions.minor(version)
    for module, each in patches.table().items():
        file = module.replace(".", "/") + ".py"
        for patch in each:
            within = patch.first <= minor and (patch.last is None or minor <= patch.last)
            if patch.library == "vllm" and not patch.of and within:
                yield from ((file, patch, target.replace(":", ".")) for target in patch.targets)


def targets(version: str, root: Path) -> Iterator[Use]:
    """The targets of the patches for a version, with their replacements."""
    for file, patch, name in due(version):
        made = getattr(patch.make, "__name__", "")
        yield Use(f"{root / file}:0", (name,), ours=_returned(root / file, made))


def _returned(file: Path, maker: str) -> ast.FunctionDef | None:
    """The function that a maker in a file returns."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == maker:
            inner = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
            last = node.body[-1]
            value = last.value if isinstance(last, ast.Return) else None
            if isinstance(value, ast.Call) and value.args:  # a property or a classmethod
                value = value.args[0]
            return inner.get(value.id) if isinstance(value, ast.Name) else None
    return None


def rows(version: str, release: Release) -> Iterator[str]:
    """A line for each target: file, name, and change since the newest tested version."""
    known = json.loads(HASHES.read_text())
    newest = versions.dotted(versions.NEWEST)
    for file, _, name in due(version):
        before = known.get(name, {})
        now = digest(name, release)
        if now == "gone":
            state = "gone"
        elif now is None or newest not in before:
            state = "there"
        elif now == before[newest]:
            state = f"as in {newest}"
        else:
            state = f"changed since {newest}: read it again"
        yield f"{Path(file).name:28} {name}: {state}"


def digest(name: str, release: Release) -> str | None:
    """The hash of a function's source; "gone" without one, None if it cannot be read."""
    try:
        function = release.find(name)
    except Lack:
        return "gone"
    if not isinstance(function, griffe.Function):
        return None
    lines = function.filepath.read_text().splitlines()[function.lineno - 1 : function.endlineno]
    tree = ast.parse(textwrap.dedent("\n".join(lines)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    if ast.get_docstring(tree.body[0]) is not None:  # type: ignore[arg-type]
        body[0] = ast.Pass()
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def remember(version: str, release: Release) -> None:
    """Write the hashes of a tested version."""
    known = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    for _, _, name in due(version):
        now = digest(name, release)
        if now not in (None, "gone"):
            known.setdefault(name, {})[versions.dotted(versions.minor(version))] = now
    text = json.dumps({name: dict(sorted(known[name].items())) for name in sorted(known)}, indent=1)
    HASHES.write_text(text + "\n")
