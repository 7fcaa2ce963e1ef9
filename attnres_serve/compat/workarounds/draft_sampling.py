"""Temperature, top-k and top-p of drafted tokens on CPU.

vLLM 0.32: the function that repeats those of a request for each of its drafts writes into a copy,
unless they are of 64-bit integers.  Drafts are then judged by what was in memory, and so are those
of greedy requests beside sampled ones.
"""

from typing import Any

from attnres_serve.compat import host


def repeat_for_drafts() -> None:
    """Let vLLM repeat them by torch (idempotent)."""
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    if hasattr(sampler, "expand_batch_to_tokens"):
        sampler.expand_batch_to_tokens = repeated
    else:
        host.logger().warning(
            "AttnRes: this vLLM has no expand_batch_to_tokens to replace, so drafts of sampled "
            "requests may be judged wrongly on a CPU; start the server without drafts to be sure."
        )


def repeated(x: Any, ends: Any, count: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    """A value for every drafted token, ``[count]``.

    Args:
        x: values of requests, ``[requests]``.
        ends: the drafts of a request and of those before it, ``[requests]``.
        count: drafts of all.
        replace_from: this value gives way to ``replace_to``.
        replace_to: see there.
    """
    own = ends.diff(prepend=ends.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(own, output_size=count)
