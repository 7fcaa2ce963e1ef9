"""``attnres_serve.statistics``: what a server's sites attend to in the requests it serves."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.lens.ask import SERVERS, Server, request
from attnres_serve.lens.dataset import sources_of
from attnres_serve.lens.pictures import FIGURES
from attnres_serve.tracing.statistics import BINS, StatisticsAnswer

if TYPE_CHECKING:
    import xarray


def statistics(url: str, *, key: str | None = None) -> "xarray.Dataset":
    """What a server has counted since ``POST /v1/attn_res/statistics/start``.

    ``mean`` and ``second_moment`` of weights are by phase, site and source, NaN for no source and
    no token; ``entropy`` by phase and site, in nats; ``histogram``, by phase, site, source and bin,
    counts tokens by their weight from ``bin`` on; ``tokens`` by phase.

    Args:
        url: address of a server that runs.
        key: its API key; None for the one in OPENAI_API_KEY, if there is one.

    Raises:
        SettingError: one sentence that says why there are no statistics.  It is a ValueError.
    """
    import xarray

    answer = _statistics_of(Server(url, key))
    sources, phases = sources_of(answer.sites), [*answer.tokens]
    entropy = np.full((len(phases), len(answer.sites)), np.nan)
    table = np.full((*entropy.shape, len(sources), 2 + BINS), np.nan)
    for at, site in enumerate(answer.sites):
        columns = [sources.index(name) for name in site.sources]
        for row, phase in enumerate([site.prefill, site.decode]):
            if phase is not None:
                entropy[row, at] = phase.entropy
                every = np.column_stack([phase.mean, phase.second_moment, phase.histogram])
                table[row, at, columns] = every
    axes, counts = ("phase", "site", "source"), [*answer.tokens.values()]
    sizes = {"mean": (axes, table[..., 0]), "second_moment": (axes, table[..., 1])}
    others = {"entropy": (axes[:2], entropy), "tokens": ("phase", counts)}
    histogram = {"histogram": ((*axes, "bin"), table[..., 2:])}
    edges, sites = np.arange(BINS) / BINS, [site.index for site in answer.sites]
    names = {"phase": phases, "site": sites, "source": sources, "bin": edges}
    facts = answer.model_dump(include={"model", "weights", "sequences", "cost", "seconds"})
    return xarray.Dataset(sizes | others | histogram, names, facts)


def _statistics_of(server: Server) -> StatisticsAnswer:
    path = "/v1/attn_res/statistics"
    return request(server, "GET", path, read=StatisticsAnswer.model_validate_json)


def drew(source: str, path: Path, width: float | None) -> bool:
    """Draw the means of a server at an address, or of a file; False for a file of something else.

    Raises:
        SettingError: there are none, nothing was counted, or no such figure can be written.
    """
    try:
        if source.startswith(SERVERS):
            answer = _statistics_of(Server(source))
        else:
            answer = StatisticsAnswer.model_validate_json(Path(source).read_bytes())
    except (OSError, ValidationError):
        return False
    phases = [name for name, count in answer.tokens.items() if count]
    if not phases or path.suffix.lower() not in FIGURES:
        raise SettingError(f"{source}: statistics are a figure of counted tokens; --out is {path}.")
    from attnres_serve.lens import figure

    panels = {
        f"{phase}, mean over {answer.tokens[phase]:,} tokens": [
            np.array(getattr(site, phase).mean) for site in answer.sites
        ]
        for phase in phases
    }
    title = f"{Path(answer.model).name}: attention over depth, as served"
    drawn = partial(figure.weights, title, answer.sites, panels)
    try:
        figure.write(path, drawn, width or figure.WIDTH)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error}).") from None
    print(path, file=output.out())
    return True
