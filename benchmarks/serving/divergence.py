"""Divergence by bfloat16 of a trained AttnRes model and its standard-residual twin, both served.

    python -m benchmarks.serving.divergence --out benchmarks/results/cpu-bf16-divergence.json

Trains pairs by the demo's recipe, cut short: the same text, seed, shape and rates, with depth
attention and with residual addition.  Each is served in bf16 and compared with its own float64
model over held-out text: the mean KL divergence in nats a token.  The ratio of a pair is AttnRes
over the twin.  The last line on stdout is one JSON document; the table goes to stderr.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from attnres_serve import settings
from attnres_serve.bench.machine import cores
from attnres_serve.verify import compare, oracle
from benchmarks.common import ROOT, publish

sys.path.insert(0, str(ROOT / "examples" / "demo"))
import data
import model as demo
import train as training

PASSAGES, TOKENS = 16, 256


class Texts:
    """The demo's text and its tokenizer.

    Attributes:
        tokenizer: trained on the training text.
        seen, held_out: the two texts as streams of tokens.
    """

    def __init__(self, vocabulary: int) -> None:
        train_texts, held_out = data.load_texts()
        self.tokenizer = data.train_tokenizer(train_texts, vocabulary)
        self.seen = data.token_stream(train_texts, self.tokenizer)
        self.held_out = data.token_stream(held_out, self.tokenizer)

    def prompts(self) -> list[list[int]]:
        """Passages of the held-out text, evenly spaced."""
        starts = np.linspace(0, len(self.held_out) - TOKENS, PASSAGES).astype(int)
        return [[data.BOS, *self.held_out[at : at + TOKENS - 1].tolist()] for at in starts]


class StandardDecoder(demo.Decoder):
    """The same stack with residual addition; the queries and key norms are not used."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        positions = self.cos[:length], self.sin[:length], self.future[:length, :length]
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            for _, _, pre_norm, sublayer in layer.sites():
                hidden = hidden + sublayer(pre_norm(hidden), *positions)
        return self.norm(hidden)


class StandardLlama(demo.AttnResLlama):
    decoder = StandardDecoder


MODELS = {"standard": StandardLlama, "attnres": demo.AttnResLlama}  # the twin first


def make_standard(checkpoint: Path) -> None:
    """Turn a checkpoint of the twin, written as the demo's are, into a plain Llama's."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    del config["attn_res"]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    path.write_text(json.dumps(config))
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if "_res_" not in name]  # noqa: SIM118
        kept = {name: file.get_tensor(name) for name in names}
    save_file(kept, checkpoint / "model.safetensors", metadata={"format": "pt"})


def divergence(checkpoint: Path, prompts: list[list[int]], chosen: dict[str, str]) -> float:
    """Mean KL divergence of the model served in bf16 from the same model in float64, in nats."""
    with torch.inference_mode():
        exact = oracle.load(checkpoint)
        passages = compare.serve(checkpoint, prompts, chosen, "bfloat16")
        kl = [compare.whole(passage, exact.logprobs(passage.ids))["kl"] for passage in passages]
        return torch.cat(kl).mean().item()


def trained(name: str, recipe: training.Recipe, texts: Texts, folder: Path) -> float:
    """Train a model of ``MODELS`` and write its checkpoint; returns its bits per held-out token."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # small matrices: a second core costs more than it gives
    done = training.train(recipe, texts.seen, folder / "state.pt", 1e9, MODELS[name])
    assert done is not None, "nothing limits the time"
    bits = training.model_bits(done[0], texts.held_out[:20_000]).mean()
    training.write_checkpoint(folder, done[0], texts.tokenizer)
    if name == "standard":
        make_standard(folder)
    torch.set_num_threads(cores())
    return float(bits)


def measure(recipe: training.Recipe, texts: Texts, work: Path) -> list[dict[str, Any]]:
    """One pair: a row for the twin and one for each algorithm."""
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        folder = work / f"{name}-{recipe.seed}"
        bits = trained(name, recipe, texts, folder)
        choices = (
            {"standard": {}}
            if name == "standard"
            else {
                algorithm: {settings.ALGORITHM_KEY: algorithm} for algorithm in settings.ALGORITHMS
            }
        )
        for label, chosen in choices.items():
            kl = divergence(folder, texts.prompts(), chosen)
            row = {"seed": recipe.seed, "model": label, "bits_per_token": bits, "kl": kl}
            rows.append(row | {"ratio": kl / rows[0]["kl"] if rows else 1.0})
            print(*rows[-1].values(), file=sys.stderr)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one pair each")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--work", type=Path, help="folder for states and models, to go on from")
    parser.add_argument("--out", type=Path)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    recipe = replace(training.Recipe(), steps=own.steps, decay=own.steps // 3)
    texts = Texts(recipe.shape.vocab_size)
    with TemporaryDirectory() as temporary:
        work = own.work or Path(temporary)
        pairs = [measure(replace(recipe, seed=seed), texts, work) for seed in own.seeds]
    config = {"recipe": asdict(recipe), "passages": PASSAGES, "tokens": TOKENS}
    publish("divergence", arguments, own.out, config=config, results=list(chain(*pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
