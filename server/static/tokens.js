// The tokens of a trace as a list to choose from, coloured by one cell's weight.
import { inkOn } from "./colours.js";
import { html } from "./svg.js";
import { spoken, unnamed, visible } from "./text.js";

const list = document.getElementById("tokens");
let chosen = 0;
let act = () => {};

const options = () => list.querySelectorAll('[role="option"]');

/** Show tokens; those from position ``answerStart`` on are the answer's. */
export function showTokens(tokens, answerStart, onChoose) {
  act = onChoose;
  chosen = 0;
  list.replaceChildren(...tokens.flatMap((token, index) => chip(token, index, answerStart)));
}

/** A token that can be chosen, and a line break where its text has one. */
function chip(token, index, answerStart) {
  const attributes = {
    role: "option",
    "aria-label": spoken(token),
    title: unnamed(token),
    "aria-selected": "false",
    class: token.position < answerStart ? "prompt" : "answer",
    tabindex: -1,
    "data-index": index,
  };
  const span = html("span", attributes, ...visible(token));
  return token.text?.includes("\n") ? [span, html("br")] : [span];
}

/** Mark a token as chosen, and bring it into view within the list. */
export function markToken(index) {
  const all = options();
  for (const at of [chosen, index]) {
    all[at]?.setAttribute("aria-selected", String(at === index));
    if (all[at]) all[at].tabIndex = at === index ? 0 : -1; // one stop for the Tab key
  }
  chosen = index;
  const [box, around] = [all[index].getBoundingClientRect(), list.getBoundingClientRect()];
  if (box.top < around.top) list.scrollTop += box.top - around.top - 8;
  if (box.bottom > around.bottom) list.scrollTop += box.bottom - around.bottom + 8;
  if (box.left < around.left) list.scrollLeft += box.left - around.left - 24;
  if (box.right > around.right) list.scrollLeft += box.right - around.right + 24;
}

/** Colour the tokens by what ``colourOf`` says of each, or not at all (null). */
export function colourTokens(colourOf) {
  options().forEach((span, index) => {
    const colour = colourOf?.(index) ?? "";
    span.style.backgroundColor = colour;
    span.style.color = colour && inkOn(colour);
  });
  list.classList.toggle("coloured", colourOf !== null);
}

/** The token above or below, nearest to the middle of the chosen one. */
function neighbour(step) {
  const all = [...options()];
  const middle = ({ left, right }) => (left + right) / 2;
  const from = all[chosen].getBoundingClientRect();
  let best = chosen;
  let line = null;
  for (let at = chosen + step; at >= 0 && at < all.length; at += step) {
    const box = all[at].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) >= 2) break;
    const distance = (one) => Math.abs(middle(one) - middle(from));
    if (best === chosen || distance(box) < distance(all[best].getBoundingClientRect())) best = at;
  }
  return best;
}

const KEYS = {
  ArrowLeft: () => Math.max(0, chosen - 1),
  ArrowRight: () => Math.min(options().length - 1, chosen + 1),
  ArrowUp: () => neighbour(-1),
  ArrowDown: () => neighbour(1),
  Home: () => 0,
  End: () => options().length - 1,
};

list.addEventListener("keydown", (event) => {
  if (!(event.key in KEYS) || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  act(KEYS[event.key]());
  options()[chosen].focus({ preventScroll: true });
});

list.addEventListener("click", (event) => {
  const option = event.target.closest('[role="option"]');
  if (!option) return;
  act(Number(option.dataset.index));
  option.focus({ preventScroll: true });
});
