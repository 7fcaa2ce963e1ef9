// Numbers by depth beside the heat maps: the mean over tokens, where most of them are, one token.
import { frame } from "./depth_map.js";
import { PARTIAL, mean, spread } from "./trace.js";
import { LETTER, label, root, svg, ticks } from "./svg.js";

export const MARKS = {
  attention: "circle",
  mlp: "square",
  mixer: "circle",
  final: "diamond",
};

/** Root mean square of the newest source of every site: the partial sum, or the block just finished. */
export function magnitude(summary, options) {
  const { sites, isFull, blocks } = summary;
  const newest = sites.map(({ rms }) => rms.map((row) => row.at(-1)));
  const at = (rows) => rows.map((row) => ({ row, values: newest[row] }));
  let lines;
  if (isFull) {
    // Outputs of attention and MLP, which differ.
    lines = ofKinds(sites.slice(0, -1), (row) => row + 1).map(([kind, rows]) => ({
      colour: options.ink[kind],
      points: at(rows),
      mark: () => MARKS[kind],
    }));
    lines.push({ colour: options.ink.neutral, points: at([0]), mark: () => "triangle" });
  } else {
    const starts = blocks.map(({ first }) => first);
    const anew = starts
      .filter((first) => sites[first].sources.at(-1) !== PARTIAL)
      .map((first) => first + 1);
    const ends = [...new Set([0, ...anew, sites.length])].sort((one, other) => one - other);
    lines = ends.slice(0, -1).map((begin, which) => ({
      colour: options.ink.neutral,
      points: at(sites.slice(begin, ends[which + 1]).map(({ row }) => row)),
      mark: (row) => (starts.includes(row) ? "triangle" : null),
    }));
  }
  const all = newest.flat().filter((value) => value > 0);
  const least = all.reduce((one, other) => Math.min(one, other), Infinity);
  const most = all.reduce((one, other) => Math.max(one, other), 0) || 1; // nothing but zeros
  return profile(summary, lines, {
    ...options,
    title: ["rms of the newest source", "rms"],
    least,
    most,
    isLog: most > 30 * least,
  });
}

/** Entropy of the weights of every site, left of the most that it could be. */
export function entropy(summary, options) {
  const { sites } = summary;
  const lines = ofKinds(sites, (row) => row).map(([kind, rows]) => ({
    colour: options.ink[kind],
    points: rows.map((row) => ({ row, values: sites[row].entropy })),
    mark: () => MARKS[kind],
  }));
  const bound = sites.map(({ sources }) => Math.log(sources.length));
  return profile(summary, lines, {
    ...options,
    title: ["entropy, nats", "nats"],
    least: 0,
    most: Math.max(...bound, 1e-9),
    bound,
  });
}

function ofKinds(sites, rowOf) {
  const rows = new Map();
  for (const { kind, row } of sites) rows.set(kind, [...(rows.get(kind) ?? []), rowOf(row)]);
  return [...rows];
}

/**
 * A panel whose rows are those of the heat maps; ``show`` draws the crosses of a token.
 *
 * lines: each with a ``colour``, ``points`` (a row and its values by token) and ``mark`` of a row.
 */
