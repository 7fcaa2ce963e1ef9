"""Sentences that refuse LoRA adapters.

``compat.rules`` refuses before an engine starts, ``lora.files`` by the adapter's files, and
``workarounds.whole_adapters`` by the model that loads it.
"""

import re

REMEDY = "start without --enable-lora, and merge the adapter into the weights."


def name_of(adapter: str) -> str:
    """The beginning of a sentence that refuses an adapter."""
    return f"the LoRA adapter {adapter!r}"


def refusal_in(message: str, adapter: str) -> str | None:
    """The sentence of ours in vLLM's error about an adapter; None without one.

    Args:
        message: of the error from the engine's client.
        adapter: its name.
    """
    match = re.search(rf"{re.escape(name_of(adapter))} .*\.(?=', please check|$)", message)
    return match[0] if match else None
