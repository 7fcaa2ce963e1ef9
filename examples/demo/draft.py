"""Write a draft of the demo for speculative decoding: its first two layers.

    python examples/demo/draft.py FOLDER

On Python's standard library they agree with the demo about every second greedy token, as its first
four layers do.
"""

import argparse
import json
from pathlib import Path
from shutil import copy

from safetensors.torch import load_file, save_file

DEMO = Path(__file__).resolve().parent / "checkpoint"
LAYERS = 2  # of the demo's 8


def main() -> None:
    """Copy what the first layers need; the rest of the checkpoint stays as it is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a new one")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True)
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    kept = {
        name: tensor
        for name, tensor in load_file(DEMO / "model.safetensors").items()
        if "layers." not in name or int(name.split("layers.")[1].split(".")[0]) < LAYERS
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copy(DEMO / name, folder)


if __name__ == "__main__":
    main()
