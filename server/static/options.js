// What the form asks for, and the same in the fragment of the address.
import { edits, setEdits } from "./edits.js";
import { readLink, writeLink } from "./link.js";
import { spokenEdit } from "./sentences.js";

const byId = (id) => document.getElementById(id);
const FIELDS = { max_tokens: "max-tokens", last: "last", temperature: "temperature", seed: "seed" };

/** What the form asks for. */
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

/** Write what is asked for into the address. */
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

/** Fill the form as the address says; returns what to choose, or null where it says nothing. */
export function recall() {
  const said = readLink();
  if (said.prompt === undefined) return null;
  byId("prompt").value = said.prompt;
  for (const [name, id] of Object.entries(FIELDS))
    if (said[name] !== undefined) byId(id).value = said[name];
  byId("chat").checked = said.chat === "1";
  try {
    const found = JSON.parse(said.edits ?? "[]");
    found.forEach((edit) => spokenEdit(edit)); // throws at what is no edit
    setEdits(found);
  } catch {
    setEdits([]);
    byId("edits-none").textContent =
      "The edits in the address cannot be read, so they are left out.";
  }
  const number = (text) => (text === undefined ? undefined : Number(text));
  return { token: number(said.token), site: number(said.site), source: said.source };
}
