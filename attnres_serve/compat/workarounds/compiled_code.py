"""Code that an earlier start compiled is loaded on CPU, too.

vLLM 0.32 ends loading by a method that functions of its own compiler have.  On CPU the compiler is
inductor itself, whose functions need nothing more, and have no such method: vLLM fails and compiles
anew at every start.  This file imports nothing of ours, so that ``bench.engine`` can run it for
stock vLLM.
"""

from typing import Any


def accept() -> None:
    """Let vLLM take what it finds in its cache (idempotent)."""
    try:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
    except ImportError:  # an older torch, with which vLLM keeps no such code
        return
    loaded: Any = BundledAOTAutogradSerializableCallable
    if not hasattr(loaded, "finalize_loading"):
        loaded.finalize_loading = lambda self, vllm_config: None
