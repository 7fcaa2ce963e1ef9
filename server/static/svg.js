// Elements of HTML and SVG, and axes: what every figure is made of.

const NS = "http://www.w3.org/2000/svg";
const FONT = 11; // pixels
export const LETTER = 0.6 * FONT; // about the width of one

/** An SVG element with attributes and children. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(NS, name), attributes, children);
}

/** The same of HTML. */
export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes))
    if (value !== null) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A text; ``x`` and ``y`` are where its anchor and its middle are. */
export function label(text, x, y, anchor = "start", attributes = {}) {
  const place = { x, y, "dominant-baseline": "central", "text-anchor": anchor };
  return svg("text", { ...place, ...attributes }, text);
}

/** The root of a figure. */
export function root(width, height, ink, attributes, ...children) {
  const size = { viewBox: `0 0 ${width} ${height}`, width, height };
  const font = { "font-family": "system-ui, sans-serif", "font-size": FONT, fill: ink.text };
  return svg("svg", { ...size, ...font, ...attributes }, ...children);
}

/** Numbers from 0 to ``most``, at most ``count`` of them, in steps of 1, 2 or 5. */
export function ticks(most, count) {
  const rough = most / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ([1, 2, 5].find((times) => times * unit >= rough) ?? 10);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, at) => at * step);
}

/** A step of 1, 2, 5, 10, ... between labels of which there is room for ``most``. */
export function stepFor(count, most) {
  for (let unit = 1; ; unit *= 10)
    for (const times of [1, 2, 5]) if (count / (times * unit) <= most) return times * unit;
}

/** A number as a person reads it. */
export function number(value) {
  if (value === 0) return "0";
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(3);
}
