"""``attnres-serve bench``: the latency of a checkpoint against its baseline."""

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
    make_cases,
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
    def add(flag: str, metavar: str, text: str, **options: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=text, **options)

    def switch(flag: str, text: str) -> None:
        parser.add_argument(flag, action="store_true", help=text)

    text = "tokens of prompts; decode follows the first (default: 128 512)"
    add("--prompt-lengths", "T", text, type=int, nargs="+")
    text = "of decode, or requests at a time (default: 1 8)"
    add("--batches", "B", text, type=int, nargs="+", default=BATCHES)
    add("--starts", "N", f"of both engines (default: {STARTS}; with --quick: 1)", type=int)
    text = "end before a start that would overrun it; the first start is always finished "
    text += f"(default: {MINUTES}; with --starts: none)"
    add("--budget", "MINUTES", text, type=float)
    switch("--quick", "one start, fewer steps: a rough estimate")
    switch("--json", "print the JSON document alone")
    add("--http", "URL", "measure the server there, by `vllm bench serve` and its flags")
    settings.add_arguments(parser)


def run(
    checkpoint: str | None, options: argparse.Namespace, flags: list[str], command: list[str]
) -> int:
    """Measure as the command line requests.

    A terminal gets a report.  Otherwise the last line on stdout is one JSON document, which
    ``--json`` prints alone.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        options: the flags of ``add_arguments``.
        flags: all other flags, of vLLM's engine or its client.
        command: the whole command line.

    Raises:
        CheckpointError, SettingError: the message is one sentence.
    """
    if checkpoint is None:
        raise SettingError(
            "bench needs a checkpoint as its first argument, the flags behind it: attnres-serve "
            "bench CHECKPOINT ..."
        )
    command = ["attnres-serve", *command]
    if options.starts is not None and options.starts < 1:
        raise SettingError(f"--starts is {options.starts}; expected at least 1.")
    if options.budget is not None and not 0 < options.budget < inf:
        raise SettingError(f"--budget is {options.budget:g}; expected a number of minutes above 0.")
    folder = hub.on_this_machine(checkpoint)
    if options.http:
        document, shown = _over_http(folder, options, flags, command)
    else:
        document, shown = _in_engines(checkpoint, folder, options, flags, command)
    if not options.json:
        print(shown, file=output.out())
    if options.json or not output.out().isatty():
        print(json.dumps(document), file=output.out())
    return 0


def _over_http(
    folder: Path, options: argparse.Namespace, flags: list[str], command: list[str]
) -> tuple[dict[str, Any], str]:
    """The document and the report of a running server."""
    from attnres_serve.bench.document import HttpDocument
    from attnres_serve.bench.machine import repeatable

    for name in OF_ENGINES:
        if getattr(options, name):
            raise SettingError(
                f"--{name.replace('_', '-')} does not go with --http, which measures a server as "
                "it is."
            )
    served = over_http.check_there(options.http, *over_http.model_and_headers(flags))
    loads = over_http.measure(folder, served, options, flags)
    document = HttpDocument.model_validate({**repeatable(command), "loads": loads})
    return document.model_dump(), over_http.render(loads)


def _refuse_uncomparable(vllm_arguments: Arguments) -> None:
    """Raise SettingError for a flag with which engines would differ, or skip timed work."""
    for name, why in REFUSED.items():
        if vllm_arguments.has(name):
            raise SettingError(f"--{name.replace('_', '-')} {why}")
    if vllm_arguments.enforce_eager and device.is_cpu():
        raise SettingError(
            "--enforce-eager makes a norm of vLLM's many operators on CPU, while AttnRes with its "
            "norm is one, so that AttnRes would seem faster than no AttnRes; leave it out to "
            "measure compiled engines, as `serve` starts them."
        )


