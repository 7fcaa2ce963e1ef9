"""Loading code on CPU that an earlier start compiled.

After loading, vLLM 0.32 calls a method that only functions of its compiler have.  On CPU the
compiler is inductor, whose functions do not need such a method: vLLM fails and compiles anew at
every start.  This file imports nothing of ours, so that ``bench.engine`` can run it for stock vLLM.
"""

from typing import Any


def accept() -> None:
    """Let vLLM accept cached code (idempotent)."""
    try:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
    except ImportError:  # an older torch, with which vLLM caches no such code
        return
    loaded: Any = BundledAOTAutogradSerializableCallable
    if not hasattr(loaded, "finalize_loading"):
        loaded.finalize_loading = lambda self, vllm_config: None
