"""The models that are measured, by shape."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from attnres_serve.bench.baseline import read, write_twin
from attnres_serve.formats.parsed_config import ParsedConfig

LONGEST = 1024
CONTROL = "control"  # the name of a second baseline, whose ratio should be 1

FLAGS = (
    "--load-format=dummy",
    "--dtype=bfloat16",
    f"--max-model-len={LONGEST}",
    f"--max-num-batched-tokens={LONGEST}",
    "--max-num-seqs=8",
)


class Measured(Protocol):
    """A model by its shape, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def config(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Shape:
    """A Llama; ``block_size`` in sublayers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    block_size: int
    vocab: int = 32000

    def config(self) -> dict[str, Any]:
        """The content of config.json in the house format."""
        return {
            "architectures": ["AttnResLlamaForCausalLM"],
            "model_type": "attnres_llama",
            "attn_res": {"block_size": self.block_size},
            "attention_bias": False,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": LONGEST,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }


SHAPES = {
    "768x12": Shape(768, 12, heads=12, kv_heads=12, intermediate=2048, block_size=3),
    "1024x28": Shape(1024, 28, heads=16, kv_heads=8, intermediate=3072, block_size=7),
    # Full AttnRes where it is dearest: narrow and deep.
    "full-256x24": Shape(256, 24, 4, kv_heads=2, intermediate=768, block_size=1, vocab=4096),
}

QUICK = {"128x4": Shape(128, 4, heads=2, kv_heads=1, intermediate=256, block_size=1, vocab=512)}


@contextmanager
def models(shape: Measured) -> Iterator[tuple[Path, Path, ParsedConfig]]:
    """Folders of a model and of its standard-residual twin, and what the model's config means."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, twin = Path(scratch) / "model", Path(scratch) / "twin"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape.config()))
        source = read(str(folder), has_weights=False)
        write_twin(source, twin)
        yield folder, twin, source.parsed
