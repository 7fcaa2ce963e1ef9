"""Train the demo checkpoint: a small Attention-Residuals language model of Python source text.

Everything comes from the machine it runs on: the text is Python's own standard library. The run
prepares the data, trains a tokenizer and the model, compares the model with 5-gram models and with
itself without its depth queries, and writes a checkpoint in the house format with a model card.

    python examples/demo/train.py              # the bundled checkpoint
    python examples/demo/train.py --dry-run    # the same code in seconds, result under --work

It is safe to stop and to start again: the state is kept in the work folder.
"""

import argparse
import hashlib
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import data
import numpy as np
import torch
import torch.nn.functional as F
from data import BOS, BYTE_END, EOS, PAD
from model import AttnResLlama, Shape
from ngram import KneserNey
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
# Prompts whose likeliest continuations do not go round in a circle.
PROMPTS = (
    "import os\n\n\ndef ",
    "def write(self, data):\n    ",
    "def read_file(path):\n    with open(",
)
# What a request without sampling parameters of its own gets; at 1 this small a model strays.
SAMPLING = {"do_sample": True, "temperature": 0.4, "top_p": 0.9}
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults make the bundled checkpoint."""

    steps: int = 2000
    decay: int = 700  # steps over which the rate falls to zero and the context grows
    warmup: int = 40
    contexts: tuple[int, int, int] = (256, 512, 1024)  # before, early in and late in the decay
    batch: int = 2048  # tokens per step
    micro_batch: int = 1024  # tokens per pass: few enough to stay in the cache
    matrix_rate: float = 1e-2  # Muon: the matrices of the layers
    vector_rate: float = 8e-3  # AdamW: embedding, norms and queries
    seed: int = 2603
    shape: Shape = field(default_factory=Shape)

    def context(self, step: int) -> int:
        """Tokens per sequence: the longest context comes last."""
        left = self.steps - step
        return self.contexts[0 if left > self.decay else 1 if left > self.decay // 3 else 2]

    def rate(self, step: int) -> float:
        """The factor on the learning rates: warm up, stay, fall to zero."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / self.decay)


DRY_SHAPE = Shape(512, 64, 128, 4, 2, 1, 32, max_position_embeddings=128)
DRY_RUN = Recipe(12, 6, contexts=(32, 64, 128), batch=512, micro_batch=256, shape=DRY_SHAPE)


