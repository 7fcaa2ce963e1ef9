"""What the tests know of each family, read off Hugging Face's classes and not off ours.

A family has a file, found by being there.  The makers of checkpoints draw by it, and the tests of
families run every variant.  The sizes of tiny models are those with which vLLM runs on a CPU: its
latent attention decodes only a latent of 512 channels and 64 rotated ones, and gpt-oss' experts
want widths that are multiples of 128.
"""

import importlib
from pkgutil import iter_modules

from facts.family import Facts
from facts.shared import QKV, Config

_SHARED = ("family", "shared")

FACTS: dict[str, Facts] = {
    name: importlib.import_module(f"facts.{name}").FACTS
    for name in sorted(module.name for module in iter_modules(__path__))
    if name not in _SHARED
}
TINY: dict[str, Config] = {
    name: {"architectures": [f"{facts.title}ForCausalLM"], "model_type": name, **facts.tiny}
    for name, facts in FACTS.items()
    if facts.tiny
}

__all__ = ["FACTS", "QKV", "TINY", "Config", "Facts"]
