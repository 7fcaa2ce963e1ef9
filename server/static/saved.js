// Saved traces: one that is part of this file, and those that are opened, dropped or saved.
import { save } from "./save.js";
import { problem } from "./trace.js";
import { hide, show, shownTrace } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const listeners = [];
const LIVELY = 10; // a token of the example at which the lens changes with the depth

/** Call a function before a trace of a file is shown, with the file's name, and wait for it. */
export function onOpen(act) {
  listeners.push(act);
}

/** Show a saved trace, or say why it is none. */
async function open(file) {
  let trace;
  try {
    trace = JSON.parse(await file.text());
  } catch {
    trace = null;
  }
  let wrong = problem(trace);
  try {
    if (wrong === null) {
      await Promise.all(listeners.map((act) => act(file.name)));
      show(trace, {}, true);
      byId("model").textContent = `${trace.model}, from ${file.name}`;
    }
  } catch (error) {
    hide();
    wrong = `This is not a trace that can be shown: ${error.message}.`;
  }
  byId("unopened").textContent = wrong ?? "";
}

/** Show the run that comes with the page. */
export async function showExample() {
  const trace = await (await fetch("attn_res/example.json")).json();
  show(trace, { token: LIVELY }, true);
  byId("model").textContent = `${trace.model}, a saved example`;
}

byId("open").addEventListener("change", ({ target }) => {
  if (target.files.length) open(target.files[0]);
  target.value = "";
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
});

byId("json").addEventListener("click", () =>
  save("attn-res-trace.json", "application/json", JSON.stringify(shownTrace())),
);

// A file that contains its trace.
const embedded = byId("trace");
if (embedded) {
  const trace = JSON.parse(embedded.textContent);
  byId("model").textContent = trace.model;
  show(trace, {}, true);
}
