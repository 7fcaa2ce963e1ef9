"""Temperature, top-k and top-p of drafted tokens on CPU.

vLLM 0.32: the function that repeats a request's value for each of its drafts writes into a copy,
except for 64-bit integers.  Drafts are then accepted by uninitialised values, even those of greedy
requests beside sampled ones.
"""

from typing import Any

from attnres_serve.compat.patch import Patch


def repeated(x: Any, ends: Any, count: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    """A value for every drafted token, ``[count]``.

    Args:
        x: values of requests, ``[requests]``.
        ends: cumulative numbers of drafts, ``[requests]``.
        count: number of all drafts.
        replace_from: a value to replace.
        replace_to: its replacement.
    """
    drafts = ends.diff(prepend=ends.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(drafts, output_size=count)


PATCH = Patch(
    targets=("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",),
    make=lambda original: repeated,
    why="drafts were sampled at no temperature",
    models="AttnRes models on CPU with `--speculative-config`",
    first=(0, 28),
    report="drafts-at-no-temperature",
)
