"""What the tests know of Qwen2."""

from facts.family import Facts
from facts.shared import NO_HEAD_DIM, QKV, tiny

FACTS = Facts(
    "Qwen2",
    tiny=tiny(without=NO_HEAD_DIM),
    is_tiny=False,
    options=(),
    biased=QKV,
    refused=({"use_sliding_window": True},),
)
