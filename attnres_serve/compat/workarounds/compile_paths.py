"""Paths with blanks, quotes and the like in inductor's commands that compile C++.

torch 2.13 joins the arguments of a command and splits them again like a shell, but quotes only
paths of headers.  It probes vector instructions with a library whose path it puts into a Python
string; if that fails, it silently compiles without vector instructions.
"""

import json
from dataclasses import replace
from shlex import quote
from typing import Any

from attnres_serve.compat.patch import Patch


def _quoting(make: Any) -> Any:
    """Quote paths in the folders for caches and temporary files, and in torch's."""

    def __init__(self, name, sources, BuildOption, output_dir="") -> None:
        sources = [sources] if isinstance(sources, str) else sources
        make(self, name, [quote(source) for source in sources], BuildOption, output_dir)
        target = self._target_file
        self._output = self._output.removesuffix(target) + quote(target)
        header = getattr(BuildOption, "precompiled_header", None)
        first = [f"-include {quote(header)}"] if header else []
        folders = [f"-I{quote(folder)}" for folder in BuildOption.get_include_dirs()]
        self._include_dirs_args = _joined([*first, *folders])
        folders = [f"-L{quote(folder)}" for folder in BuildOption.get_libraries_dirs()]
        self._libraries_dirs_args = _joined(folders)

    return __init__


def _joined(arguments: list[str]) -> str:
    return "".join(f"{word} " for word in arguments)


def _escaping(probe: Any) -> Any:
    """Escape the path for a Python string."""

    def _probe_load(self, output_path: str) -> bool:
        return probe(self, json.dumps(output_path, ensure_ascii=False)[1:-1])

    return _probe_load


COMMANDS = Patch(
    targets=("torch._inductor.cpp_builder:CppBuilder.__init__",),
    make=_quoting,
    why="paths with blanks or quotes were split",
    models="compiled AttnRes models",
    first=(2, 13),
)
PROBE = replace(
    COMMANDS, targets=("torch._inductor.cpu_vec_isa:VecISA._probe_load",), make=_escaping
)
PATCHES = COMMANDS, PROBE
