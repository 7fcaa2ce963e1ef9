"""``python requirements/release.py DIST``: an sdist of the files that git knows, and its wheel.

Only files that git knows are included, and the wheel is built from the sdist, so both contain the
same.  The build backend is the setuptools of this environment; nothing is fetched.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def tracked() -> list[str]:
    """Paths of existing files and symlinks that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


def build(dist: Path) -> tuple[Path, Path]:
    """Write the sdist and the wheel into an empty folder; returns both paths."""
    dist.mkdir(parents=True, exist_ok=True)
    if files := sorted(path.name for path in dist.iterdir()):
        raise SystemExit(f"release: {dist} is not empty ({files[0]}); remove it first.")
    commit_time = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    # Fixed times in the archives: the same commit gives the same wheel.
    env = os.environ | {"SOURCE_DATE_EPOCH": commit_time, "PYTHONPATH": ""}
    with tempfile.TemporaryDirectory() as folder:
        for name in tracked():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        script = [sys.executable, "-c", BUILD_SDIST, str(dist.resolve())]
        subprocess.run(script, cwd=folder, env=env, check=True, stdout=sys.stderr)
    (sdist,) = dist.glob("*.tar.gz")
    # No cache: pip would reuse a wheel of an older sdist with the same name.
    pip = [sys.executable, "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--no-index"]
    command = [*pip, "--no-build-isolation", "-w", str(dist), str(sdist)]
    subprocess.run(command, env=env, check=True, stdout=sys.stderr)
    (wheel,) = dist.glob("*.whl")
    return sdist, wheel


if __name__ == "__main__":
    for path in build(Path(sys.argv[1])):
        print(path)
