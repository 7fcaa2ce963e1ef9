// A trace on the page: the chosen token and cell, and everything that depends on them.
import { difference } from "./compare.js";
import { weightScale } from "./colours.js";
import { build, update } from "./figures.js";
import { showPredictions } from "./predictions.js";
import { readout, spokenCell } from "./readout.js";
import { spokenEdit, spokenRun } from "./sentences.js";
import { spoken, textOf } from "./text.js";
import { onTheme } from "./theme.js";
import { colourTokens, markToken, showTokens } from "./tokens.js";
import { liveliest, meansOf, sourceName, summarise } from "./trace.js";

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const listeners = [];
let view = null; // see ``build`` and ``update``
let drawnWidth = 0; // pixels, of all figures
let kept = null; // the summary of the baseline run

/** Call a function whenever another token or cell is chosen. */
export function onChoice(act) {
  listeners.push(act);
}

/** The readable name of a source of the shown trace. */
export function nameOfSource(source) {
  return view ? view.summary.nameOf(source) : sourceName(source);
}

/** The shown trace. */
export function shownTrace() {
  return view.summary.trace;
}

/**
 * The chosen site, source and token of the trace, or null; ``isOnly``: whether the site has only
 * this source; ``isSaved``: whether the trace is from a file.
 */
export function choice() {
  if (!view) return null;
  const site = view.cell && view.summary.sites[view.cell.row];
  return {
    token: view.summary.trace.tokens[view.token].position,
    site: site?.index ?? null,
    source: site?.sources[view.cell.column] ?? null,
    isOnly: site?.sources.length === 1,
    isSaved: view.isSaved,
  };
}

/** The cell of a site and a source, or null. */
export function cellOf(index, source) {
  const site = view?.summary.sites.find((one) => one.index === index);
  const column = site?.sources.indexOf(source) ?? -1;
  return column < 0 ? null : { row: site.row, column };
}

/**
 * Show a trace.
 *
 * selection: the ``token`` (a position), and the ``site`` and ``source`` to choose if they exist.
 * isSaved: whether the trace is from a file instead of a run.
 * lens: a separate lens of the last tokens, or null.  served: the server's statistics, or null.
 */
export function show(trace, selection = {}, isSaved = false, { lens = null, served = null } = {}) {
  if (trace.tokens.length === 0) throw new Error("the trace has no token");
  const summary = summarise(trace, lens);
  const comparison = kept && difference(summary, kept);
  const token = trace.tokens.findIndex(({ position }) => position === selection.token);
  view = {
    summary,
    isSaved,
    kept: comparison,
    served: served && meansOf(served, trace),
    mode: comparison ? "difference" : "mean",
    token: token < 0 ? trace.tokens.length - 1 : token,
    cell: null,
    marks: [],
    nameOf: (cell, at = view.token) => spokenCell(summary, cell, at, comparison),
    point: (cell, at = view.token) => read(cell, at),
    pick: (cell) => pick(cell),
    pickOver: (cell, at) => {
      view.cell = cell;
      choose(at);
    },
  };
  view.cell = cellOf(selection.site, selection.source) ?? liveliest(summary);
  main.classList.remove("empty", "busy");
  showTokens(trace.tokens, trace.prompt_tokens, choose);
  const offered = { mean: true, served: view.served, difference: comparison, token: comparison };
  for (const option of byId("mode").options) option.disabled = !offered[option.value];
  byId("mode").value = view.mode;
  const edits = (trace.edits ?? []).map((edit) => spokenEdit(edit, summary.nameOf));
  byId("previous").hidden = true;
  byId("edited").hidden = edits.length === 0;
  byId("edited").textContent = `Edited: ${edits.join("; ")}.`;
  if (kept) sayKept(comparison ? "Compared with" : "Not compared, for its sites or sources differ:");
  draw();
}

/** Show no trace. */
export function hide() {
  main.classList.add("empty");
  main.classList.remove("busy");
  view = null;
}

/** End the wait without a new trace: the old one stays, marked as the previous run. */
export function stay() {
  main.classList.remove("busy");
  if (!view) return;
  const what = view.isSaved ? "Opened trace" : "Previous run";
  byId("previous").textContent = `${what}: the last request gave no trace.`;
  byId("previous").hidden = false;
}

/** Dim the trace while another one is computed. */
export function wait() {
  main.classList.add("busy");
}

/** Put signs on cells: ``{ row, column, sign }``. */
export function mark(marks) {
  if (!view) return;
  view.marks = marks;
  refresh();
}

function sayKept(how) {
  byId("kept").textContent = `${how} the baseline: ${spokenRun(kept)}.`;
}

/** Draw everything that depends on the size, the theme or the comparison. */
function draw() {
  const modes = {
    mean: "Depth attention, mean over tokens",
    served: "Depth attention, mean of what is served",
    difference: "Difference of means",
  };
  view.modeTitle = modes[view.mode] ?? "Difference at the chosen token";
  drawnWidth = byId("figures").clientWidth;
  build(view);
  refresh();
}

/** Show everything that depends on the choice. */
function refresh() {
  const { summary, token, cell } = view;
  const { tokens, logprobs, total_tokens, prompt_tokens } = summary.trace;
  update(view);
  markToken(token);
  const site = cell && summary.sites[cell.row];
  const { colour } = weightScale(summary.widest);
  colourTokens(site && ((at) => colour(site.weights[at][cell.column])));
  byId("coloured").hidden = !cell;
  if (cell)
    byId("coloured-by").textContent =
      `Coloured by the weight of site ${site.index} (${site.name}) on ${summary.nameOf(site.sources[cell.column])}.`;
  const { position, id } = tokens[token];
  const part = position < prompt_tokens ? "prompt" : "answer";
  byId("chosen").textContent =
    `Chosen: ${spoken(tokens[token])}${textOf(tokens[token]) === null ? "" : ` (id ${id})`}, of the ${part}, in a sequence of length ${total_tokens}.`;
  const runs = logprobs ? [[logprobs.edited ? "Without edits" : "", logprobs.unedited[token]]] : [];
  if (logprobs?.edited) runs.push(["With edits", logprobs.edited[token]]);
  byId("follows-card").hidden = runs.length === 0;
  const after = tokens[token + 1]?.position === position + 1 ? tokens[token + 1] : null;
  showPredictions(byId("follows"), runs, after);
  read(cell, token);
  listeners.forEach((act) => act());
}

/** Describe a cell below the figures; by default, the chosen one. */
function read(cell, at) {
  const shown = cell ?? view.cell;
  byId("readout").replaceChildren(
    ...(shown
      ? readout(view.summary, shown, at, view.kept)
      : [
          "Point at a cell, or reach it with the arrow keys, to read its numbers. Click it, or press Enter, to colour the tokens by it.",
        ]),
  );
}

function choose(index) {
  view.token = index;
  refresh();
}

function pick(cell) {
  view.cell = cell;
  refresh();
}

byId("plain").addEventListener("click", () => {
  pick(null);
  byId("tokens").querySelector('[aria-selected="true"]').focus();
});

byId("mode").addEventListener("change", () => {
  view.mode = byId("mode").value;
  draw();
});

byId("keep").addEventListener("click", () => {
  kept = view.summary;
  sayKept("The next run is compared with");
});

byId("help").addEventListener("click", () => byId("guide").showModal());
byId("close").addEventListener("click", () => byId("guide").close());

// Sizes and themes.

new ResizeObserver(() => {
  if (view && byId("figures").clientWidth !== drawnWidth) draw();
}).observe(byId("figures"));
onTheme(() => {
  if (view) draw();
});
