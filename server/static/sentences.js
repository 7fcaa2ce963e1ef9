// Cells and edits in words: on the page, and for who hears it.
import { mean, sourceName, spread } from "./trace.js";
import { number } from "./svg.js";
import { quoted, short } from "./text.js";

const BEGINNING = 8; // tokens
const WORDS = {
  ban: () => "banned",
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
  const said = edits?.length
    ? edits.map((edit) => spokenEdit(edit, nameOf)).join(", ")
    : "without edits";
  return `${text.join("")}… (${tokens.length} tokens, ${said})`;
}

function likely({ top }) {
  return top.map((one) => `${quoted(one)} ${number(Math.exp(one.logprob))}`).join(", ");
}

/** A cell of a token, with what the mean over tokens is and how a kept run differs. */
export function spokenCell(summary, { row, column }, token, comparison) {
  const site = summary.sites[row];
  const [low, high] = spread(site.weights.map((weights) => weights[column])).map(number);
  const most = number(Math.log(site.sources.length));
  const means = {
    rms: number(mean(site.rms.map((rms) => rms[column]))),
    entropy: number(mean(site.entropy)),
  };
  const parts = [
    `Site ${site.index}, ${site.name}, reads ${summary.nameOf(site.sources[column])}`,
    `weight ${number(site.weights[token][column])}, mean ${number(site.mean[column])} (10 to 90 %: ${low} to ${high})`,
    `rms ${number(site.rms[token][column])}, mean ${means.rms}`,
    `entropy of the site ${number(site.entropy[token])}, mean ${means.entropy}, at most ${most}`,
  ];
  if (site.lens?.[token]?.top.length) {
    parts.push(`its mix predicts ${likely(site.lens[token])}`);
    parts.push(`the source alone ${likely(site.sourceLens[column][token])}`);
  }
  if (comparison) {
    parts.push(`mean less the kept run's ${number(comparison.mean[row][column])}`);
    const own = comparison.token(token);
    parts.push(
      own ? `this token's ${number(own[row][column])}` : "the kept run has another token here",
    );
  }
  return `${parts.join("; ")}.`;
}
