// Edits of the chosen cell: its buttons, and signs on the cells that are edited.
import { edits, onEdits, setEdits, toggleEdit } from "./edits.js";
import { cellOf, choice, mark, onChoice } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const SIGNS = { ban: "✕", force: "●" };

function editOf(kind) {
  const { token, site, source } = choice();
  const tokens = byId("scope").value === "token" ? { tokens: [token] } : {};
  return { sites: [site], sources: [source], ...tokens, [kind]: true };
}

/** Say which edits of the chosen cell are among those of the next run. */
function buttons() {
  const isChosen = choice()?.site != null;
  for (const kind of ["ban", "force"]) {
    const button = byId(kind);
    button.disabled = !isChosen;
    const there =
      isChosen && edits().some((one) => JSON.stringify(one) === JSON.stringify(editOf(kind)));
    button.setAttribute("aria-pressed", String(there));
  }
}

/** Put signs on the cells that are edited. */
export function markEdits() {
  const found = edits().flatMap((edit) =>
    Object.keys(SIGNS)
      .filter((kind) => edit[kind])
      .flatMap((kind) => {
        const cells = (edit.sites ?? []).flatMap((site) =>
          (edit.sources ?? []).map((source) => cellOf(site, source)),
        );
        return cells.filter((cell) => cell).map((cell) => ({ ...cell, sign: SIGNS[kind] }));
      }),
  );
  mark(found);
}

onEdits(() => {
  byId("run-edits").hidden = edits().length === 0;
  markEdits();
  buttons();
});
for (const kind of ["ban", "force"])
  byId(kind).addEventListener("click", () => toggleEdit(editOf(kind)));
byId("scope").addEventListener("change", buttons);
byId("clear-edits").addEventListener("click", () => {
  setEdits([]);
  byId("run").focus();
});

onChoice(buttons);
