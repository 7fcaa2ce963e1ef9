// The numbers of one cell as small tables.
import { number } from "./svg.js";
import { quoted } from "./text.js";
import { mean, spread } from "./trace.js";

/** The title and the tables of a cell at a token; ``comparison`` as of ``spokenCell``, or null. */
export function readout(summary, { row, column }, token, comparison) {
  const site = summary.sites[row];
  const title = document.createElement("p");
  const source = summary.nameOf(site.sources[column]);
  title.textContent = `Site ${site.index}, ${site.name}, reads ${source}`;
  const lens = site.lens?.[token]?.top.length ? [predictions(site, column, token)] : [];
  const tables = document.createElement("div");
  tables.className = "tables";
  tables.append(numbers(site, row, column, token, comparison), ...lens);
  return [title, tables];
}

function numbers(site, row, column, token, comparison) {
  const most = number(Math.log(site.sources.length));
  const measures = [
    ["weight", site.weights.map((weights) => weights[column])],
    ["rms", site.rms.map((rms) => rms[column])],
    [`entropy, at most ${most}`, site.entropy],
  ];
  const lines = measures.map(([name, values]) => [
    name,
    number(values[token]),
    number(mean(values)),
    spread(values).map(number).join(" to "),
  ]);
  if (comparison) {
    const here = comparison.token(token);
    const change = here ? number(here[row][column]) : "another token";
    lines.push(["weight less the kept run's", change, number(comparison.mean[row][column]), ""]);
  }
  return table(["", "this token", "mean", "10 to 90 %"], lines);
}

function predictions(site, column, token) {
  const [mix, source] = [site.lens, site.sourceLens[column]].map((lens) => lens[token].top);
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
  const made = document.createElement("table");
  const first = made.createTHead().insertRow();
  for (const head of heads) first.append(cell("th", head));
  const body = made.createTBody();
  for (const [head, ...rest] of lines)
    body.insertRow().append(cell("th", head), ...rest.map((text) => cell("td", text)));
  return made;
}

function cell(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}
