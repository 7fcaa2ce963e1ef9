"""How much the loss of texts grows when one site cannot read one source."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from attnres_serve import address, output
from attnres_serve.depth import edit_text
from attnres_serve.depth.edits import Edit
from attnres_serve.errors import SettingError
from attnres_serve.lens import ask, losses
from attnres_serve.lens.ask import Server
from attnres_serve.lens.losses import Losses, Mask
from attnres_serve.lens.pictures import FIGURES
from attnres_serve.tracing.answer import TraceAnswer
from attnres_serve.tracing.options import TraceOptions

SUFFIXES = (".json", ".csv", *FIGURES)
FEWEST = 4  # texts of ``--prune``, so that both halves have a standard error
CHOOSING, REPORTING = slice(0, None, 2), slice(1, None, 2)


def measure(
    server: Server, texts: Sequence[str], path: Path, limit: float | None, width: float | None
) -> Iterator[str]:
    """Measure by a server, which has no edits afterwards, and write a file.

    Args:
        server: one whose edits may change.
        texts: whose loss it is.
        path: of the file, with one of ``SUFFIXES``; the losses of each text stand beside it.
        limit: of what chosen masks cost together, in nats per token; None to choose none.
        width: of a figure, in inches; None for the default.

    Yields lines for the user.

    Raises:
        SettingError: a file cannot be read or written, or the server does not answer.
    """
    trace = ask.ask(server, [0], TraceOptions.model_validate({"tokens": [0]}))  # for the sites
    several = [site for site in trace.sites if len(site.sources) > 1]
    masks = [(site.index, source) for site in several for source in site.sources]
    try:
        with address.past_proxies(server.url), httpx.Client() as client:
            measured = Losses(server, client, trace.model, texts, losses_of(path))
            try:
                with output.bar(iterable=masks, unit="mask", desc="measuring") as bar:
                    for site, source in bar:
                        bar.set_description(f"measuring site {site} without {source}")
                        measured.under([(site, source)])
                _write(measured, trace, path, width)
                yield str(path)
                if limit is not None:
                    yield from _pruned(measured, masks, limit)
            finally:
                measured.serve(())
    except OSError as error:
        raise SettingError(f"--importance: {path} cannot be written ({error}).") from None


def losses_of(path: Path) -> Path:
    """The file with the losses of each text."""
    return path.with_suffix(".losses.jsonl")


def _write(measured: Losses, trace: TraceAnswer, path: Path, width: float | None) -> None:
    """Write the increases of the sites of a trace; a site with one source has none."""
    rows: list[dict[str, Any]] = []
    each = []
    for site in trace.sites:
        facts = {"site": site.index, "layer": site.layer, "kind": site.kind}
        for name in site.sources if len(site.sources) > 1 else ():
            mean, error = measured.increase([(site.index, name)])
            rows.append({**facts, "source": name, "increase": mean, "standard_error": error})
        each.append(np.array([row["increase"] for row in rows if row["site"] == site.index]))
    tokens = int(measured.tokens.sum())
    if path.suffix.lower() in FIGURES:
        from attnres_serve.lens import figure

        title = f"{Path(trace.model).name}: increase of the loss without a source"
        panels = {f"of {len(measured.tokens)} texts, {tokens:,} tokens": each}
        far = max(abs(row["increase"]) for row in rows)
        drawn = partial(figure.weights, title, trace.sites, panels, far=far)
        figure.write(path, drawn, width or figure.WIDTH)
    elif path.suffix.lower() == ".csv":
        import pandas

        table = pandas.DataFrame(rows).astype({"layer": "Int64"})
        table.to_csv(path, index=False, float_format="%.9f", lineterminator="\n")
    else:
        head = {"model": trace.model, "texts": len(measured.tokens), "tokens": tokens}
        more = {"loss": float(measured.under(()).sum() / tokens), "masks": rows}
        path.write_text(json.dumps(head | more) + "\n", encoding="utf-8")


def _pruned(measured: Losses, masks: Sequence[Mask], limit: float) -> Iterator[str]:
    """Choose masks by half of the texts, the cheapest first, and say what they cost the others."""
    alone = {mask: measured.increase([mask], CHOOSING)[0] for mask in masks}
    cheap = sorted((mask for mask in masks if alone[mask] < limit), key=alone.__getitem__)
    left = [site for site, _ in masks]  # once for each source that it reads
    chosen: list[Mask] = []
    with output.bar(iterable=cheap, unit="mask", desc="pruning") as bar:
        for mask in bar:
            bar.set_description(f"pruning, {len(chosen)} masks")
            more = [*chosen, mask]
            if left.count(mask[0]) > 1 and measured.increase(more, CHOOSING)[0] < limit:
                chosen = more
                left.remove(mask[0])
    yield f"{len(chosen)} of {len(masks)} masks cost less than {limit:g} nats per token:"
    for name, half in (("chose them", CHOOSING), ("did not", REPORTING)):
        mean, error = measured.increase(chosen, half)
        yield f"  {mean:+.4f} (standard error {error:.4f}) by the texts that {name}"
    for edit in losses.edits(chosen):
        yield f'--edit "{edit_text.write(Edit.model_validate(edit))}"'  # no name has a quote
