"""pip install, by uv: ``python requirements/install.py WORDS``, in the environment of that Python.

Without words it gives the environment pip and uv.

uv takes a tenth of pip's time, and does not read pip's configuration: indexes, links, certificate
and the like are handed on.  Whatever uv cannot do, pip does, and one line says why.
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

# The newest that the set-up was tried with; one on PATH is taken as it is.
UV = "uv==0.13.9"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
TOOLS = ("pip==26.3", UV)
# pip's options, and what uv calls them.
EACH = {"extra-index-url": "--extra-index-url", "find-links": "--find-links"}
EACH |= {"trusted-host": "--allow-insecure-host", "constraint": "--constraint"}
VARIABLES = {"proxy": "ALL_PROXY", "cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT"}
VARIABLES |= {"timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"}
SOURCES = {"index-url", "no-index", *EACH, *VARIABLES}
# Those that change nothing of what is installed.
HARMLESS = {"break-system-packages", "cache-dir", "disable-pip-version-check", "exists-action"}
HARMLESS |= {"log", "no-cache-dir", "no-color", "no-compile", "no-input", "progress-bar", "quiet"}
HARMLESS |= {"no-python-version-warning", "no-warn-conflicts", "no-warn-script-location"}
HARMLESS |= {"retries", "root-user-action", "use-feature", "verbose"}
LISTED = "SETUP_PIP_CONFIG"  # what `pip config list` prints
NO = ("", "0", "false", "no", "off")
# Lines of the two that say the same for every package, but for downloads of 10 MB and more.
DULL = re.compile(
    r" [+~-] | Downloaded|  Using cached|Requirement already|Collecting|Processing"
    r"|WARNING: Location|\s*Downloading (?!.*\(\d\d+(\.\d+)? ?Mi?B\))"
)


def main(words: list[str]) -> int:
    """Install, and return the exit status."""
    if not words:
        return 0 if has_pip() else equip()
    listed = os.environ.get(LISTED)  # by whoever calls this several times: pip takes a second
    settings = configuration(run(*PIP, "config", "list").stdout if listed is None else listed)
    reason = by_uv(words, settings)
    if reason is None:
        return 0
    quiet = "--dry-run" in words  # a question, whose answer is the status
    if not quiet:
        print(f"setup: pip installs, which takes minutes, because {reason}", flush=True)
    command = [*PIP, "install", "--no-compile", "--progress-bar", "off", *words]
    return shown(command, os.environ, quiet)[0]


def has_pip() -> bool:
    return find_spec("pip") is not None


def equip() -> int:
    """Install pip and uv, by the pip of the Python that made the environment.

    ensurepip is the way back, which takes longer for pip alone.
    """
    base = str(getattr(sys, "_base_executable", sys.executable))
    own = (base, *PIP[1:], "--python", sys.executable, "install", "--quiet", "--no-compile")
    if run(*own, *TOOLS).returncode == 0:
        return 0
    return run(sys.executable, "-m", "ensurepip").returncode


def by_uv(words: list[str], settings: Mapping[str, str]) -> str | None:
    """Install by uv.

    Returns:
        None, or why it did not.
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
    chosen = "--index-url" in words
    command = [uv, "pip", "install", "--python", sys.executable, *sources(settings, chosen), *words]
    try:
        status, said = shown(command, environment(settings), quiet="--dry-run" in words)
    except OSError as error:
        return f"uv cannot start ({error})"
    return f"uv failed ({said})" if status else None


def configuration(listed: str) -> dict[str, str]:
    """pip's settings by their names, of its files and variables, as ``pip config list`` has them.

    Those of ``install`` precede those for all commands, and variables precede both.
    """
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        part, _, name = key.rpartition(".")
        if part in found:
            found[part][name] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def sources(settings: Mapping[str, str], chosen: bool) -> Iterator[str]:
    """Options of uv for the same sources.

    Args:
        settings: pip's, by their names.
        chosen: whether the command names its index.
    """
    # pip takes a version from whichever source has it.
    yield from ("--index-strategy", "unsafe-best-match")
    if not chosen and "index-url" in settings:
        yield from ("--index-url", settings["index-url"])
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        yield "--no-index"
    for name, option in EACH.items():
        for value in settings.get(name, "").split():
            yield from (option, value)


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The variables of uv for pip's settings; its own have precedence."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    variables = {"SSL_CERT_FILE": bundle} if bundle else {}
    variables |= {VARIABLES[name]: value for name, value in settings.items() if name in VARIABLES}
    return variables | os.environ


def shown(command: list[str], env: Mapping[str, str], quiet: bool = False) -> tuple[int, str]:
    """Run a command and show what it says, less a line for each package.

    Returns:
        Its exit status, and the last line that it wrote.
    """
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said = []
    with subprocess.Popen(command, env=env, **piped) as child:  # type: ignore[call-overload]
        for line in telling(child.stdout):
            said.append(line)
            if not quiet:
                print(line[:200], flush=True)
    return child.returncode, last_line("\n".join(said))


def telling(lines: Iterable[str]) -> Iterator[str]:
    """The lines that say more than that a package is there."""
    for line in map(str.rstrip, lines):
        if line and not DULL.match(line):
            yield line


def last_line(text: str) -> str:
    """The last line, or the error of uv, which stands above its hints."""
    lines = text.strip().splitlines() or ["without a word"]
    causes = [line.strip() for line in lines if line.lstrip().startswith(("error:", "cause:"))]
    return (causes or lines)[-1].strip()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
