"""The start of engines and workers on CPU."""

CANNOT = "vLLM is slower and not wrong: its engines on CPU import vLLM anew."
