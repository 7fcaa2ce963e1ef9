"""pip install by uv: ``python requirements/install.py ARGUMENTS``, for the Python that runs it.

Without arguments it installs pip and uv in the environment.

uv takes a tenth of pip's time, but does not read pip's configuration: indexes, links, certificate
and the like are passed on.  If uv cannot do something, pip does it, and one line says why.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

# The newest version tried in the set-up; any version on PATH is used.
UV = "uv==0.13.9"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
TOOLS = ("pip==26.3", UV)
# uv's names of pip's options.
EACH = {"extra-index-url": "--extra-index-url", "find-links": "--find-links"}
EACH |= {"trusted-host": "--allow-insecure-host", "constraint": "--constraint"}
VARIABLES = {"proxy": "ALL_PROXY", "cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT"}
VARIABLES |= {"timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"}
SOURCES = {"index-url", "no-index", *EACH, *VARIABLES}
# Options without effect on what is installed.
HARMLESS = {"break-system-packages", "cache-dir", "disable-pip-version-check", "exists-action"}
HARMLESS |= {"log", "no-cache-dir", "no-color", "no-compile", "no-input", "progress-bar", "quiet"}
HARMLESS |= {"no-python-version-warning", "no-warn-conflicts", "no-warn-script-location"}
HARMLESS |= {"retries", "root-user-action", "use-feature", "verbose"}
LISTED = "SETUP_PIP_CONFIG"  # the output of `pip config list`
NO = ("", "0", "false", "no", "off")
# Repetitive lines of uv and pip, except downloads of 10 MB and more.
DULL = re.compile(
    r" [+~-] | Downloaded|  Using cached|Requirement already|Collecting|Processing"
    r"|WARNING: Location|\s*Downloading (?!.*\(\d\d+(\.\d+)? ?Mi?B\))"
)


def main(arguments: list[str]) -> int:
    """Install, and return the exit status."""
    if not arguments:
        return 0 if has_pip() else equip()
    listed = os.environ.get(LISTED)  # set by callers that call this often: pip takes a second
    settings = configuration(run(*PIP, "config", "list").stdout if listed is None else listed)
    reason = by_uv(arguments, settings)
    if reason is None:
        return 0
    quiet = "--dry-run" in arguments  # only the status matters
    if not quiet:
        print(f"setup: pip installs, which takes minutes, because {reason}", flush=True)
    command = [*PIP, "install", "--no-compile", "--progress-bar", "off", *arguments]
    return shown(command, os.environ, quiet)[0]


def has_pip() -> bool:
    return find_spec("pip") is not None


def equip() -> int:
    """Install pip and uv, by the pip of the Python that made the environment.

    The fallback is ensurepip, which is slower and installs only pip.
    """
    base = str(getattr(sys, "_base_executable", sys.executable))
    command = (base, *PIP[1:], "--python", sys.executable, "install", "--quiet", "--no-compile")
    if run(*command, *TOOLS).returncode == 0:
        return 0
    return run(sys.executable, "-m", "ensurepip").returncode


def by_uv(arguments: list[str], settings: Mapping[str, str]) -> str | None:
    """Install by uv.

    Returns:
        None, or the reason for a failure.
    """
    for name, value in settings.items():
        if name not in SOURCES | HARMLESS and value.lower() not in NO:
            return f"pip is configured to {name} ({value}), which uv is not"
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        done = run(*PIP, "install", "--quiet", "--no-compile", UV)
        if done.returncode:
            return f"{UV} cannot be had ({last_line(done.stderr)})"
        uv = str(Path(sys.executable).with_name("uv"))
    chosen = "--index-url" in arguments
    command = [
        uv,
        "pip",
        "install",
        "--python",
        sys.executable,
        *sources(settings, chosen),
        *arguments,
    ]
    try:
        status, last = shown(command, environment(settings), quiet="--dry-run" in arguments)
    except OSError as error:
        return f"uv cannot start ({error})"
    return f"uv failed ({last})" if status else None


def configuration(listed: str) -> dict[str, str]:
    """pip's settings by name, from the output of ``pip config list``.

    Settings for ``install`` override those for all commands, and variables override both.
    """
    settings: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        part, _, name = key.rpartition(".")
        if part in settings:
            settings[part][name] = str(ast.literal_eval(value))
    return settings["global"] | settings["install"] | settings[":env:"]


def sources(settings: Mapping[str, str], chosen: bool) -> Iterator[str]:
    """Options of uv for the same sources.

    Args:
        settings: pip's, by their names.
        chosen: whether the command states an index.
    """
    # pip takes a version from any source.
    yield from ("--index-strategy", "unsafe-best-match")
    if not chosen and "index-url" in settings:
        yield from ("--index-url", settings["index-url"])
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        yield "--no-index"
    for name, option in EACH.items():
        for value in settings.get(name, "").split():
            yield from (option, value)


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """uv's variables for pip's settings; variables that are already set have precedence."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    variables = {"SSL_CERT_FILE": bundle} if bundle else {}
    variables |= {VARIABLES[name]: value for name, value in settings.items() if name in VARIABLES}
    return variables | os.environ


def shown(command: list[str], env: Mapping[str, str], quiet: bool = False) -> tuple[int, str]:
    """Run a command and show its output, without a line for each package.

    Returns:
        Its exit status, and its last line.
    """
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = []
    with subprocess.Popen(command, env=env, **piped) as child:  # type: ignore[call-overload]
        for line in telling(child.stdout):
            lines.append(line)
            if not quiet:
                print(line[:200], flush=True)
    return child.returncode, last_line("\n".join(lines))


def telling(lines: Iterable[str]) -> Iterator[str]:
    """The lines that are not repetitive."""
    for line in map(str.rstrip, lines):
        if line and not DULL.match(line):
            yield line


def last_line(text: str) -> str:
    """The last line, or uv's error, which comes before its hints."""
    lines = text.strip().splitlines() or ["without a word"]
    causes = [line.strip() for line in lines if line.lstrip().startswith(("error:", "cause:"))]
    return (causes or lines)[-1].strip()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
