"""LoRA adapters that are refused.

What is known before an engine starts is in ``compat.rules``, what only an adapter's own files show
in ``lora.files``, and what only the model that takes it in ``workarounds.whole_adapters``.
"""

import re

REMEDY = "start without --enable-lora, and merge the adapter into the weights."


def name_of(adapter: str) -> str:
    """How the sentence begins that refuses an adapter."""
    return f"the LoRA adapter {adapter!r}"


def refusal_in(message: str, adapter: str) -> str | None:
    """The sentence that refuses an adapter, out of what vLLM's engine says of it; None without one.

    Args:
        message: of the error that the engine's client raises.
        adapter: its name.
    """
    found = re.search(rf"{re.escape(name_of(adapter))} .*\.(?=', please check|$)", message)
    return found[0] if found else None