function profile(
  summary,
  lines,
  { width, rowHeight, ink, hasBlocks, title, least, most, isLog, bound },
) {
  const { sites, blocks } = summary;
  const [left, right] = [8, hasBlocks ? 46 : 14];
  const height = frame.top + sites.length * rowHeight + frame.bottom;
  const bottom = height - frame.bottom;
  const across = width - left - right;
  const place = isLog
    ? (value) => left + (across * Math.log(Math.max(value, least) / least)) / Math.log(most / least)
    : (value) => left + (across * value) / most;
  const y = (row) => frame.top + (row + 0.5) * rowHeight;
  const marked = isLog ? decades(least, most) : ticks(most, Math.max(2, across / 40));
  const size = rowHeight < 8 ? 1.5 : 3;
  const name = title.find((text) => text.length * LETTER < across + 20) ?? title[1];
  const crosses = svg("g", {});
  const node = root(
    width,
    height,
    ink,
    { role: "img" },
    ...(summary.areMarked
      ? bands(blocks, left, across, rowHeight, hasBlocks ? width : null, ink)
      : []),
    svg("path", {
      d: `M${left},${bottom}h${across}M${left},${frame.top}V${bottom}`,
      stroke: ink.faint,
      fill: "none",
    }),
    ...marked.map((value) =>
      label(String(Number(value.toPrecision(2))), place(value), bottom + 11, "middle"),
    ),
    label(name, left + across / 2, height - 8, "middle", { fill: ink.faint }),
    ...(bound ? [edge(bound, place, rowHeight, ink)] : []),
    ...lines.flatMap((line) => drawn(line, place, y, size)),
    crosses,
  );
  return {
    node,
    /** Mark a token, by its number in the trace. */
    show(token) {
      const points = lines.flatMap(({ colour, points }) =>
        points.map(({ row, values }) => cross(place(values[token]), y(row), size, colour)),
      );
      crosses.replaceChildren(...points);
    },
  };
}

function decades(least, most) {
  const ticks = [];
  for (let power = Math.ceil(Math.log10(least)); 10 ** power <= most; power++)
    ticks.push(10 ** power);
  return ticks;
}

/** Bands that tell blocks apart, with their numbers on the right of the last panel. */
function bands(blocks, left, across, rowHeight, edge, ink) {
  return blocks.flatMap(({ number, first, last }) => {
    const [top, height] = [frame.top + first * rowHeight, (last - first + 1) * rowHeight];
    const band = svg("rect", { x: left, y: top, width: across, height, fill: ink.band });
    const looks = { fill: ink.faint, "font-size": 10 };
    const name = label(`block ${number}`, edge - 4, top + height / 2, "end", looks);
    return [...(number % 2 ? [band] : []), ...(edge && height > 10 ? [name] : [])];
  });
}

function drawn({ colour, points, mark }, place, y, size) {
  const ranges = points.map(({ row, values }) => [row, ...spread(values)]);
  const means = points.map(({ row, values }) => [place(mean(values)), y(row), row]);
  const forth = ranges.map(([row, low]) => `${place(low)},${y(row)}`);
  const back = ranges.map(([row, , high]) => `${place(high)},${y(row)}`).reverse();
  return [
    svg("polygon", { points: [...forth, ...back].join(" "), fill: colour, "fill-opacity": 0.18 }),
    svg("polyline", {
      points: means.map(([x, at]) => `${x},${at}`).join(" "),
      fill: "none",
      stroke: colour,
    }),
    ...means.flatMap(([x, at, row]) => (mark(row) ? [symbol(mark(row), x, at, size, colour)] : [])),
  ];
}

/** The most that a number could be, as a staircase. */
function edge(bound, place, rowHeight, ink) {
  const steps = bound.map(
    (most, row) => `${row ? "L" : "M"}${place(most)},${frame.top + row * rowHeight}v${rowHeight}`,
  );
  return svg("path", {
    d: steps.join(""),
    fill: "none",
    stroke: ink.faint,
    "stroke-dasharray": "1.5,2.5",
  });
}

/** A small mark: a circle, square, diamond or triangle. */
export function symbol(kind, x, y, size, colour) {
  if (kind === "circle") return svg("circle", { cx: x, cy: y, r: size, fill: colour });
  const shapes = {
    square: `M${x - size},${y - size}h${2 * size}v${2 * size}h${-2 * size}z`,
    diamond: `M${x},${y - size * 1.4}l${size * 1.4},${size * 1.4}l${-size * 1.4},${size * 1.4}l${-size * 1.4},${-size * 1.4}z`,
    triangle: `M${x},${y - size * 1.3}l${size * 1.2},${size * 2.2}h${-size * 2.4}z`,
  };
  return svg("path", { d: shapes[kind], fill: colour });
}

/** The mark of one token. */
export function cross(x, y, size, colour) {
  const d = `M${x - size},${y - size}l${2 * size},${2 * size}m0,${-2 * size}l${-2 * size},${2 * size}`;
  return svg("path", { d, stroke: colour, "stroke-width": 1.3, fill: "none" });
}
