// The numbers of one cell: as small tables, and for who hears them.
import { html, number } from "./svg.js";
import { quoted } from "./text.js";
import { mean, spread } from "./trace.js";

/**
 * The title of a cell at a token; its numbers, each with a name, the token's, the mean and the
 * range; and the most probable tokens by the mix and by the source alone, or null.
 *
 * comparison: the ``difference`` from a baseline run, or null.
 */
function read(summary, { row, column }, token, comparison) {
  const site = summary.sites[row];
  const most = number(Math.log(site.sources.length));
  const measures = [
    ["weight", site.weights.map((weights) => weights[column])],
    ["rms", site.rms.map((rms) => rms[column])],
    [`entropy (at most ${most})`, site.entropy],
  ];
  const lines = measures.map(([name, values]) => [
    name,
    number(values[token]),
    number(mean(values)),
    spread(values).map(number).join(" to "),
  ]);
  if (comparison) {
    const here = comparison.token(token);
    const change = here && number(here[row][column]); // null if the baseline has another token
    lines.push(["difference from baseline", change, number(comparison.mean[row][column]), ""]);
  }
  const isRead = site.lens?.[token]?.top.length;
  return {
    title: `Site ${site.index}, ${site.name}, reads ${summary.nameOf(site.sources[column])}`,
    lines,
    lens: isRead ? [site.lens, site.sourceLens[column]].map((lens) => lens[token].top) : null,
  };
}

/** The title and the tables of a cell at a token. */
export function readout(...cell) {
  const { title, lines, lens } = read(...cell);
  const tables = html("div", { class: "tables" });
  tables.append(table(["", "this token", "mean", "10 to 90 %"], lines));
  if (lens) tables.append(predictions(...lens));
  return [html("p", {}, title), tables];
}

/** The same as text. */
export function spokenCell(...cell) {
  const { title, lines, lens } = read(...cell);
  const numbers = lines.map(([name, here, over, range]) => {
    const most = range && ` (10 to 90 %: ${range})`;
    const change = here ? ` ${here}` : ": the baseline has another token here";
    return `${name}${change}, mean ${over}${most}`;
  });
  const named = (top) => top.map((one) => likely(one).join(" ")).join(", ");
  const [mix, source] = lens?.map(named) ?? [];
  const predicted = lens ? [`its mix predicts ${mix}`, `the source alone ${source}`] : [];
  return `${[title, ...numbers, ...predicted].join("; ")}.`;
}

function predictions(mix, source) {
  const lines = mix.map((one, rank) => [...likely(one), ...likely(source[rank])]);
  const made = table(["its mix predicts", "", "the source alone", ""], lines);
  for (const one of made.querySelectorAll("tbody :is(th, td:nth-child(3))"))
    one.className = "token";
  return made;
}

function likely(one) {
  return one ? [quoted(one), number(Math.exp(one.logprob))] : ["", ""];
}

function table(heads, lines) {
  const made = html("table");
  made.createTHead().insertRow().append(...heads.map((head) => html("th", {}, head)));
  const body = made.createTBody();
  for (const [head, ...rest] of lines)
    body.insertRow().append(html("th", {}, head), ...rest.map((text) => html("td", {}, text ?? "another token")));
  return made;
}
