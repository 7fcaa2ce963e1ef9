"""``python docs/images/attnres.py``: draw Attention Residuals for the documents and the page.

The attributes hold the colours of light themes, and the style sheet those of dark ones, so the
picture needs no script and loads nothing.
"""

from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "docs" / "images" / "attnres.svg", ROOT / "server" / "static" / "attnres.svg")
SIZE = 880, 336
TITLE = "Attention Residuals"
DESCRIPTION = (
    "A site reads the token embedding, the finished blocks and the running partial sum of its own "
    "block, each with a weight from a softmax over depth. The mix is the input of the next "
    "sublayer, whose output joins the partial sum."
)
# Class: attribute, colour in light themes, colour in dark ones.
COLOURS = {
    "back": ("fill", "#f6f8fa", "#161b22"),
    "edge": ("stroke", "#d5dbe3", "#323a46"),
    "text": ("fill", "#1b2430", "#e6edf3"),
    "soft": ("fill", "#57606a", "#9aa6b6"),
    "line": ("stroke", "#57606a", "#9aa6b6"),
    "head": ("fill", "#57606a", "#9aa6b6"),
    "gold": ("fill", "#f2c14e", "#c9962a"),
    "teal": ("fill", "#8fcfc3", "#2f7f78"),
    "blue": ("fill", "#a9cdf0", "#2a5f96"),
    "open": ("stroke", "#1d5fa8", "#7cb8f0"),
    "site": ("fill", "#1d5fa8", "#2f74c0"),
    "beam": ("stroke", "#1d5fa8", "#7cb8f0"),
}
# Name, left edge, width, cells that are filled, cells, class of the cells, weight at the site.
SOURCES = (
    ("embedding", 32, 104, 1, 1, "gold", 0.14),
    ("block 1", 176, 184, 4, 4, "teal", 0.09),
    ("block 2", 400, 184, 4, 4, "teal", 0.46),
    ("partial sum", 624, 224, 2, 4, "blue", 0.31),
)
TOP, HEIGHT = 52, 46
SITE_X, SITE_Y, SITE_W, SITE_H = 236, 212, 288, 56


def paint(name: str) -> str:
    """Class and light colour of an element."""
    attribute, light, _ = COLOURS[name]
    return f'class="{name}" {attribute}="{light}"'


def text(x: float, y: float, words: str, name: str = "text", size: int = 15, **more: str) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return (
        f'<text {paint(name)} x="{x:g}" y="{y:g}" font-size="{size}"{extra}>{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, name: str, radius: int = 5) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
    return f"<rect {paint(name)} {place}/>"


def arrow(path: str) -> str:
    return (
        f'<path {paint("line")} fill="none" stroke-width="2" marker-end="url(#head)" d="{path}"/>'
    )


def source(index: int) -> list[str]:
    """A source, its sublayers as cells, and the beam of its weight to the site."""
    name, left, width, filled, cells, colour, weight = SOURCES[index]
    middle = left + width / 2
    parts = [text(middle, TOP - 14, name, text_anchor="middle", font_weight="600")]
    gap = 6
    side = (width - gap * (cells - 1)) / cells
    for cell in range(cells):
        x = left + cell * (side + gap)
        if cell < filled:
            parts.append(box(x, TOP, side, HEIGHT, colour))
        else:
            place = f'x="{x + 1:g}" y="{TOP + 1}" width="{side - 2:g}" height="{HEIGHT - 2}" rx="5"'
            parts.append(
                f'<rect {paint("open")} fill="none" stroke-width="1.5" '
                f'stroke-dasharray="5 4" {place}/>'
            )
        if cells > 1:
            kind = ("attn", "MLP")[cell % 2]
            parts.append(text(x + side / 2, TOP + 28, kind, size=12, text_anchor="middle"))
    # A partial sum is read where it is filled.
    begin = left + (side * filled + gap * (filled - 1)) / 2
    end = SITE_X + SITE_W * (0.14 + 0.24 * index)
    low, high = TOP + HEIGHT + 6, SITE_Y - 2
    bend = (low + high) / 2
    curve = f"M{begin:g} {low} C{begin:g} {bend:g} {end:g} {bend:g} {end:g} {high}"
    parts.append(
        f'<path {paint("beam")} fill="none" stroke-opacity="0.75" '
        f'stroke-width="{1 + 22 * weight:g}" d="{curve}"/>'
    )
    return parts


def weight_label(index: int) -> str:
    """The weight, beside the upper end of its beam."""
    _, left, width, filled, cells, _, weight = SOURCES[index]
    gap = 6
    side = (width - gap * (cells - 1)) / cells
    begin = left + (side * filled + gap * (filled - 1)) / 2
    return text(begin + 12, TOP + HEIGHT + 26, f"{weight:.2f}", "soft", 13)


def drawing() -> str:
    """The whole picture as SVG."""
    width, height = SIZE
    dark = "".join(f".{name}{{{kind}:{night}}}" for name, (kind, _, night) in COLOURS.items())
    right = SITE_X + SITE_W
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="title description" font-family="system-ui, sans-serif">',
        f'<title id="title">{TITLE}</title><desc id="description">{DESCRIPTION}</desc>',
        f"<style>@media (prefers-color-scheme:dark){{{dark}.on{{fill:#fff}}}}</style>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path {paint("head")} d="M0 0 8 4 0 8z"/></marker></defs>',
        box(0.5, 0.5, width - 1, height - 1, "back", 10),
        f'<rect {paint("edge")} fill="none" x="0.5" y="0.5" width="{width - 1}" '
        f'height="{height - 1}" rx="10"/>',
    ]
    for index in range(len(SOURCES)):
        parts += source(index)
    parts += [weight_label(index) for index in range(len(SOURCES))]
    middle = SITE_X + SITE_W / 2
    parts += [
        box(SITE_X, SITE_Y, SITE_W, SITE_H, "site", 8),
        f'<text class="on" fill="#fff" x="{middle:g}" y="{SITE_Y + 24}" font-size="15" '
        'font-weight="600" text-anchor="middle">site</text>',
        f'<text class="on" fill="#fff" x="{middle:g}" y="{SITE_Y + 43}" font-size="13" '
        'text-anchor="middle">softmax over depth, token by token</text>',
        arrow(f"M{right + 4} {SITE_Y + SITE_H / 2:g} H{right + 92}"),
        text(right + 46, SITE_Y + SITE_H / 2 - 10, "mix", "soft", 13, text_anchor="middle"),
        box(right + 96, SITE_Y, 128, SITE_H, "blue", 8),
        text(right + 160, SITE_Y + 24, "next sublayer", text_anchor="middle", font_weight="600"),
        text(right + 160, SITE_Y + 43, "attention or MLP", "text", 13, text_anchor="middle"),
        arrow(f"M{right + 228} {SITE_Y + SITE_H / 2:g} H{763.5} V{TOP + HEIGHT + 8}"),
        text(774, 160, "joins the sum", "soft", 13),
        text(
            width / 2,
            height - 24,
            "A plain residual stream gives every source the weight 1. "
            "Here each site has a learned query and chooses.",
            "soft",
            14,
            text_anchor="middle",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    for path in FILES:
        path.write_text(drawing(), encoding="utf-8")
