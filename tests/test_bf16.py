"""In bfloat16 AttnRes loses no more than the same function with standard residuals loses.

With zero queries a site takes a plain mean, whose scale the norm behind it removes, so at unit
scale AttnRes and standard residuals are the same function and their losses can be compared.
"""

import pytest
from checkpoints import write_house, write_standard
from serving import run_verify

from attnres_serve.settings import ALGORITHMS

SEEDS = (0, 1)
SHAPE = {"layers": 6, "hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 192}
CHOICES = [
    {"attnres_algorithm": algorithm, "attnres_backend": backend}
    for algorithm in ALGORITHMS
    for backend in ("cpp", "torch")
]


@pytest.mark.engine
def test_divergence_from_float64(tmp_path):
    """The mean KL divergence is at most 1.2 times that of the twin, served by plain vLLM."""
    prompts = [[(7 * i + i * i + shift) % 320 for i in range(60)] for shift in (1, 2)]
    jobs = []
    for seed in SEEDS:
        twin = write_standard(tmp_path / f"twin{seed}", seed=seed, **SHAPE)
        served = write_house(
            tmp_path / f"attnres{seed}", block_size=3, seed=seed, zero_queries=True, **SHAPE
        )
        jobs += [(twin, {}), *((served, chosen) for chosen in CHOICES)]
    kl = run_verify(
        [
            {
                "served": str(folder),
                "reference": str(folder),
                "prompts": prompts,
                "chosen": chosen,
                "dtype": "bfloat16",
            }
            for folder, chosen in jobs
        ],
        tmp_path / "run",
    )
    per_seed = 1 + len(CHOICES)
    twin = sum(kl[::per_seed])
    assert twin > 0
    for number, chosen in enumerate(CHOICES, 1):
        assert sum(kl[number::per_seed]) <= 1.2 * twin, (chosen, kl)
