// What follows the chosen token: the most probable ones, and the one that does.
import { number } from "./svg.js";
import { short } from "./text.js";

const MOST = 5; // that are shown; a file may have more

/** Fill the table of a token; ``runs`` are pairs of a title and a prediction. */
export function showPredictions(place, runs, next) {
  place.replaceChildren(...runs.map(([title, prediction]) => column(title, prediction, next)));
}

function column(title, { top, next: logprob }, next) {
  const box = element("div", "run");
  const list = element("ol", "");
  if (title) box.append(element("h3", "", title));
  top.slice(0, MOST).forEach((one) => list.append(row(one, next?.id === one.id)));
  if (next && logprob !== null && !top.slice(0, MOST).some(({ id }) => id === next.id))
    list.append(row({ ...next, logprob }, true));
  box.append(list);
  return box;
}

function row(token, isNext) {
  const share = Math.exp(token.logprob);
  const line = element("li", isNext ? "next" : "");
  const bar = element("span", "bar");
  const fill = element("span", "fill");
  fill.style.width = `${100 * share}%`;
  bar.append(fill);
  line.append(
    element("span", "token", short(token, 14)),
    bar,
    element("span", "share", number(share)),
  );
  if (isNext) line.append(element("span", "note", "follows"));
  return line;
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}
