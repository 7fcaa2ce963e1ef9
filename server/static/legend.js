// What the marks of the figures mean, as a figure of its own.
import { LETTER, label, root, svg } from "./svg.js";
import { cross, symbol } from "./profile.js";

const MARKS = [
  ["attention", "attention", "circle"],
  ["mlp", "MLP", "square"],
  ["mixer", "sublayer", "circle"],
  ["final", "final norm", "diamond"],
];
const LINE = 18; // pixels

/** The legend of a trace, in as many lines as the width asks for. */
export function legend(summary, width, ink) {
  const kinds = new Set(summary.sites.map(({ kind }) => kind));
  const items = MARKS.filter(([kind]) => kinds.has(kind)).map(([kind, text, mark]) => [
    text,
    [stroke(ink[kind]), symbol(mark, 9, 0, 3, ink[kind])],
  ]);
  items.push(
    ["mean over tokens", [stroke(ink.neutral)]],
    [
      "10 to 90 % of tokens",
      [
        svg("rect", {
          x: 0,
          y: -5,
          width: 18,
          height: 10,
          fill: ink.neutral,
          "fill-opacity": 0.25,
        }),
      ],
    ],
    ["chosen token", [cross(9, 0, 3, ink.neutral)]],
    ["even weights", [stroke(ink.faint, "1.5,2.5")]],
    [summary.isFull ? "embedding" : "finished block", [symbol("triangle", 9, 0, 3, ink.neutral)]],
  );
  if (summary.areMarked)
    items.push([
      "sum of the open block",
      [svg("rect", { x: 4, y: -5, width: 10, height: 10, fill: "none", stroke: ink.text })],
    ]);
  let [x, y] = [8, 10];
  const places = items.map(([text, marks]) => {
    const size = 40 + text.length * LETTER;
    if (x > 8 && x + size > width) [x, y] = [8, y + LINE];
    const item = svg("g", { transform: `translate(${x},${y})` }, ...marks, label(text, 24, 0));
    x += size;
    return item;
  });
  return root(width, y + 10, ink, { role: "img", "aria-label": "Legend" }, ...places);
}

function stroke(colour, dash = null) {
  return svg("path", {
    d: "M0,0h18",
    stroke: colour,
    "stroke-width": 1.5,
    "stroke-dasharray": dash,
  });
}
