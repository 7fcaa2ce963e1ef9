// Edits of what sites read, which the next run sends: their list, the buttons of the chosen cell,
// and signs on the cells that are edited.
import { forget } from "./failure.js";
import { spokenEdit } from "./sentences.js";
import { html } from "./svg.js";
import { cellOf, choice, mark, nameOfSource, onChoice, shownTrace } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const SIGNS = { mask: "✕", ban: "✕", force: "●" }; // older files have `ban` for `mask`
let list = [];

/** The edits of the next run. */
export function edits() {
  return list;
}

/** Replace the edits of the next run, or name and mark them as in the trace that is shown. */
export function setEdits(next = list) {
  list = next;
  byId("edit-list").replaceChildren(...list.map(item));
  byId("edits-none").hidden = list.length > 0;
  byId("clear-edits").hidden = list.length < 2; // one has a button that does the same
  forget();
  markEdits();
  buttons();
}

const isSame = (edit) => (one) => JSON.stringify(one) === JSON.stringify(edit);

/** Add an edit, or take it away if it is there. */
function toggleEdit(edit) {
  const others = list.filter((one) => !isSame(edit)(one));
  setEdits(others.length < list.length ? others : [...list, edit]);
}

function item(edit) {
  const text = spokenEdit(edit, nameOfSource);
  const remove = html("button", { type: "button", "aria-label": `Remove: ${text}` }, "Remove");
  remove.addEventListener("click", () => {
    setEdits(list.filter((one) => one !== edit));
    byId("run").focus();
  });
  return html("li", {}, text, " ", remove);
}

function editOf(kind) {
  const { token, site, source } = choice();
  const tokens = byId("scope").value === "token" ? { tokens: [token] } : {};
  return { sites: [site], sources: [source], ...tokens, [kind]: true };
}

/** Say which edits of the chosen cell are among those of the next run. */
function buttons() {
  const chosen = choice();
  const isChosen = chosen !== null && chosen.site !== null && !chosen.isSaved;
  for (const kind of ["mask", "force"]) {
    const button = byId(kind);
    const there = isChosen && list.some(isSame(editOf(kind)));
    const isNeeded = isChosen && chosen.isOnly && kind === "mask";
    button.disabled = !isChosen || (isNeeded && !there);
    button.title = isNeeded ? "The site has no other source." : "";
    button.setAttribute("aria-pressed", String(there));
  }
  runs(chosen);
}

/** Say what the next run does: with the edits, or without those of the run that is shown. */
function runs(chosen) {
  const isEdited = list.length > 0;
  const isShownEdited = chosen !== null && !chosen.isSaved && shownTrace().edits?.length > 0;
  byId("run").textContent = isEdited
    ? "Complete with edits"
    : isShownEdited
      ? "Complete without edits"
      : "Complete and trace";
  byId("edits-hint").textContent = chosen?.isSaved
    ? "This trace is from a file; edits need a run."
    : isShownEdited && !isEdited
      ? "The figures are still those of the edited run. “Complete without edits” goes back."
      : "";
}

/** Put signs on the cells that are edited. */
function markEdits() {
  const marks = list.flatMap((edit) =>
    Object.keys(SIGNS)
      .filter((kind) => edit[kind])
      .flatMap((kind) => {
        const cells = (edit.sites ?? []).flatMap((site) =>
          (edit.sources ?? []).map((source) => cellOf(site, source)),
        );
        return cells.filter((cell) => cell).map((cell) => ({ ...cell, sign: SIGNS[kind] }));
      }),
  );
  mark(marks);
}

for (const kind of ["mask", "force"])
  byId(kind).addEventListener("click", () => toggleEdit(editOf(kind)));
byId("scope").addEventListener("change", buttons);
byId("clear-edits").addEventListener("click", () => {
  setEdits([]);
  byId("run").focus();
});

onChoice(buttons);
