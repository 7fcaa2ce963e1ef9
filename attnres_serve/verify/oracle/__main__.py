"""``python -m attnres_serve.verify.oracle CHECKPOINT``: agreement with its expected.json."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from attnres_serve.verify.oracle.agreement import agreement
from attnres_serve.verify.oracle.read import load


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m attnres_serve.verify.oracle CHECKPOINT", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    model = load(folder)
    print(f"{folder.name}: {model.spec.layers} layers, block starts {model.spec.block_starts}")
    if not (folder / "expected.json").exists():
        print("no expected.json")
        return 0
    result = agreement(model, json.loads((folder / "expected.json").read_text()))
    print("  ".join(f"{key} {value:.3g}" for key, value in result.items()))
    return int(result["excess"] > 1 or result["tokens"] < result["of"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
