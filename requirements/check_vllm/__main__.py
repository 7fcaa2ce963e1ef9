"""``python requirements/check_vllm VERSION``: does that vLLM have all that our source uses?

Fetches its wheel and checks every imported name, every call of such a name, and every function that
we replace, with its hash.  Of its code only the parser of flags is run.  Tests cover objects that
vLLM makes at run time.
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
    """The problem of a use, without its place; None without one."""
    things, lacks = [], []
    for path in use.paths:
        try:
            things.append((path, release.find(path)))
        except Lack as lack:
            lacks.append(str(lack))
    if not things:
        return None if use.guard and not _has(release, use.guard) else "; ".join(lacks)
    misfits = [_misfit(path, thing, use, release) for path, thing in things if thing is not None]
    return "; ".join(filter(None, misfits)) or None


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
    if use.ours is not None and thing.is_function:
        return _place_misfit(path, signature, use.ours)
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


def _place_misfit(path: str, signature: inspect.Signature, ours: ast.FunctionDef) -> str | None:
    """A replaced function needs only vLLM's required parameters."""
    arguments = ours.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    required = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    missing = [name for name in required if name not in names]
    if missing and not arguments.vararg and not arguments.kwarg:  # these pass on all arguments
        return f"{path}{signature} is replaced by a function without {', '.join(missing)}"
    return None


def problems(release: Release, used: Iterable[Use]) -> list[str]:
    """The place and a sentence for every use that does not fit the release."""
    sentences = ((use.place, problem(use, release)) for use in used)
    return [f"{place}: {text}" for place, text in dict.fromkeys(sentences) if text]


def main() -> int:
    """Print problems; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="of vLLM, as 0.33.0")
    parser.add_argument(
        "--tested", action="store_true", help="remember its flags, and what is replaced as it is"
    )
    options = parser.parse_args()
    version = options.version
    used = [use for name in FOLDERS for use in uses(ROOT / name)]
    used += replaced.targets(version, ROOT)
    with tempfile.TemporaryDirectory() as folder:
        release = Release(download(version, Path(folder)))
        flags = parsed.read(release.folder)
        if options.tested:
            replaced.remember(version, release)
            if flags is not None:
                table.remember(version, flags)
        lines = problems(release, used)
        for line in (*replaced.rows(version, release), *parsed.rows(version, flags)):
            print(line)
    for line in lines:
        print(line.removeprefix(f"{ROOT}/"))
    paths = {path for use in used for path in use.paths}
    print(f"vLLM {version}: {len(paths)} names asked for, {len(lines)} places do not fit.")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
