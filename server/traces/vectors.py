"""The vectors of a trace: a safetensors file of them, and how large it may be."""

from collections.abc import Mapping, Sequence

import numpy as np
from fastapi import HTTPException
from safetensors.numpy import save

from attnres_serve.depth.sites import Site
from attnres_serve.server.bounds.policy import Policy

SAFETENSORS = "application/octet-stream"  # the content type of a response with vectors


def check_bytes(policy: Policy, tokens: int, traced: list[Site], hidden: int) -> None:
    """Refuse too many bytes of vectors: the sources, the mix and the sublayer of each site."""
    size = 4 * tokens * hidden * sum(site.num_sources + 2 for site in traced)
    if size > policy.max_trace_bytes:
        raise HTTPException(
            400,
            f"The vectors of a trace have at most {policy.max_trace_bytes} bytes "
            f"(--max-trace-bytes); those of {tokens} tokens x {len(traced)} sites have {size}, so "
            "choose some by `tokens` and `sites`.",
        )


def with_vectors(trace: bytes, vectors: Mapping[str, tuple[Sequence[int], bytes]]) -> bytes:
    """A safetensors file with the vectors by name, and with the trace's JSON as ``trace``."""
    arrays = {
        name: np.frombuffer(content, np.float32).reshape(shape)
        for name, (shape, content) in vectors.items()
    }
    return save(arrays | {"trace": np.frombuffer(trace, np.uint8)})
