"""What the sites of a whole model add to a step, by the model of their launches.

A step without them is not modelled.  It takes the time of what bounds it: in decode at batch 1 the
bytes of the weights, in prefill the floating-point operations, at ``REACHED`` of the GPU's most.
"""

from typing import Any, NamedTuple

from attnres_serve.bench.breakdown import site_rows
from attnres_serve.depth.groups import most_sites, phase_1_groups
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from benchmarks.kernels.model import launches, plain
from benchmarks.kernels.model.launches import Launch, Part
from benchmarks.kernels.model.machine import GPUS, Gpu

PREFILL = 8192  # tokens
OPERATIONS = 989e12  # a second, bfloat16 on tensor cores, of H100 and H200 (their data sheets)
REACHED = 0.6  # of them in prefill (assumed)


class Shape(NamedTuple):
    """A dense decoder with ``blocks`` blocks of depth attention, in bfloat16."""

    name: str
    hidden: int
    layers: int
    blocks: int
    intermediate: int
    vocabulary: int
    attention: int  # heads x head size of the queries
    keys: int  # and of the keys, and of the values

    @property
    def weights(self) -> int:
        """Of all layers."""
        attention = 2 * self.hidden * (self.attention + self.keys)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def step(self, tokens: int, gpu: Gpu) -> float:
        """Seconds of a step without sites, of one request."""
        if tokens == 1:
            return 2 * (self.weights + self.vocabulary * self.hidden) / gpu.memory
        pairs = tokens * tokens / 2
        done = 2 * self.weights * tokens + 4 * pairs * self.attention * self.layers
        return done / (REACHED * OPERATIONS)


# Hidden sizes, and blocks with their sublayers, that say where two-phase pays.
PLANS = [
    *((hidden, (8, 6)) for hidden in (1024, 2048, 4096, 7168)),
    *((hidden, (8, 9)) for hidden in (1024, 4096, 7168)),
    *((hidden, (8, 12)) for hidden in (1024, 4096)),
    *((4096, plan) for plan in ((4, 24), (6, 9), (12, 6))),
]
STEPS = (1, 64, 256, 512, 1024, 2048, 8192)  # tokens

# Qwen3-8B's sizes.
SHAPES = (Shape("8B", 4096, 36, 8, 12288, 151936, 4096, 1024),)


def launched(hidden: int, layers: int, blocks: int, algorithm: str) -> list[Part]:
    """The launches of a model's sites, by the plan that a served model has."""
    spec = AttnResSpec.uniform(Layout.of(layers), 2 * layers // blocks, 1e-6)
    rows = site_rows(spec)
    most = most_sites(PREFILL, hidden, launches.DTYPE.itemsize, in_place=True)
    groups = phase_1_groups(list(rows), most if algorithm == "two_phase" else 1)
    found = []
    for group in groups:
        for position, site in enumerate(group):
            kernel = "merge" if position else "open_group" if len(group) > 1 else "single_pass"
            sites = len(group) if kernel == "open_group" else 1
            launch = Launch(kernel, hidden, rows[site].row, sites, rows[site].fresh)
            found.append(Part(1, launch))
    return found


def rows() -> list[dict[str, Any]]:
    """Each shape and phase on each GPU."""
    made = []
    for shape in SHAPES:
        sizes = shape.hidden, shape.layers, shape.blocks
        plans = {name: launched(*sizes, name) for name in ("single_pass", "two_phase")}
        for phase, tokens in {"decode": 1, "prefill": PREFILL}.items():
            for name, gpu in GPUS.items():
                step, norm = shape.step(tokens, gpu), plain.seconds(shape.hidden, tokens, gpu)
                added = {
                    algorithm: launches.seconds(plan, tokens, gpu) - len(plan) * norm
                    for algorithm, plan in plans.items()
                }
                made.append(
                    {
                        "shape": shape.name,
                        "layers": shape.layers,
                        "hidden": shape.hidden,
                        "blocks": shape.blocks,
                        "phase": phase,
                        "tokens": tokens,
                        "gpu": name,
                        "step_us": round(1e6 * step, 1),
                        "added_us": {k: round(1e6 * v, 1) for k, v in added.items()},
                        "overhead": {k: round(v / step, 4) for k, v in added.items()},
                    }
                )
    return made


def plans() -> list[dict[str, Any]]:
    """Two-phase over the single pass for all sites of models of several plans."""
    made = []
    for hidden, (blocks, sublayers) in PLANS:
        sizes = hidden, blocks * sublayers // 2, blocks
        single, two_phase = (launched(*sizes, name) for name in ("single_pass", "two_phase"))
        ratios = {
            name: {
                str(tokens): round(
                    launches.seconds(two_phase, tokens, gpu)
                    / launches.seconds(single, tokens, gpu),
                    3,
                )
                for tokens in STEPS
            }
            for name, gpu in GPUS.items()
        }
        plan = {"hidden": hidden, "blocks": blocks, "sublayers": sublayers}
        made.append(plan | {"over_single_pass": ratios})
    return made
