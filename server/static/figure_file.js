// A figure as a file: with the title, axis, scale and legend that the page has beside it.
import { AXIS, BAR, bar, frame, layers } from "./depth_map.js";
import { legend } from "./legend.js";
import { label, root, svg } from "./svg.js";

const TITLE = { top: 28, size: 13, letter: 8.5 }; // pixels
const LEAST_BAR = 48; // pixels, between the ends of a scale

/**
 * The text of an SVG file.
 *
 * figure: as it stands on the page, whose label is the title.
 * options: its ``name``, ``summary``, ``rowHeight`` and ``ink``, ``hasAxis`` if layers are to stand
 * on its left, and the ``scale`` of a colour bar on its right (or null).
 */
export function figureFile(figure, { name, summary, rowHeight, ink, hasAxis, scale }) {
  const title = figure.getAttribute("aria-label");
  const [left, top] = [hasAxis ? AXIS : 0, TITLE.top];
  const [right, bottom] = ["width", "height"].map((side) => Number(figure.getAttribute(side)));
  const high = scale ? Math.max(LEAST_BAR, bottom - frame.top - frame.bottom) : 0;
  const below = top + Math.max(bottom, high + frame.top + frame.bottom);
  const width = Math.max(left + right + (scale ? BAR + 8 : 0), title.length * TITLE.letter + 16);
  const key = legend(summary, width, ink, name);
  const height = below + Number(key.getAttribute("height"));
  const copy = root(
    width,
    height,
    ink,
    { role: "img", "aria-label": title },
    svg("rect", { width, height, fill: ink.background }),
    label(title, 8, top / 2, "start", { "font-size": TITLE.size, "font-weight": "bold" }),
    ...(hasAxis ? [moved(0, top, layers(summary.sites, rowHeight, ink))] : []),
    moved(left, top, figure.cloneNode(true).childNodes),
    ...(scale ? [moved(0, top, bar(scale, left + right + 8, high, ink))] : []),
    moved(0, below, key.childNodes),
  );
  for (const shown of copy.querySelectorAll(".ring")) shown.remove();
  return new XMLSerializer().serializeToString(copy);
}

function moved(x, y, nodes) {
  return svg("g", { transform: `translate(${x},${y})` }, ...nodes);
}
