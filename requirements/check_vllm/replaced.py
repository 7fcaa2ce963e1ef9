"""What our patches replace, looked for in a release of vLLM: is it there, and is it as it was?

A function may change and keep its name: ``sources.json`` has a hash of each as it was in the tested
versions, without comments, layout and docstring.
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
    """What the patches for a version ask of vLLM, with what takes its place."""
    for file, patch, name in due(version):
        made = getattr(patch.make, "__name__", "")
        yield Use(f"{root / file}:0", (name,), own=_returned(root / file, made))


def _returned(file: Path, maker: str) -> ast.FunctionDef | None:
    """The function that another one of a file makes and returns."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == maker:
            inner = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
            last = node.body[-1]
            value = last.value if isinstance(last, ast.Return) else None
            if isinstance(value, ast.Call) and value.args:  # made a property or a classmethod
                value = value.args[0]
            return inner.get(value.id) if isinstance(value, ast.Name) else None
    return None


def rows(version: str, release: Release) -> Iterator[str]:
    """A line for each target: its file, its name, and what became of it since the newest tested."""
    known = json.loads(HASHES.read_text())
    newest = versions.dotted(versions.NEWEST)
    for file, _, name in due(version):
        before = known.get(name, {})
        now = digest(name, release)
        if now == "gone":
            said = "gone"
        elif now is None or newest not in before:
            said = "there"
        elif now == before[newest]:
            said = f"as in {newest}"
        else:
            said = f"changed since {newest}: read it again"
        yield f"{Path(file).name:28} {name}: {said}"


def digest(name: str, release: Release) -> str | None:
    """The hash of a function's source; "gone" without one, None where it cannot be read."""
    try:
        found = release.find(name)
    except Lack:
        return "gone"
    if not isinstance(found, griffe.Function):
        return None
    lines = found.filepath.read_text().splitlines()[found.lineno - 1 : found.endlineno]
    tree = ast.parse(textwrap.dedent("\n".join(lines)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    if ast.get_docstring(tree.body[0]) is not None:  # type: ignore[arg-type]
        body[0] = ast.Pass()
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def remember(version: str, release: Release) -> None:
    """Write the hashes of a version that was tested."""
    known = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    for _, _, name in due(version):
        now = digest(name, release)
        if now not in (None, "gone"):
            known.setdefault(name, {})[versions.dotted(versions.minor(version))] = now
    text = json.dumps({name: dict(sorted(known[name].items())) for name in sorted(known)}, indent=1)
    HASHES.write_text(text + "\n")