def _in_engines(
    checkpoint: str, folder: Path, options: argparse.Namespace, flags: list[str], command: list[str]
) -> tuple[dict[str, Any], str]:
    """The document and the report of engines; mistakes are refused before torch is imported."""
    vllm_arguments = arguments.of_engine(
        flags, reading.ours(settings.add_arguments), names_of(add_arguments)
    )
    flags = [*vllm_arguments.vllm_argv]
    chosen = settings.from_flags(vllm_arguments.values) | settings.from_flags(vars(options))
    _refuse_uncomparable(vllm_arguments)
    drafted = drafts.requested(vllm_arguments)
    backend_choice.require(chosen.get(settings.BACKEND_KEY))
    model = checked.check_model(str(folder), has_weights=vllm_arguments.load_format != "dummy")
    parsed = model.translated(checkpoint)
    settings.require_edits(chosen, parsed.spec)
    needs.check_heads(checkpoint, parsed)
    needs.check_context(checkpoint, parsed, vllm_arguments)
    draft.check_draft(checkpoint, model, vllm_arguments)
    compiler.require(vllm_arguments)
    workers.bind(vllm_arguments)
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

    longest = vllm_arguments.length
    steps = QUICK_STEPS if options.quick else STEPS
    context = longest or needs.context(parsed.config)
    read = text.Text(folder) if drafted else None
    if read:
        context = min(context, len(read.tokens))
    cases = make_cases(context, options.prompt_lengths, options.batches, steps, drafted)
    if longest is None:  # the KV cache may be too small for the model's context
        most = max(case.context + case.max_tokens(drafted) for case in cases)
        flags = [*flags, f"--max-model-len={most}"]
    if not device.is_cpu() and not vllm_arguments.has("gpu_memory_utilization"):
        flags = [*flags, "--gpu-memory-utilization=0.45"]  # both engines stay in memory
    starts = options.starts or (1 if options.quick else STARTS)
    rounds = QUICK_ROUNDS if options.quick else rounds_of(starts)
    budget = 60 * (options.budget or (inf if options.starts else MINUTES))
    output.say("start two engines: import vLLM, load the weights, compile")
    with kept.caches(folder) as (caches, baseline_folder):
        if drafted:
            compared, kind = DRAFTS, "the same engine without drafts"
            base = process.attnres(BASELINE, folder, flags, chosen, drafts=0)
        else:
            has_plugin = baseline.needs_plugin(FAMILIES[parsed.family])
            compared, kind = ATTNRES, "attnres-serve without sites" if has_plugin else "stock vLLM"
            baseline.write_baseline(folder, model, baseline_folder)
            base = process.plain(BASELINE, baseline_folder, flags, has_plugin=has_plugin)
        other = process.attnres(compared, folder, flags, chosen, drafted or None)
        draw = read.draw if read else None
        outcome = session.run([base, other], cases, starts, rounds, budget, draw, caches)
    facts = outcome.engines[compared]
    made_starts = len(outcome.results)
    content = {
        **machine.repeatable(command, facts["gpu"]),
        "config": {
            "checkpoint": folder.name,
            "format": parsed.format,
            "backbone": parsed.family,
            "layers": parsed.config["num_hidden_layers"],
            "hidden_size": parsed.config["hidden_size"],
            "blocks": parsed.spec.num_blocks if parsed.spec else 0,
            "baseline": kind,
            **{key: facts[key] for key in ("dtype", "compiled", "backend", "algorithm")},
            "threads": machine.cores(),
            "flags": machine.shown(flags),
            "starts": made_starts,
            "rounds": outcome.rounds.counted,
            "discarded": outcome.rounds.discarded,
            "procedure": PROCEDURE,
        },
        "took_s": outcome.took_s,
        "evidence_s": outcome.evidence_s,
        "ended_by": "starts" if made_starts == starts else "budget",
        "overhead": overheads(outcome.results, compared, BASELINE),
        **document.content(outcome, BASELINE),
        "drafts": drafts.summary([one[compared]["drafted"] for one in outcome.facts]),
    }
    validated = document.Document.model_validate(content).model_dump()
    return validated, report.render(validated)
