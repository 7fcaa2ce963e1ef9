// The heat map of sites x sources: a staircase, with a frame around every partial sum.
import { PARTIAL } from "./trace.js";
import { grid } from "./grid.js";
import { LETTER, label, root, stepFor, svg } from "./svg.js";

const TOP = 6;
const BOTTOM = 34;
export const BAR = 58; // width of the colour bar and its numbers
export const AXIS = 34; // width of the numbers of layers
const MOST_LAYERS = 26;

/**
 * A figure of all sites; its ``paint`` colours it.
 *
 * options: ``width`` and ``rowHeight`` in pixels, ``ink``, ``hasLayers`` for labels on the left,
 * ``scale`` for a colour bar on the right (or null), and ``name``, ``point``, ``pick`` of ``grid``.
 */
export function depthMap(summary, { width, rowHeight, ink, hasLayers, scale, ...acts }) {
  const { sites, widest } = summary;
  const left = hasLayers ? AXIS + 12 : 12;
  const right = scale ? BAR : 6;
  const cell = { width: (width - left - right) / widest, height: rowHeight };
  const height = TOP + sites.length * rowHeight + BOTTOM;
  const rows = sites.map(({ sources }) => sources.length);
  const cells = grid({ rows, x: left, y: TOP, ...cell, ...acts });
  const signs = svg("g", { "pointer-events": "none", "aria-hidden": "true" });
  const node = root(
    width,
    height,
    ink,
    { role: "grid" },
    ...kinds(sites, left, rowHeight, ink),
    ...(hasLayers ? layers(sites, rowHeight, ink) : []),
    cells.node,
    ...(summary.areMarked ? frames(summary, left, cell, ink) : []),
    ...columns(summary, left, cell, height, ink),
    ...(scale ? bar(scale, width - BAR + 8, sites.length * rowHeight, ink) : []),
    signs,
    ...cells.rings,
  );
  return {
    node,
    paint: cells.paint,
    choose: cells.choose,
    /** Put a sign on cells ``{ row, column, sign }``. */
    mark(marks) {
      const size = Math.max(8, Math.min(rowHeight, cell.width, 16));
      const looks = { "font-size": size, "font-weight": "bold" };
      const halo = { fill: "#fff", stroke: "#000", "stroke-width": 2.5, "paint-order": "stroke" };
      const at = ({ row, column }) => [
        left + (column + 0.5) * cell.width,
        TOP + (row + 0.5) * rowHeight,
      ];
      signs.replaceChildren(
        ...marks.map((one) => label(one.sign, ...at(one), "middle", { ...looks, ...halo })),
      );
    },
  };
}

/** Where the rows of every panel begin, and what lies below them. */
export const frame = { top: TOP, bottom: BOTTOM };

/** The kind of every sublayer, as a strip on the left. */
function kinds(sites, left, rowHeight, ink) {
  return sites.map(({ kind, row }) =>
    svg("rect", {
      x: left - 8,
      y: TOP + row * rowHeight,
      width: 5,
      height: rowHeight,
      fill: ink[kind] ?? ink.faint,
    }),
  );
}

/** The numbers of the layers beside their rows. */
export function layers(sites, rowHeight, ink) {
  const places = new Map(); // layer: rows
  for (const { layer, row } of sites)
    if (layer !== null) places.set(layer, [...(places.get(layer) ?? []), row]);
  const most = Math.min(MOST_LAYERS, Math.max(1, (sites.length * rowHeight) / 14));
  const step = stepFor(places.size, most);
  const middle = (row) => TOP + (row + 0.5) * rowHeight;
  const isFinal = sites.at(-1).kind === "final";
  const last = middle(sites.length - 1);
  const at = [...places]
    .filter(([layer]) => layer % step === 0)
    .map(([layer, rows]) => [
      String(layer),
      middle(rows.reduce((sum, row) => sum + row, 0) / rows.length),
    ])
    .filter(([, y]) => !isFinal || last - y > 12);
  if (isFinal) at.push(["final", last]);
  const half = TOP + (sites.length * rowHeight) / 2;
  const turned = { fill: ink.faint, transform: `rotate(-90 8 ${half})` };
  const title = label("layer", 8, half, "middle", turned);
  return [title, ...at.map(([text, y]) => label(text, AXIS, y, "end"))];
}

