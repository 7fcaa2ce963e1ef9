"""A model of the released shape of AttnRes-3B, served on a CPU: start, memory and speed.

    python -m benchmarks.serving.three_billion --out benchmarks/results/cpu-three-billion.json
    python -m benchmarks.serving.three_billion --write FOLDER      the model alone, to be served

48 layers of 2048 channels, 32 heads for queries and 8 for keys, all normed, blocks of 12 sublayers
in one cumulative sum with recency biases; random weights in bfloat16.  It is measured as
``one_billion`` is, with the same attention in the model without sites, and by shorter
requests: without instructions for bfloat16, two cores compute about two of its tokens a second.
"""

import sys
from dataclasses import replace

from attnres_serve.bench.workload import QUICK_STEPS, make_cases
from benchmarks.serving import one_billion
from benchmarks.serving.shapes import LONGEST, Shape

LAYERS, BLOCK = 48, 12
SHAPE = Shape(
    "normed_llama",
    layers=LAYERS,
    block_size=BLOCK,
    sizes={
        "attn_res": {
            "block_starts": list(range(0, 2 * LAYERS + 1, BLOCK)),
            "cumulative": True,
            "recency_bias": True,
        },
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 6912,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "vocab_size": 50304,
    },
)
QUICK = replace(
    SHAPE,
    sizes=SHAPE.sizes | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048},
)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for and print one JSON document."""
    model = one_billion.Model(
        *("serving.three_billion", "attnres_3b-2048x48", SHAPE, QUICK, __doc__),
        times=1,
        prompt=64,
        answer=16,
        step=64,
        cases=make_cases(LONGEST, (32,), (1,), QUICK_STEPS),
    )
    return one_billion.run(model, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
