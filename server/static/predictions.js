// What follows the chosen token: the most probable ones, and the one that does.
import { html, number } from "./svg.js";
import { short, unnamed } from "./text.js";

const MOST = 5; // that are shown; a file may have more

/** Fill the table of a token; ``runs`` are pairs of a title and a prediction. */
export function showPredictions(place, runs, next) {
  place.replaceChildren(...runs.map(([title, prediction]) => column(title, prediction, next)));
}

function column(title, { top, next: logprob }, next) {
  const shown = top.slice(0, MOST);
  const rows = shown.map((one) => row(one, next?.id === one.id));
  if (next && logprob !== null && !shown.some(({ id }) => id === next.id))
    rows.push(row({ ...next, logprob }, true));
  const head = title ? [html("h3", {}, title)] : [];
  return html("div", { class: "run" }, ...head, html("ol", {}, ...rows));
}

function row(token, isNext) {
  const share = Math.exp(token.logprob);
  const fill = html("span", { class: "fill" });
  fill.style.width = `${100 * share}%`;
  return html(
    "li",
    { class: isNext ? "next" : "" },
    html("span", { class: "token", title: unnamed(token) }, short(token, 14)),
    html("span", { class: "bar" }, fill),
    html("span", { class: "share" }, number(share)),
    ...(isNext ? [html("span", { class: "note" }, "follows")] : []),
  );
}