/** A line between blocks, and a frame around every partial sum. */
function frames({ sites, blocks }, left, { width, height }, ink) {
  return blocks.flatMap(({ number, first, last }) => {
    const open = sites.slice(first, last + 1).filter(({ sources }) => sources.at(-1) === PARTIAL);
    const line = {
      x1: left,
      x2: left + number * width,
      stroke: ink.background,
      "pointer-events": "none",
    };
    const y = TOP + first * height;
    const frame = { fill: "none", stroke: ink.text, "stroke-width": 1.2, "pointer-events": "none" };
    const place = { x: left + number * width, y: TOP + (open[0]?.row ?? 0) * height };
    return [
      ...(first ? [svg("line", { ...line, y1: y, y2: y, "stroke-width": 1.5 })] : []),
      ...(open.length
        ? [svg("rect", { ...frame, ...place, width, height: open.length * height })]
        : []),
    ];
  });
}

/** The embedding, then numbers of blocks; the partial sum is in the column of its block. */
function columns({ sites, widest, isFull }, left, { width }, height, ink) {
  const kinds = isFull ? "sublayers by layer" : "blocks";
  const text = `source: embedding, ${kinds}`;
  const middle = left + (widest * width) / 2;
  const isShort = text.length * LETTER > widest * width + 30;
  const all = Array.from({ length: widest }, (_, column) => column);
  const labels = isFull ? layersOf(sites) : new Map(all.slice(1).map((column) => [column, column]));
  const room = Math.max(16, String(widest - 1).length * LETTER + 6); // for a number and a gap
  const step = Math.max(1, stepFor(labels.size + 1, (widest * width) / room));
  const at = [...labels].filter(
    ([column, number]) => number % step === 0 && column * width >= room,
  );
  return [
    ...[[0, "emb"], ...at].map(([column, text]) =>
      label(String(text), left + (column + 0.5) * width, height - BOTTOM + 11, "middle"),
    ),
    label(isShort ? "source" : text, middle, height - 8, "middle", { fill: ink.faint }),
  ];
}

/** The layers of a Full model, by the column of the first sublayer of each. */
function layersOf(sites) {
  const columns = new Map();
  for (const { index, layer } of sites)
    if (layer !== null && ![...columns.values()].includes(layer)) columns.set(index + 1, layer);
  return columns;
}

/** The colours of a scale, from its lowest value at the bottom. */
export function bar(scale, x, height, ink) {
  const steps = 60;
  const [low, high] = [scale.ticks[0], scale.ticks.at(-1)]; // at the places 0 and 1
  const rects = Array.from({ length: steps }, (_, at) =>
    svg("rect", {
      x,
      y: TOP + height * (1 - (at + 1) / steps),
      width: 8,
      height: height / steps + 0.5,
      fill: scale.colour(scale.at((at + 0.5) / steps)),
    }),
  );
  const yOf = (value) => TOP + height * (1 - scale.place(value));
  let free = Infinity;
  const numbers = [...scale.ticks].flatMap((value) => {
    const y = yOf(value);
    const isEnd = value === low || value === high;
    if (!isEnd && (free - y < 12 || y - yOf(high) < 12)) return [];
    free = y;
    const looks = { "font-size": 10, fill: ink.text };
    return [label(String(Number(value.toPrecision(2))), x + 12, y, "start", looks)];
  });
  const [end, below] = [x + BAR - 10, TOP + height + BOTTOM - 8];
  return [...rects, ...numbers, label(scale.name, end, below, "end", { fill: ink.faint })];
}
