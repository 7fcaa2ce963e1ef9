"""``python requirements/check_vllm VERSION``: does that vLLM have what our source asks of it?

Fetches its wheel and reads it: every name that is imported, every call that is
made of such a name, every function that takes the place of one of vLLM's, and whether that is as it
was.  Of its code only what makes its parser of flags is run: what objects are made of while vLLM
runs is left to the tests.
"""

import argparse
import ast
import inspect
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import griffe
import parsed
import replaced
from release import Lack, Release, download
from uses import Use, uses

from attnres_serve.compat.flags import table

ROOT = Path(__file__).parents[2]
# attnres_serve/kernels and attnres_serve/server are links to these.
FOLDERS = ("attnres_serve", "kernels", "server", "benchmarks")


def problem(use: Use, release: Release) -> str | None:
    """What is wrong with a use, without its place; None where nothing is."""
    found, lacks = [], []
    for path in use.paths:
        try:
            found.append((path, release.find(path)))
        except Lack as lack:
            lacks.append(str(lack))
    if not found:
        return None if use.guard and not _has(release, use.guard) else "; ".join(lacks)
    told = [_misfit(path, thing, use, release) for path, thing in found if thing is not None]
    return "; ".join(filter(None, told)) or None


def _has(release: Release, path: str) -> bool:
    try:
        release.find(path)
    except Lack:
        return False
    return True


def _misfit(path: str, thing: griffe.Object, use: Use, release: Release) -> str | None:
    signature = release.signature(thing)
    if signature is None:
        return None
    if use.call is not None:
        return _call_misfit(path, signature, use.call)
    if use.own is not None and thing.is_function:
        return _place_misfit(path, signature, use.own)
    return None


def _call_misfit(path: str, signature: inspect.Signature, call: ast.Call) -> str | None:
    open_ended = any(isinstance(a, ast.Starred) for a in call.args)
    open_ended |= any(keyword.arg is None for keyword in call.keywords)
    positional = [None] * sum(not isinstance(a, ast.Starred) for a in call.args)
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        (signature.bind_partial if open_ended else signature.bind)(*positional, **named)
    except TypeError as error:
        return f"{path}{signature} is called otherwise: {error}"
    return None


def _place_misfit(path: str, signature: inspect.Signature, own: ast.FunctionDef) -> str | None:
    """An argument that may be left out may be one that our models are never given."""
    arguments = own.args
    ours = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    asked = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    missing = [name for name in asked if name not in ours]
    if missing and not arguments.vararg and not arguments.kwarg:  # which hand on what there is
        return f"{path}{signature} is replaced by a function without {', '.join(missing)}"
    return None


def problems(release: Release, found: Iterable[Use]) -> list[str]:
    """Of every use that the release does not bear: its place and a sentence."""
    told = ((use.place, problem(use, release)) for use in found)
    return [f"{place}: {text}" for place, text in dict.fromkeys(told) if text]


def main() -> int:
    """Print what is missing; 1 if something is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="of vLLM, as 0.33.0")
    parser.add_argument(
        "--tested", action="store_true", help="remember its flags, and what is replaced as it is"
    )
    given = parser.parse_args()
    version = given.version
    found = [use for name in FOLDERS for use in uses(ROOT / name)]
    found += replaced.targets(version, ROOT)
    with tempfile.TemporaryDirectory() as folder:
        release = Release(download(version, Path(folder)))
        flags = parsed.read(release.folder)
        if given.tested:
            replaced.remember(version, release)
            if flags is not None:
                table.remember(version, flags)
        told = problems(release, found)
        for line in (*replaced.rows(version, release), *parsed.rows(version, flags)):
            print(line)
    for line in told:
        print(line.removeprefix(f"{ROOT}/"))
    paths = {path for use in found for path in use.paths}
    print(f"vLLM {version}: {len(paths)} names asked for, {len(told)} places do not fit.")
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
