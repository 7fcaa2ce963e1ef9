"""``attnres-serve bench``: the latency of a checkpoint against its standard-residual twin."""

import argparse
import json
from math import inf
from pathlib import Path
from typing import Any

from attnres_serve import output, settings
from attnres_serve.bench import drafts, over_http
from attnres_serve.bench.workload import (
    BATCHES,
    QUICK_ROUNDS,
    QUICK_STEPS,
    STARTS,
    STEPS,
    make_cells,
    rounds_of,
)
from attnres_serve.checkpoints import checked, draft, hub, needs
from attnres_serve.compat import arguments, compiler, device, workers
from attnres_serve.compat.arguments import Arguments
from attnres_serve.compat.flags import reading
from attnres_serve.compat.flags.advice import names_of
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.model import backend as backend_choice

ATTNRES, BASELINE, DRAFTS = "attnres", "baseline", "drafts"
MINUTES = 10
REFUSED = {
    "additional_config": "would be ours in one engine only; give --attnres-algorithm and "
    "--attnres-backend.",
    **dict.fromkeys(
        ("spec_method", "spec_model", "spec_tokens"),
        "is a part of --speculative-config, which is read here; give that one.",
    ),
    "enable_prefix_caching": "would save what is timed here; leave it out.",
    "model": "goes with --http; here the checkpoint is what is measured.",
    "revision": "is not looked up here; give the folder of that snapshot as CHECKPOINT.",
}
OF_ENGINES = ("quick", "starts", "budget", *settings.FLAGS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, metavar: str, said: str, **options: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=said, **options)

    def switch(flag: str, said: str) -> None:
        parser.add_argument(flag, action="store_true", help=said)

    said = "tokens of prompts; decode follows the first (default: 128 512)"
    add("--prompt-lengths", "T", said, type=int, nargs="+")
    said = "of decode, or requests at a time (default: 1 8)"
    add("--batches", "B", said, type=int, nargs="+", default=BATCHES)
    add("--starts", "N", f"of both engines (default: {STARTS}; with --quick: 1)", type=int)
    said = "end before a start that would overrun it; the first start is always finished "
    said += f"(default: {MINUTES}; with --starts: none)"
    add("--budget", "MINUTES", said, type=float)
    switch("--quick", "one start, fewer steps: a trial, no evidence")
    switch("--json", "print the JSON document alone")
    add("--http", "URL", "measure the server there, by `vllm bench serve` and its flags")
    settings.add_arguments(parser)


