"""Options of pytest for the families that a change can break; says on stderr which rule chose them.

A change is what the last commit and the working tree have and the base has not: the last commit
that HEAD shares with the main branch, or the parent of HEAD where HEAD is on it.  One family of
each kind is always chosen.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from kinds import KINDS  # noqa: E402

MAIN = ("origin/main", "main")
FACTS = "tests/support/facts"
OF_ONE = ("attnres_serve/families", FACTS)  # folders with a file for each family
# What every family runs through, and the tests of families themselves.
OF_ALL = (
    *("attnres_serve/model", "attnres_serve/compat", "attnres_serve/checkpoints"),
    *("attnres_serve/depth", "attnres_serve/lora", "attnres_serve/verify/rewritten"),
    *("kernels", "requirements"),
    *("tests/family_goldens", "tests/support/checkpoints", "tests/support/jobs"),
    *OF_ONE,
)


def main() -> None:
    base = parent(ROOT)
    if base is None:
        chosen, why = None, "git knows no commit before this one"
    else:
        chosen, why = families(changed(ROOT, base), names(ROOT))
    said = "all families" if chosen is None else f"{len(chosen)} families, {', '.join(chosen)}"
    print(f"{said}: {why}.", file=sys.stderr)
    if chosen is not None:
        print(f"-k '{expression(chosen, names(ROOT))}'")


def names(root: Path) -> set[str]:
    """The families, which are the files of facts but for what those share."""
    return {path.stem for path in (root / FACTS).glob("*.py")} - {"__init__", "family", "shared"}


def families(paths: Iterable[str], known: Iterable[str]) -> tuple[list[str] | None, str]:
    """The families that changed files touch, None for all of them; and the rule that says so.

    Args:
        paths: of the files, below the root of the repository.
        known: all families.
    """
    own = []
    for path in map(Path, sorted(paths)):
        if str(path.parent) in OF_ONE and path.stem in known:
            own.append(path.stem)
        elif any(path.is_relative_to(shared) for shared in OF_ALL):
            return None, f"{path} is shared by all of them"
    chosen = sorted({*KINDS, *own})
    if own:
        return chosen, f"one of each kind, and the files of {', '.join(sorted({*own}))} changed"
    return chosen, "one of each kind, as nothing changed that a family has"


def expression(chosen: Iterable[str], known: Iterable[str]) -> str:
    """What selects the tests of families; pytest would take a name within another for it."""
    words = []
    for name in chosen:
        others = sorted(other for other in known if name in other and other not in chosen)
        words.append(" and not ".join([name, *others]))
    return " or ".join(words)


def parent(root: Path) -> str | None:
    """The commit that a change is judged against; None without one, as in a shallow clone."""
    head = git(root, "rev-parse", "HEAD")
    for main in MAIN:
        base = git(root, "merge-base", "HEAD", main)
        if base and base != head:
            return base
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD^")


def changed(root: Path, base: str) -> list[str]:
    """The files that differ from a commit, both names of one that was moved, and new ones."""
    listed = git(root, "diff", "--name-only", "--no-renames", base) or ""
    new = git(root, "ls-files", "--others", "--exclude-standard") or ""
    return [*listed.splitlines(), *new.splitlines()]


def git(root: Path, *words: str) -> str | None:
    """What git prints; None where it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
