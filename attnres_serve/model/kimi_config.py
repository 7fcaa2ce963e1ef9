"""The configuration of Kimi Linear, whose heads may be of an odd size."""

from typing import Any

from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig as Stock


class KimiLinearConfig(Stock):
    def __init__(self, **fields: Any) -> None:
        """Leave out the size of a head to be rotated: transformers takes an odd one for a fault.

        vLLM's class reads it nowhere, and makes one of the hidden size where none is given.
        """
        super().__init__(**fields | {"head_dim": 0})