def make_optimizers(model: AttnResLlama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW without weight decay for all the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2 and len(p) > 1]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def sample_batch(stream: NDArray[np.int64], recipe: Recipe, step: int) -> Tensor:
    """Random windows of the stream, each opened by BOS. They depend on nothing but the step."""
    length = recipe.context(step)
    random = np.random.default_rng([recipe.seed, step])
    starts = random.integers(0, len(stream) - length, size=recipe.batch // length)
    windows = stream[starts[:, None] + np.arange(length)]
    return torch.from_numpy(np.insert(windows, 0, BOS, axis=1))


def backward(model: AttnResLlama, batch: Tensor, micro_batch: int) -> float:
    """Leave the gradient of the mean loss in the parameters; return that loss in nats."""
    parts = batch.split(max(1, micro_batch // (batch.shape[1] - 1)))
    total = 0.0
    for part in parts:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(part[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten()) / len(parts)
        loss.backward()
        total += loss.item()
    return total


def train(
    recipe: Recipe, stream: NDArray[np.int64], state_file: Path, minutes: float
) -> tuple[AttnResLlama, float] | None:
    """Train, or go on training; return the model and the seconds it took, or None if cut off."""
    torch.manual_seed(recipe.seed)
    model = AttnResLlama(recipe.shape)
    optimizers = make_optimizers(model, recipe)
    stateful = [model, *optimizers]
    step, seconds, smooth = 0, 0.0, np.log(recipe.shape.vocab_size)
    if state_file.exists():
        state = torch.load(state_file)
        step, seconds, smooth = state["step"], state["seconds"], state["loss"]
        for part, saved in zip(stateful, state["parts"], strict=True):
            part.load_state_dict(saved)
    full_rates = [recipe.matrix_rate, recipe.vector_rate]
    start, deadline = time.monotonic() - seconds, time.monotonic() + 60 * minutes
    with tqdm(total=recipe.steps, initial=step, unit="step", mininterval=5) as bar:
        while step < recipe.steps and time.monotonic() < deadline:
            loss = backward(model, sample_batch(stream, recipe, step), recipe.micro_batch)
            for optimizer, full_rate in zip(optimizers, full_rates, strict=True):
                optimizer.param_groups[0]["lr"] = full_rate * recipe.rate(step)
                optimizer.step()
            model.zero_grad()
            step += 1
            smooth = 0.95 * smooth + 0.05 * loss
            bar.update()
            bar.set_postfix_str(f"loss {smooth:.3f}")
            if step % 50 == 0 or step == recipe.steps:
                seconds = time.monotonic() - start
                parts = [part.state_dict() for part in stateful]
                state = {"step": step, "seconds": seconds, "loss": float(smooth), "parts": parts}
                torch.save(state, state_file.with_suffix(".partial"))
                state_file.with_suffix(".partial").replace(state_file)
    return (model, seconds) if step == recipe.steps else None


@torch.inference_mode()
def model_bits(model: AttnResLlama, stream: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bits for every token of a stream, each with at least half a window of history.

    The windows overlap by half and open with BOS, as in training.
    """
    window = model.shape.max_position_embeddings
    fresh = window // 2
    bits = np.empty(len(stream))
    for start in tqdm(range(0, len(stream), fresh), desc="evaluate", unit="window", mininterval=5):
        history = max(0, start + fresh - window)
        ids = torch.from_numpy(np.insert(stream[history : start + fresh], 0, BOS))
        nats = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
        bits[start : start + fresh] = nats[start - history :].numpy() / np.log(2)
    return bits


@torch.no_grad()
def evaluate(
    model: AttnResLlama, tokenizer: Tokenizer, train_texts: list[str], held_out: list[str]
) -> dict[str, float]:
    """Bits per byte of the held-out text, for the model and for all it has to beat.

    The end marks between texts are context for everyone, but nobody has to predict them.
    """
    tokens, raw = data.token_stream(held_out, tokenizer), data.byte_stream(held_out)
    token_gram = KneserNey(data.token_stream(train_texts, tokenizer), 5, model.shape.vocab_size)
    byte_gram = KneserNey(data.byte_stream(train_texts), 5, BYTE_END + 1)
    bits = {"model": model_bits(model, tokens)[tokens != EOS]}
    learned = [query.clone() for query in model.queries()]
    for query in model.queries():
        query.zero_()
    bits["zero_queries"] = model_bits(model, tokens)[tokens != EOS]
    for query, value in zip(model.queries(), learned, strict=True):
        query.copy_(value)
    bits["token_5_gram"] = token_gram.bits(tokens)[tokens != EOS]
    bits["byte_5_gram"] = byte_gram.bits(raw)[raw != BYTE_END]
    return {name: float(b.sum() / data.count_bytes(held_out)) for name, b in bits.items()}


@torch.inference_mode()
def continue_greedily(model: AttnResLlama, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The prompt and the `count` likeliest next tokens, one after the other."""
    ids = tokenizer.encode(prompt).ids
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return tokenizer.decode(ids)


def write_checkpoint(folder: Path, model: AttnResLlama, tokenizer: Tokenizer) -> None:
    """All files but the card."""
    fields = asdict(model.shape)
    theta, block_size = fields.pop("rope_theta"), fields.pop("block_size")
    special_ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    special_tokens = zip(("pad_token", "bos_token", "eos_token"), data.SPECIAL_TOKENS, strict=True)
    configs = {
        "config.json": {
            "architectures": ["AttnResLlamaForCausalLM"],
            "model_type": "attnres_llama",
            **fields,
            "attn_res": {"block_size": block_size},
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            **special_ids,
        },
        "generation_config.json": special_ids | SAMPLING,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.shape.max_position_embeddings,
            **dict(special_tokens),
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {name: value.bfloat16() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_card(path: Path, model: AttnResLlama, tokenizer: Tokenizer, facts: dict) -> None:
    """Fill in the model card: the facts of the run, and what the model itself shows."""
    query_norms = [query.norm().item() for query in model.queries()[1:]]
    samples = [continue_greedily(model, tokenizer, prompt, 40) for prompt in PROMPTS]
    packages = ("torch", "tokenizers", "safetensors", "numpy")
    template = (HERE / "card.md").read_text(encoding="utf-8")
    card = template.format(
        **facts,
        smallest_query=min(query_norms),
        largest_query=max(query_norms),
        parameters=sum(p.numel() for p in model.parameters()),
        sites=len(query_norms) + 1,
        skipped=", ".join(f"`{name}`" for name in data.SKIPPED_FOLDERS),
        cores=os.cpu_count(),
        python=platform.python_version(),
        versions=", ".join(f"{name} {version(name)}" for name in packages),
        sampling=SAMPLING,
        samples="\n\n".join(f"```python\n{sample}\n```" for sample in samples),
    )
    path.write_text(card, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    cache = Path(tempfile.gettempdir()) / "attnres-demo"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--minutes", type=float, default=1e9, help="pause training after so long")
    parser.add_argument("--work", type=Path, default=cache, help="folder for the training state")
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model and few steps")
    return parser.parse_args()


def main() -> None:
    """Prepare, train, evaluate, write."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    train_texts, held_out = data.load_texts()
    recipe, folder = Recipe(), arguments.out or HERE / "checkpoint"
    if arguments.dry_run:
        recipe, folder = DRY_RUN, arguments.out or arguments.work / "dry-run"
        train_texts, held_out = train_texts[:40], held_out[:2]
    tokenizer = data.train_tokenizer(train_texts, recipe.shape.vocab_size)
    stream = data.token_stream(train_texts, tokenizer)

    arguments.work.mkdir(parents=True, exist_ok=True)
    run = hashlib.sha256(repr(recipe).encode() + stream.tobytes()).hexdigest()[:12]
    trained = train(recipe, stream, arguments.work / f"state-{run}.pt", arguments.minutes)
    if trained is None:
        print("Paused. The same command goes on from here.")
        return
    model, seconds = trained
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # judge what will be stored

    scores = evaluate(model, tokenizer, train_texts, held_out)
    write_checkpoint(folder, model, tokenizer)
    facts = {
        "recipe": recipe,
        "shape": recipe.shape,
        "scores": scores,
        "train_files": len(train_texts),
        "train_bytes": data.count_bytes(train_texts),
        "train_tokens": len(stream),
        "held_files": len(held_out),
        "held_bytes": data.count_bytes(held_out),
        "held_tokens": len(data.token_stream(held_out, tokenizer)),
        "seen": recipe.steps * recipe.batch,
        "epochs": recipe.steps * recipe.batch / len(stream),
        "minutes": seconds / 60,
        "threads": arguments.threads,
    }
    write_card(folder / "README.md", model, tokenizer, facts)
    print(json.dumps(scores, indent=2))
    if scores["model"] > min(scores.values()) and not arguments.dry_run:
        raise SystemExit("The model does not beat its yardsticks.")


if __name__ == "__main__":
    main()