def run(
    checkpoint: str | None, own: argparse.Namespace, flags: list[str], command: list[str]
) -> int:
    """Measure what the command line asks for.

    On a terminal a report is printed.  Elsewhere the last line on stdout is one JSON document,
    which ``--json`` prints alone.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        own: what ``add_arguments`` defines.
        flags: any other, which are vLLM's engine's, or its client's.
        command: the whole command line.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError(
            "bench needs a checkpoint as its first argument, the flags behind it: attnres-serve "
            "bench CHECKPOINT ..."
        )
    command = ["attnres-serve", *command]
    if own.starts is not None and own.starts < 1:
        raise SettingError(f"--starts is {own.starts}; expected at least 1.")
    if own.budget is not None and not 0 < own.budget < inf:
        raise SettingError(f"--budget is {own.budget:g}; expected a number of minutes above 0.")
    folder = hub.on_this_machine(checkpoint)
    if own.http:
        document, shown = _over_http(folder, own, flags, command)
    else:
        document, shown = _in_engines(checkpoint, folder, own, flags, command)
    if not own.json:
        print(shown, file=output.out())
    if own.json or not output.out().isatty():
        print(json.dumps(document), file=output.out())
    return 0


def _over_http(
    folder: Path, own: argparse.Namespace, flags: list[str], command: list[str]
) -> tuple[dict[str, Any], str]:
    """The document and the report of a running server."""
    from attnres_serve.bench.document import HttpDocument
    from attnres_serve.bench.machine import repeatable

    for name in OF_ENGINES:
        if getattr(own, name):
            raise SettingError(
                f"--{name.replace('_', '-')} does not go with --http, which measures a server as "
                "it is."
            )
    served = over_http.check_there(own.http, *over_http.asked(flags))
    loads = over_http.measure(folder, served, own, flags)
    document = HttpDocument.model_validate({**repeatable(command), "loads": loads})
    return document.model_dump(), over_http.render(loads)


def _refuse_uncomparable(asked: Arguments) -> None:
    """Raise SettingError for a flag with which engines would not be alike, or not timed whole."""
    for name, why in REFUSED.items():
        if asked.has(name):
            raise SettingError(f"--{name.replace('_', '-')} {why}")
    if asked.enforce_eager and device.is_cpu():
        raise SettingError(
            "--enforce-eager makes a norm of vLLM's many operators on CPU, while AttnRes with its "
            "norm is one, so that AttnRes would seem faster than no AttnRes; leave it out to "
            "measure compiled engines, as `serve` starts them."
        )


def _in_engines(
    checkpoint: str, folder: Path, own: argparse.Namespace, flags: list[str], command: list[str]
) -> tuple[dict[str, Any], str]:
    """The document and the report of engines, refused early: torch is imported only afterwards."""
    asked = arguments.of_engine(
        flags, reading.ours(settings.add_arguments), names_of(add_arguments)
    )
    flags = [*asked.words]
    chosen = settings.given(asked.given) | settings.given(vars(own))
    _refuse_uncomparable(asked)
    drafted = drafts.asked(asked)
    backend_choice.require(chosen.get(settings.BACKEND_KEY))
    found = checked.check_model(str(folder), has_weights=asked.load_format != "dummy")
    parsed = found.translated(checkpoint)
    settings.require_edits(chosen, parsed.spec)
    needs.check_heads(checkpoint, parsed)
    needs.check_context(checkpoint, parsed, asked)
    draft.check_draft(checkpoint, found, asked)
    compiler.require(asked)
    workers.bind(asked)
    from attnres_serve.bench import (
        baseline,
        document,
        kept,
        machine,
        process,
        report,
        session,
        text,
    )
    from attnres_serve.bench.measure import PROCEDURE
    from attnres_serve.bench.ratios import overheads

    longest = asked.length
    steps = QUICK_STEPS if own.quick else STEPS
    context = longest or needs.context(parsed.config)
    read = text.Text(folder) if drafted else None
    if read:
        context = min(context, len(read.tokens))
    cells = make_cells(context, own.prompt_lengths, own.batches, steps, drafted)
    if longest is None:  # its KV cache need not fit
        most = max(cell.context + cell.max_tokens(drafted) for cell in cells)
        flags = [*flags, f"--max-model-len={most}"]
    if not device.is_cpu() and not asked.has("gpu_memory_utilization"):
        flags = [*flags, "--gpu-memory-utilization=0.45"]  # both stay up
    starts = own.starts or (1 if own.quick else STARTS)
    rounds = QUICK_ROUNDS if own.quick else rounds_of(starts)
    budget = 60 * (own.budget or (inf if own.starts else MINUTES))
    output.say("start two engines: import vLLM, load the weights, compile")
    with kept.caches(folder) as (caches, twin):
        if drafted:
            compared, kind = DRAFTS, "the same engine without drafts"
            base = process.attnres(BASELINE, folder, flags, chosen, drafts=0)
        else:
            is_ours = baseline.is_ours(FAMILIES[parsed.base])
            compared, kind = ATTNRES, "attnres-serve without sites" if is_ours else "stock vLLM"
            baseline.write_twin(folder, found, twin)
            base = process.plain(BASELINE, twin, flags, has_plugin=is_ours)
        other = process.attnres(compared, folder, flags, chosen, drafted or None)
        draw = read.draw if read else None
        outcome = session.run([base, other], cells, starts, rounds, budget, draw, caches)
    facts = outcome.engines[compared]
    made = len(outcome.results)
    content = {
        **machine.repeatable(command, facts["gpu"]),
        "config": {
            "checkpoint": folder.name,
            "format": parsed.format,
            "backbone": parsed.base,
            "layers": parsed.config["num_hidden_layers"],
            "hidden_size": parsed.config["hidden_size"],
            "blocks": parsed.spec.num_blocks if parsed.spec else 0,
            "baseline": kind,
            **{key: facts[key] for key in ("dtype", "compiled", "backend", "algorithm")},
            "threads": machine.cores(),
            "flags": machine.shown(flags),
            "starts": made,
            "rounds": outcome.rounds.counted,
            "discarded": outcome.rounds.discarded,
            "procedure": PROCEDURE,
        },
        "took_s": outcome.took_s,
        "evidence_s": outcome.evidence_s,
        "ended_by": "starts" if made == starts else "budget",
        "overhead": overheads(outcome.results, compared, BASELINE),
        **document.content(outcome, BASELINE),
        "drafts": drafts.told([one[compared]["drafted"] for one in outcome.facts]),
    }
    made_of = document.Document.model_validate(content).model_dump()
    return made_of, report.render(made_of)
