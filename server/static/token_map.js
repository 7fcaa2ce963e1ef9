// The transposed heat map: what one site reads at every token, sources x tokens.
import { grid } from "./grid.js";
import { LETTER, label, root, svg } from "./svg.js";
import { short } from "./text.js";

const LEFT = 78; // at least, for the names of the sources
const MOST_HEIGHT = 180;

/**
 * A figure of one site; ``token`` frames a column, ``row`` names the chosen source.
 *
 * options: ``width``, ``ink``, ``scale``, ``nameOf`` a source, and ``name``, ``point``, ``pick`` of
 * ``grid``.
 */
export function tokenMap(site, tokens, { width, ink, scale, nameOf, ...acts }) {
  const { sources, weights } = site;
  const labels = sources.map((source) => nameOf(source));
  const left = Math.max(LEFT, ...labels.map((name) => name.length * LETTER + 8));
  const cell = {
    width: Math.min(28, (width - left - 6) / tokens.length),
    height: Math.max(3, Math.min(16, MOST_HEIGHT / sources.length)),
  };
  const isNamed = cell.width >= 11; // each token below its column
  const below = isNamed ? 58 : 18;
  const height = 4 + sources.length * cell.height + below;
  const bottom = 4 + sources.length * cell.height;
  const cells = grid({ rows: sources.map(() => tokens.length), x: left, y: 4, ...cell, ...acts });
  const step = Math.ceil(12 / cell.height);
  const names = labels.flatMap((name, row) =>
    row % step ? [] : [label(name, left - 6, 4 + (row + 0.5) * cell.height, "end")],
  );
  const under = tokens.map((token, column) => {
    const [x, y] = [left + (column + 0.5) * cell.width, bottom + 6];
    return label(short(token, 9), x, y, "end", { transform: `rotate(-90 ${x} ${y})` });
  });
  const now = svg("rect", {
    y: 2,
    width: cell.width,
    height: bottom,
    fill: "none",
    stroke: ink.text,
    "stroke-width": 1.5,
    "pointer-events": "none",
  });
  const order = label("tokens in their order", left, bottom + 10, "start", { fill: ink.faint });
  const node = root(
    width,
    height,
    ink,
    { role: "grid" },
    ...names,
    cells.node,
    now,
    ...(isNamed ? under : [order]),
    ...cells.rings,
  );
  cells.paint((row, column) => scale.colour(weights[column][row]));
  return {
    node,
    choose: cells.choose,
    /** Frame the column of a token. */
    show(token) {
      now.setAttribute("x", left + token * cell.width);
    },
  };
}
