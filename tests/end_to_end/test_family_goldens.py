"""Goldens of families, written by Hugging Face's classes and evaluated in float64, over HTTP."""

import pytest
from facts import FACTS
from goldens import check_executed, check_golden_over_http
from serving import FAMILY_GOLDENS, OURS, running

BACKBONES = {"kimi_k3": "kimi_linear"}

pytestmark = [pytest.mark.engine, pytest.mark.families]


def test_every_golden_is_served():
    served = {"qwen3_moe", "deepseek_v3", "qwen3_next", "kimi_linear", "kimi_k3", "alice_ai"}
    assert {path.name for path in FAMILY_GOLDENS.iterdir()} == served


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("qwen3_moe", "single_pass"),
        ("qwen3_moe", "two_phase"),
        ("deepseek_v3", "single_pass"),
        ("deepseek_v3", "two_phase"),
        ("qwen3_next", "single_pass"),
        ("qwen3_next", "two_phase"),
        ("kimi_linear", "single_pass"),
        ("kimi_linear", "two_phase"),
        ("kimi_k3", "single_pass"),
        ("kimi_k3", "two_phase"),
        ("alice_ai", "single_pass"),
        ("alice_ai", "two_phase"),
    ],
)
def test_a_golden_of_a_family(name, algorithm, tmp_path):
    """Alone, in a batch and, if vLLM has one on CPU, from the prefix cache."""
    flags = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager")
    flags += ("--enable-prompt-tokens-details", "--attnres-algorithm", algorithm)
    with running(OURS, FAMILY_GOLDENS / name, tmp_path / "log", *flags) as server:
        check_golden_over_http(
            server, FAMILY_GOLDENS / name, FACTS[BACKBONES.get(name, name)].caches_prefixes
        )
        check_executed(server.info, algorithm, compiled=False)
