"""Commands by which inductor compiles C++, in folders with any letters in their names."""

import ctypes
import shlex
from pathlib import Path

import pytest
from torch._inductor import cpp_builder
from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder
from torch._inductor.cpu_vec_isa import VecISA

from attnres_serve.compat.workarounds import compile_paths

NAMES = [
    "with blank",
    "qu'ote",
    'a "quoted" one',
    "back\\slash",
    "$HOME (x) & y;z",
    "\u00fcn\u00ef",
    "a\tb",
]
SPLIT = ["with blank", "qu'ote", 'a "quoted" one', "back\\slash", "a\tb"]  # by torch alone


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes paths for the time of a test."""
    monkeypatch.setattr(CppBuilder, "__init__", CppBuilder.__init__)
    monkeypatch.setattr(VecISA, "_probe_load", VecISA._probe_load)
    for patch in compile_paths.PATCHES:
        patch.apply()


def built(folder: Path) -> int:
    """What a library answers that inductor's builder compiles in a folder, with a header there."""
    folder.mkdir(exist_ok=True)
    (folder / "h.h").write_text("#define ANSWER 42\n")
    (folder / "a.cpp").write_text('extern "C" int answer() { return ANSWER; }\n')
    option = BuildOptionsBase(
        compiler="g++",
        include_dirs=[str(folder)],
        libraries_dirs=[str(folder)],
        cflags=["shared", "fPIC"],
    )
    option.precompiled_header = str(folder / "h.h")
    builder = CppBuilder("a", str(folder / "a.cpp"), option, str(folder))
    builder.build()
    return ctypes.CDLL(builder.get_target_file_path()).answer()


@pytest.mark.parametrize("name", SPLIT)
def test_torch_splits_paths(name, tmp_path, monkeypatch) -> None:
    """The fault itself; with a torch that quotes them the workaround can go."""
    assert not hasattr(CppBuilder.__init__, "quotes_paths")
    with pytest.raises(Exception, match=r"C\+\+ compile error|No closing quotation"):
        built(tmp_path / name)


@pytest.mark.parametrize("name", [*NAMES, "plain"])
def test_every_word_of_a_command_is_whole(mended, name) -> None:
    option = BuildOptionsBase(
        compiler="g++", include_dirs=[f"/{name}/i"], libraries_dirs=[f"/{name}/l"]
    )
    option.precompiled_header = f"/{name}/h"
    sources = [f"/{name}/1.o", f"/{name}/2.o"]
    builder = CppBuilder("t", sources, option, f"/{name}")
    words = shlex.split(builder.get_command_line())
    target = builder.get_target_file_path()
    expected = [*sources, f"/{name}/h", f"-I/{name}/i", f"-L/{name}/l", target]
    assert {*expected} <= {*words} and target.startswith(f"/{name}/t")


@pytest.mark.parametrize("name", NAMES)
def test_a_library_is_probed_where_it_is(mended, name, tmp_path) -> None:
    """And compiled; where it is not found, torch compiles for no vectors and says nothing."""
    assert built(tmp_path / name) == 42
    (library,) = (tmp_path / name).glob("a*.so")
    assert VecISA()._probe_load(str(library))
    assert not VecISA()._probe_load(str(library) + "x")


def test_commands_without_such_letters_are_as_they_were(request) -> None:
    """Their text is in the keys of what is compiled."""
    option = cpp_builder.CppTorchOptions()
    before = CppBuilder("o", "i", option).get_command_line()
    request.getfixturevalue("mended")
    once = CppBuilder.__init__
    for patch in compile_paths.PATCHES:
        patch.apply()
    assert CppBuilder.__init__ is once
    assert CppBuilder("o", "i", option).get_command_line() == before
