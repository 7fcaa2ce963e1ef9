"""Where the time goes: an engine's operators by part of the model, and the bytes of the sites."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from attnres_serve.bench.measure import WARM, order
from attnres_serve.bench.process import Engine
from attnres_serve.bench.workload import WARM_STEPS, Cell, draw_prompts
from attnres_serve.depth import groups as site_groups
from attnres_serve.depth.sites import Site, sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.families import FAMILIES
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.kernels import traffic

SITES, ATTENTION, MLP, PRODUCTS = "AttnRes", "attention", "MLP", "matrix products"
NORMS, HEAD, REST = "norms", "head", "rest"
PARTS = (ATTENTION, MLP, PRODUCTS, SITES, NORMS, HEAD, REST)
REPEATS = 3
PRODUCT = r"^(?!graph_)\S*(linear|gemm|(?<![a-z])(add)?mm|matmul)\S* "


def rules(parsed: ParsedConfig) -> list[list[str]]:
    """Rules that tell an operator's part by its name and shapes; the first that fits counts.

    A matrix product is known by the sizes that only its part has: the MLP's, the head's vocabulary;
    the others are attention's.  (Where attention has the MLP's size too, both
    are "matrix products".)  A loop that inductor fused is known by the operations in its name; what
    it fused across parts counts for the first of them.
    """
    sizes = FAMILIES[parsed.base].product_sizes(parsed.config)
    vocabulary, inner = parsed.config["vocab_size"], "|".join(map(str, sorted(sizes["mlp"])))
    shared = not sizes["attention"].isdisjoint(sizes["mlp"])
    return [
        [ATTENTION, r"^attnres_serve::cpp_recurrence\b"],
        [SITES, r"^attnres_serve::"],
        [HEAD, rf"{PRODUCT}.*\b{vocabulary}\b"],
        [PRODUCTS if shared else MLP, rf"{PRODUCT}.*\b({inner})\b"],
        [PRODUCTS if shared else ATTENTION, PRODUCT],
        [MLP, r"^\S*(moe|experts)"],
        [ATTENTION, r"^(?!graph_)\S*(attention|attn|kv_cache|rotary)"],
        [MLP, r"^\S*(silu|gelu)"],
        [NORMS, r"^\S*(rms_norm|rsqrt|layer_norm)|^aten::(pow|mean|rsqrt|sum)\b"],
        [ATTENTION, r"^graph_\S*(index_select|slice|split)"],
        [HEAD, r"^\S*(argmax|sampl|log_softmax)"],
    ]


def measure(
    engines: Sequence[Engine],
    cells: Sequence[Cell],
    parsed: ParsedConfig,
    step: Callable[[str], object],
) -> list[dict[str, Any]] | None:
    """Profile every cell in every engine, in turn.

    Returns:
        A row for each: ``milliseconds`` by part, the median of ``REPEATS`` generations, with
        ``range_milliseconds``, the least and the most of them; what no operator was seen for is
        the rest.  And for an engine with sites ``site_bytes``.  None with several workers, which
        are not seen, and with the torch backend, whose sites are operators like any other.
    """
    if any(engine.at_start["workers"] > 1 for engine in engines):
        return None
    if any(engine.at_start["backend"] == "torch" for engine in engines):
        return None
    rows = []
    vocabulary, told_by = engines[0].at_start["vocabulary"], rules(parsed)
    warm = {"prompts": draw_prompts(WARM, vocabulary, -1), "max_tokens": WARM_STEPS}
    for cell in cells:
        found: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
        for turn in range(REPEATS):
            prompts = draw_prompts(cell, vocabulary, -1 - turn)
            asked = {"prompts": prompts, "max_tokens": cell.max_tokens}
            for engine in order(engines, turn):
                step(f"{engine.name}: where the time goes in {cell.label}")
                engine.ask("generate", **warm)
                found[engine.name].append(engine.ask("profile", rules=told_by, **asked))
        for engine in engines:
            row = {**asdict(cell), "steps": cell.max_tokens - 1, "engine": engine.name}
            row |= _shares(found[engine.name])
            rows.append(row | {"site_bytes": _moved(engine, cell, parsed)})
    return rows


def _shares(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Time of each part, and how far generations differ in it."""
    seen = [one["seconds"] | {REST: one["wall"] - sum(one["seconds"].values())} for one in found]
    parts = {part: sorted(1e3 * one[part] for one in seen) for part in seen[0]}
    return {
        "milliseconds": {part: median(times) for part, times in parts.items()},
        "range_milliseconds": {part: [times[0], times[-1]] for part, times in parts.items()},
    }


def _moved(engine: Engine, cell: Cell, parsed: ParsedConfig) -> int | None:
    """Bytes that the sites of one profiled generation read and write."""
    algorithm = engine.at_start["algorithm"]
    if algorithm is None or parsed.spec is None:
        return None
    most = engine.at_start["max_num_batched_tokens"]
    steps = [cell.batch] * (cell.max_tokens - 1)
    if cell.phase == "prefill":
        steps = [min(most, cell.context - start) for start in range(0, cell.context, most)]
    dtype = getattr(torch, engine.at_start["dtype"])
    shape = parsed.config["hidden_size"], dtype, most
    return sum(site_bytes(parsed.spec, algorithm, tokens, *shape) for tokens in steps)


def site_rows(spec: AttnResSpec) -> dict[Site, traffic.SiteRow]:
    """What each site that mixes does to the bank of a model that is one pipeline stage."""
    rows, before = {}, 2 if spec.cumulative else 1
    for site in sites(spec):
        if site.mixes and site.index > 0:
            row = site.num_sources - 1
            rows[site] = traffic.SiteRow(row, fresh=row == before, completes=not site.reads_partial)
            before = site.num_sources
    return rows


def site_bytes(
    spec: AttnResSpec, algorithm: str, tokens: int, hidden: int, dtype: torch.dtype, most: int
) -> int:
    """Bytes that the sites of one step read and write, by the formulae of ``kernels.traffic``.

    Args:
        spec: the model's depth attention.
        algorithm: one of ``settings.ALGORITHMS``.
        tokens: of the step.
        hidden: hidden size.
        dtype: of activations.
        most: tokens of the largest step, for which two-phase was planned.
    """
    rows = site_rows(spec)
    shape = hidden, dtype
    if algorithm == "single_pass":
        return traffic.single_pass_group(tokens, list(rows.values()), *shape)
    size = site_groups.most_sites(most, hidden, dtype.itemsize, in_place=True)
    total = 0
    for group in site_groups.phase_1_groups(list(rows), size):
        members = [rows[site] for site in group]
        one = traffic.two_phase_group if len(members) > 1 else traffic.single_pass_group
        total += one(tokens, members, *shape)
    return total
