// The request in the form, and the same in the fragment of the address.
import { edits, setEdits } from "./edits.js";
import { readLink, writeLink } from "./link.js";
import { spokenEdit } from "./sentences.js";

const byId = (id) => document.getElementById(id);
const FIELDS = { max_tokens: "max-tokens", last: "last", temperature: "temperature", seed: "seed" };

/** The request in the form. */
export function options() {
  return {
    prompt: byId("prompt").value,
    maxTokens: byId("max-tokens").valueAsNumber,
    last: byId("last").valueAsNumber || null,
    temperature: byId("temperature").valueAsNumber || 0,
    seed: byId("seed").valueAsNumber || 0,
    chat: byId("chat").checked,
    edits: edits(),
  };
}

/** Write a request into the address. */
export function remember({ prompt, maxTokens, last, temperature, seed, chat, edits }) {
  writeLink({
    prompt,
    max_tokens: String(maxTokens),
    last: last && String(last),
    temperature: temperature ? String(temperature) : null,
    seed: temperature ? String(seed) : null,
    chat: chat ? "1" : null,
    edits: edits.length ? JSON.stringify(edits) : null,
  });
}

/** Fill the form from the address; returns the selection, or null without one in the address. */
export function recall() {
  const fields = readLink();
  if (fields.prompt === undefined) return null;
  byId("prompt").value = fields.prompt;
  for (const [name, id] of Object.entries(FIELDS))
    if (fields[name] !== undefined) byId(id).value = fields[name];
  byId("chat").checked = fields.chat === "1";
  try {
    const list = JSON.parse(fields.edits ?? "[]");
    list.forEach((edit) => spokenEdit(edit)); // throws at an invalid edit
    setEdits(list);
  } catch {
    setEdits([]);
    byId("edits-none").textContent =
      "The edits in the address cannot be read, so they are left out.";
  }
  const number = (text) => (text === undefined ? undefined : Number(text));
  return { token: number(fields.token), site: number(fields.site), source: fields.source };
}
