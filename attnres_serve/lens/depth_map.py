"""The depth map of a trace, as a file or as the output of a notebook cell."""

import base64
import html
import io
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from attnres_serve.tracing.answer import TraceAnswer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 24  # characters of a token in a title
IN_A_CELL = 6.0  # inches


def draw(trace: TraceAnswer, token: int, width: float) -> "Figure":
    """The weights of one token, and their mean over all tokens.

    Args:
        trace: a trace with all sites.
        token: position of a traced token.
        width: in inches.
    """
    from attnres_serve.lens import figure

    row = [one.position for one in trace.tokens].index(token)
    tables = [np.array(site.weights) for site in trace.sites]
    count = len(trace.tokens)
    panels = {
        _name(trace, row): [table[row] for table in tables],
        f"mean over {count} token{'s' * (count > 1)}": [table.mean(axis=0) for table in tables],
    }
    model = Path(trace.model).name or trace.model
    title = f"{model}: attention over depth{', edited' if trace.edits else ''}"
    return figure.weights(title, trace.sites, panels, width)


def write(
    trace: TraceAnswer, token: int, file: Path | IO[bytes], width: float | None = None
) -> None:
    """Write the figure of ``draw``, see ``figure.write``.

    Raises:
        OSError: the file cannot be written.
    """
    from attnres_serve.lens import figure

    figure.write(file, partial(draw, trace, token), width or figure.WIDTH)


def has_all_sites(trace: TraceAnswer) -> bool:
    """Whether a trace has all sites up to its last; with gaps, blocks would be drawn too long."""
    return [site.index for site in trace.sites] == [*range(len(trace.sites))]


def shown(trace: TraceAnswer, title: str) -> str | None:
    """The map of the last token as HTML; None without matplotlib, all sites or a token.

    It is a PNG, because viewers of untrusted notebooks remove inline SVG.

    Args:
        trace: the trace.
        title: the alternative text of the picture.
    """
    is_drawn = find_spec("matplotlib") and trace.sites and trace.tokens and has_all_sites(trace)
    if not is_drawn:
        return None
    content = io.BytesIO()
    write(trace, trace.tokens[-1].position, content, IN_A_CELL)
    data = base64.b64encode(content.getvalue()).decode()
    picture = f'src="data:image/png;base64,{data}"'
    return f'<img alt="{html.escape(title)}" width="700" {picture}>'


def _name(trace: TraceAnswer, row: int) -> str:
    """The title of a token's panel."""
    token = trace.tokens[row]
    if token.text is None:
        return f"token {token.position}, id {token.id}"
    text = token.text if len(token.text) <= LONGEST else f"{token.text[: LONGEST - 1]}…"
    return f"token {token.position}: {text!r}"
