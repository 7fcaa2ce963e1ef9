"""Our source's uses of vLLM: names, calls, and replacements of vLLM's functions."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

PATH = re.compile(r"vllm(\.\w+)+(:\w+)?")
# Strings that look like modules but are none: groups of entry points, and our logger.
NO_MODULES = re.compile(r"vllm\.(\w+_plugins|attnres_serve)")
LACKS = {"AttributeError", "Exception", "ImportError", "ModuleNotFoundError"}


@dataclass(frozen=True)
class Use:
    """One place of our source.

    Attributes:
        place: file and line.
        paths: dotted paths, of which vLLM must have one; several if branches import one name.
        call: the call, if it is one.
        ours: our function that replaces it, if any.
        guard: a path that may be missing with all in it, because its import handles ImportError.
    """

    place: str
    paths: tuple[str, ...]
    call: ast.Call | None = None
    ours: ast.FunctionDef | None = None
    guard: str | None = None


@dataclass
class Source(ast.NodeVisitor):
    """A file of ours; ``names`` are its names of vLLM's modules, classes and functions.

    Uses that handle a missing name are left out: the body of a ``try`` that handles ImportError or
    AttributeError, and attributes in ``hasattr`` or ``getattr``.
    """

    name: str
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    guarded: set[str] = field(default_factory=set)
    uses: list[Use] = field(default_factory=list)

    def read(self, tree: ast.Module) -> list[Use]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._remember(node)
            elif isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) in ("hasattr", "getattr"):
                thing, attribute = node.args[:2]
                if isinstance(attribute, ast.Constant):
                    self.optional |= {f"{path}.{attribute.value}" for path in self.paths(thing)}
        self.visit(tree)
        return [
            replace(use, guard=self._guard(use))
            for use in self.uses
            if not self.optional.issuperset(use.paths)
        ]

    def _guard(self, use: Use) -> str | None:
        return next((g for g in self.guarded if f"{use.paths[0]}.".startswith(f"{g}.")), None)

    def _remember(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                path = alias.name
                # `import vllm.a` gives the name `vllm`.
                path = path if alias.asname else path.partition(".")[0]
            else:
                path = f"{node.module}.{alias.name}"
            if path.partition(".")[0] == "vllm" and not getattr(node, "level", 0):
                self.names[alias.asname or path.rpartition(".")[2]].append(path)

    def paths(self, node: ast.AST) -> tuple[str, ...]:
        """The paths of a name or a chain of attributes; empty if it is not vLLM's."""
        rest: list[str] = []
        while isinstance(node, ast.Attribute):
            rest.insert(0, node.attr)
            node = node.value
        begins = dict.fromkeys(self.names.get(_name(node), []))
        return tuple(".".join([begin, *rest]) for begin in begins)

    def _add(self, node: ast.AST, paths: tuple[str, ...], **more) -> None:
        if paths:
            self.uses.append(Use(f"{self.name}:{getattr(node, 'lineno', 0)}", paths, **more))

    def visit_Try(self, node: ast.Try) -> None:
        heard = {
            _name(kind)
            for handler in node.handlers
            for kind in getattr(handler.type, "elts", [handler.type])
        }
        if heard & LACKS:
            imports = [part for part in node.body if isinstance(part, ast.ImportFrom)]
            self.guarded |= {f"{i.module}.{alias.name}" for i in imports for alias in i.names}
        for part in (*([] if heard & LACKS else node.body), *node.handlers, *node.orelse):
            self.visit(part)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "vllm":
                self._add(node, (alias.name,))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            named = alias.asname or alias.name
            if f"{node.module}.{alias.name}" in self.names.get(named, ()):
                self._add(node, tuple(dict.fromkeys(self.names[named])))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._add(node, self.paths(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._add(node, self.paths(node.func), call=node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = node.value
        if (
            isinstance(value, ast.Call) and value.args
        ):  # a function made a property or a classmethod
            value = value.args[0]
        ours = self.functions.get(_name(value))
        for target in node.targets:
            if ours and isinstance(target, ast.Attribute):
                self._add(target, self.paths(target), ours=ours)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            for function in node.body:
                # Only our code makes instances of our classes.
                if isinstance(function, ast.FunctionDef) and function.name != "__init__":
                    # vLLM need not have it; if it does, ours replaces it.
                    paths = tuple(f"{path}.{function.name}" for path in self.paths(base))
                    self.guarded |= set(paths)
                    self._add(function, paths, ours=function)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "targets":  # of a patch: ``replaced`` knows for which versions
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if isinstance(text, str) and PATH.fullmatch(text) and not NO_MODULES.fullmatch(text):
            self._add(node, (text.replace(":", "."),))


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def uses(folder: Path) -> Iterator[Use]:
    """All uses of vLLM in the Python files under a folder."""
    for path in sorted(folder.rglob("*.py")):
        yield from Source(str(path)).read(ast.parse(path.read_text()))
