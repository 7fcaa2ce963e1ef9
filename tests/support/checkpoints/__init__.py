"""Makers of tiny random checkpoints on disk, each servable on its own.

Every tensor is drawn from a generator seeded by its Hugging Face name, so `write_standard` and
`write_house` with one seed share all weights but the residual ones. Values are bf16 numbers
whatever dtype they are stored in. Weights are large enough for spiky depth weights, uneven
attention and clear greedy choices; `scale` multiplies the embedding and the sublayers' outputs, so
a small one brings the residual stream down to the norms' eps.
"""

from checkpoints.alice_ai import write_alice_ai
from checkpoints.baseline import write_baseline
from checkpoints.edit import config_of, edit
from checkpoints.fla import write_fla, write_fla_delta
from checkpoints.house import EVERY_OPTION, write_house, write_standard
from checkpoints.nanogpt import write_nanogpt
from checkpoints.quantized import INT8, computes_int8, dequantised, quantised
from checkpoints.qwen import write_kimi_names, write_mode, write_titan
from checkpoints.tensors import GOLDENS

__all__ = [
    "EVERY_OPTION",
    "GOLDENS",
    "INT8",
    "computes_int8",
    "config_of",
    "dequantised",
    "edit",
    "quantised",
    "write_alice_ai",
    "write_baseline",
    "write_fla",
    "write_fla_delta",
    "write_house",
    "write_kimi_names",
    "write_mode",
    "write_nanogpt",
    "write_standard",
    "write_titan",
]
