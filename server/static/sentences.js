// Edits and runs as sentences, on the page and for screen readers.
import { short } from "./text.js";
import { sourceName } from "./trace.js";

const BEGINNING = 8; // tokens
const WORDS = {
  mask: () => "masked",
  ban: () => "masked", // of older files
  force: () => "forced",
  mean: () => "averaged",
  scale: (value) => `logits times ${value}`,
  weights: (value) => `weights ${value.join(", ")}`,
};

/** An edit as a person says it; ``nameOf`` a source, as of ``summarise``. */
export function spokenEdit(edit, nameOf = sourceName) {
  const kind = Object.keys(WORDS).find((name) => edit[name] !== null && edit[name] !== undefined);
  const sources = edit.sources?.map((source) => nameOf(source)).join(", ") ?? "all sources";
  const sites = edit.sites
    ? `site${edit.sites.length > 1 ? "s" : ""} ${edit.sites.join(", ")}`
    : "all sites";
  return `${sources} ${WORDS[kind](edit[kind])} at ${sites}, ${spokenTokens(edit.tokens)}`;
}

function spokenTokens(tokens) {
  if (!tokens) return "all tokens";
  if (Array.isArray(tokens)) return `token${tokens.length > 1 ? "s" : ""} ${tokens.join(", ")}`;
  return tokens.end === null || tokens.end === undefined
    ? `tokens from ${tokens.start}`
    : `tokens ${tokens.start} to ${tokens.end - 1}`;
}

/** A run as a person tells it from others: how its text begins, its length and its edits. */
export function spokenRun({ trace: { tokens, edits }, nameOf }) {
  const text = tokens.slice(0, BEGINNING).map((token) => short(token));
  const how = edits?.length
    ? edits.map((edit) => spokenEdit(edit, nameOf)).join(", ")
    : "without edits";
  return `${text.join("")}… (${tokens.length} tokens, ${how})`;
}
