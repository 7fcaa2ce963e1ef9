// Edits of what sites read: the list that the next run sends.
import { spokenEdit } from "./sentences.js";
import { html } from "./svg.js";
import { nameOfSource } from "./viewer.js";

const byId = (id) => document.getElementById(id);
let list = [];
const listeners = [];

/** The edits of the next run. */
export function edits() {
  return list;
}

/** Call a function whenever the edits change. */
export function onEdits(act) {
  listeners.push(act);
}

/** Replace the edits of the next run. */
export function setEdits(next) {
  list = next;
  byId("edit-list").replaceChildren(...list.map(item));
  byId("edits-none").hidden = list.length > 0;
  byId("clear-edits").hidden = list.length === 0;
  listeners.forEach((act) => act());
}

/** Add an edit, or take it away if it is there. */
export function toggleEdit(edit) {
  const same = (one) => JSON.stringify(one) === JSON.stringify(edit);
  setEdits(list.some(same) ? list.filter((one) => !same(one)) : [...list, edit]);
}

function item(edit) {
  const said = spokenEdit(edit, nameOfSource);
  const remove = html("button", { type: "button", "aria-label": `Remove: ${said}` }, "Remove");
  remove.addEventListener("click", () => {
    setEdits(list.filter((one) => one !== edit));
    byId("run").focus();
  });
  return html("li", {}, said, " ", remove);
}
