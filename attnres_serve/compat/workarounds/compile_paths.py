"""Paths with blanks, quotes and the like in the commands by which inductor compiles C++.

torch 2.13 joins the words of a command and splits them again as a shell would, and quotes no paths
but those of headers.  It probes vector instructions by a library whose path it puts into a string
of Python; without it, it would compile for none, and say nothing.  This file imports nothing of
ours, so that ``bench.engine`` can run it for stock vLLM.
"""

import json
from shlex import quote
from typing import Any


def quote_paths() -> None:
    """Quote the paths of a folder for caches or temporary files, and of torch's (idempotent)."""
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.cpu_vec_isa import VecISA

    builder: Any = CppBuilder
    if getattr(builder.__init__, "quotes_paths", False):
        return
    make = builder.__init__

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

    __init__.quotes_paths = True  # type: ignore[attr-defined]
    builder.__init__ = __init__
    _quote_in_probe(VecISA)


def _joined(words: list[str]) -> str:
    return "".join(f"{word} " for word in words)


def _quote_in_probe(isa: Any) -> None:
    """Escape the path that is put between the quotes of a string of Python."""
    if (probe := getattr(isa, "_probe_load", None)) is None:  # an older torch
        return

    def _probe_load(self, output_path: str) -> bool:
        return probe(self, json.dumps(output_path, ensure_ascii=False)[1:-1])

    isa._probe_load = _probe_load
