"""``python requirements/sbom.py DIST``: a CycloneDX bill of materials beside a release's files.

The wheel requires nothing and holds nothing of others.  So the bill lists the environment in which
the tests and the CPU image run it, requirements/cpu.txt.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parents[1]


def bill(version: str) -> str:
    """The bill of materials of a release as JSON; the same for the same commit.

    Raises:
        ValueError: it does not follow CycloneDX's schema.
    """
    tool = [sys.executable, "-m", "cyclonedx_py", "requirements", "requirements/cpu.txt"]
    flags = ["--pyproject", "pyproject.toml", "--output-reproducible", "--spec-version", "1.6"]
    time = ["git", "log", "-1", "--format=%ct"]
    stamp = subprocess.run(time, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    env = os.environ | {"SOURCE_DATE_EPOCH": stamp.strip()}
    done = subprocess.run(
        [*tool, *flags], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    document = json.loads(done.stdout)
    # pyproject.toml takes it from the package, where the tool does not look.
    document["metadata"]["component"]["version"] = version
    text = json.dumps(document, indent=2) + "\n"
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"sbom: {error}")
    return text


if __name__ == "__main__":
    (wheel,) = Path(sys.argv[1]).glob("*.whl")
    name, version = wheel.name.split("-")[:2]
    path = wheel.with_name(f"{name}-{version}.cdx.json")
    path.write_text(bill(version))
    print(path)
