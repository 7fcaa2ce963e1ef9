// The legend of the figures' marks, as a separate figure.
import { LETTER, label, root, svg } from "./svg.js";
import { MARKS, cross, symbol } from "./profile.js";
import { KINDS } from "./trace.js";

const LINE = 18; // pixels

/**
 * The legend of a trace, in as many lines as the width asks for.
 *
 * figure: the one whose marks alone it explains; without, those of all figures side by side and
 * of the tokens.
 */
export function legend(summary, width, ink, figure = null) {
  const shown = figure ? [figure] : ["weights", "magnitude", "entropy", "tokens"];
  const items = marks(summary, ink).filter(([, , ...of]) => of.some((one) => shown.includes(one)));
  let [x, y] = [8, 10];
  const places = items.map(([text, shapes]) => {
    const size = 40 + text.length * LETTER;
    if (x > 8 && x + size > width) [x, y] = [8, y + LINE];
    const item = svg("g", { transform: `translate(${x},${y})` }, ...shapes, label(text, 24, 0));
    x += size;
    return item;
  });
  return root(width, y + 10, ink, { role: "img", "aria-label": "Legend" }, ...places);
}

/** What each mark is called, how it looks, and the figures that have it. */
function marks(summary, ink) {
  const { sites, isFull, areMarked, hasIds } = summary;
  const kinds = new Set(sites.map(({ kind }) => kind));
  const ordered = Object.keys(KINDS).filter((kind) => kinds.has(kind));
  const maps = ["weights", "second"];
  const profiles = ["magnitude", "entropy"];
  const box = { x: 4, y: -5, width: 10, height: 10, fill: "none", stroke: ink.text };
  const wide = { x: 0, y: -5, width: 18, height: 10 };
  const band = svg("rect", { ...wide, fill: ink.neutral, "fill-opacity": 0.25 });
  const newest = isFull ? "embedding" : "finished block";
  return [
    ...ordered.map((kind) => [
      KINDS[kind],
      [stroke(ink[kind]), symbol(MARKS[kind], 9, 0, 3, ink[kind])],
      ...maps,
      "entropy",
      ...(isFull && kind !== "final" ? ["magnitude"] : []),
    ]),
    ["mean over tokens", [stroke(ink.neutral)], ...profiles],
    ["10 to 90 % of tokens", [band], ...profiles],
    ["chosen token", [cross(9, 0, 3, ink.neutral)], ...profiles],
    ["even weights", [stroke(ink.faint, "1.5,2.5")], "entropy"],
    [newest, [symbol("triangle", 9, 0, 3, ink.neutral)], "magnitude"],
    ...(areMarked ? [["partial sum", [svg("rect", box)], ...maps]] : []),
    ["probability of the token", [svg("rect", { ...wide, fill: ink.bar })], "lens"],
    ["chosen token", [svg("rect", box)], "over-tokens"],
    ...(hasIds
      ? [["id of a token without text", [label("#", 9, 0, "middle")], "tokens", "lens", "over-tokens"]]
      : []),
  ];
}

function stroke(colour, dash = null) {
  return svg("path", {
    d: "M0,0h18",
    stroke: colour,
    "stroke-width": 1.5,
    "stroke-dasharray": dash,
  });
}
