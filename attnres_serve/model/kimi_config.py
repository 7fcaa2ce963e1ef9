"""The configuration of Kimi Linear, whose head size may be odd."""

from typing import Any

from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig as Stock


class KimiLinearConfig(Stock):
    def __init__(self, **fields: Any) -> None:
        """Leave out the head size: transformers rejects an odd one.

        vLLM's class never reads it; without it, the class would derive one from the hidden size.
        """
        super().__init__(**fields | {"head_dim": 0})
