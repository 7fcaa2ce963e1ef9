"""A trace as the output of a notebook's cell."""

import base64
import html
import io
from importlib.util import find_spec

from attnres_serve.inspect.answer import Trace

DPI = 75  # as wide as a notebook's page


def shown(trace: Trace, title: str) -> str | None:
    """The figure of the last token as HTML; None without matplotlib, all sites or a token.

    It is a picture, as what shows a notebook that it does not trust removes inline SVG.

    Args:
        trace: the trace.
        title: what is read where the picture is not seen.
    """
    if find_spec("matplotlib") is None or not trace.sites or not trace.tokens:
        return None
    from matplotlib import style

    from attnres_serve.inspect import figure

    if not figure.has_all_sites(trace):
        return None
    content = io.BytesIO()
    with style.context(figure.STYLE):
        drawn = figure.draw(trace, trace.tokens[-1].position)
        drawn.savefig(content, format="png", dpi=DPI)
    data = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
