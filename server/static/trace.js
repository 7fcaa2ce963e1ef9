// A trace, and what its figures and sentences share.
import { textOf } from "./text.js";

export const PARTIAL = "partial"; // name of the partial sum as a source
/** What the kinds of sites are called. */
export const KINDS = {
  attention: "attention",
  mlp: "MLP",
  mixer: "sublayer",
  final: "final norm",
};
const MOST_BLOCKS = 24; // that are marked one by one
const [LOW, HIGH] = [0.1, 0.9]; // quantiles over tokens

/** Why a value is not a trace, in a sentence; null for a trace. */
export function problem(value) {
  const wrong = "This is not a trace: expected the JSON that the page or the trace route gives";
  if (!Array.isArray(value?.tokens) || !Array.isArray(value?.sites)) return `${wrong}.`;
  const rows = value.tokens.length;
  for (const [at, site] of value.sites.entries()) {
    if (!Array.isArray(site?.sources) || !site.sources.length)
      return `${wrong}; sites[${at}] has no sources.`;
    for (const part of ["weights", "rms", "entropy"])
      if (site[part]?.length !== rows)
        return `${wrong}; sites[${at}].${part} needs a row for each of ${rows} tokens.`;
    for (const part of ["weights", "rms"])
      if (site[part].some((row) => row?.length !== site.sources.length))
        return `${wrong}; a row of sites[${at}].${part} needs ${site.sources.length} numbers.`;
  }
  return value.sites.length ? null : `${wrong}; it has no site.`;
}

/**
 * A trace with the names of its sites, means over its tokens, blocks, and what a lens says of a
 * site's mix and of each source: for each token, or null where it was not read.
 */
export function summarise(trace, lensOfLast = null) {
  const byToken = (predictions) => {
    const byPosition = new Map(predictions.map((one) => [one.position, one]));
    return trace.tokens.map(({ position }) => byPosition.get(position) ?? null);
  };
  const readings = new Map(
    (lensOfLast ?? trace.lens ?? []).map(({ site, vector, predictions }) => [
      `${site} ${vector}`,
      byToken(predictions),
    ]),
  );
  const lens = (site, vector) => readings.get(`${site} ${vector}`) ?? null;
  const sites = trace.sites.map((site, row) => ({
    ...site,
    row,
    name: siteName(site),
    mean: site.sources.map((_, column) => mean(site.weights.map((weights) => weights[column]))),
    lens: lens(site.index, "mix"),
    sourceLens: site.sources.map((name) => lens(name === PARTIAL ? site.index : null, name)),
  }));
  const open = sites.filter(({ sources }) => sources.at(-1) === PARTIAL);
  const blocks = blocksOf(sites);
  const isFull = open.length <= 1; // blocks are single sublayers, which need no marks
  const names = isFull ? namesOfSublayers(sites) : {};
  return {
    trace,
    sites,
    blocks,
    isFull,
    nameOf: (source) => names[source] ?? sourceName(source),
    areMarked: !isFull && blocks.length <= MOST_BLOCKS,
    hasLens: readings.size > 0,
    hasIds: shownTokens(trace, lensOfLast).some((token) => textOf(token) === null),
    widest: Math.max(...sites.map(({ sources }) => sources.length)),
  };
}

/** The tokens of a trace, and those that are predicted. */
function shownTokens({ tokens, logprobs, lens }, lensOfLast) {
  const readings = (lensOfLast ?? lens ?? []).map(({ predictions }) => predictions);
  const rows = [logprobs?.unedited ?? [], logprobs?.edited ?? [], ...readings].flat();
  return [...tokens, ...rows.flatMap(({ top }) => top)];
}

/** The number of every block, and the first and last row of its sites. */
function blocksOf(sites) {
  const blocks = [];
  sites.forEach(({ sources }, row) => {
    const number = sources.filter((name) => name !== PARTIAL).length;
    if (blocks.at(-1)?.number === number) blocks.at(-1).last = row;
    else blocks.push({ number, first: row, last: row });
  });
  return blocks;
}

function siteName({ kind, layer }) {
  const name = KINDS[kind] ?? kind;
  return kind === "final" ? name : `${name} of layer ${layer}`;
}

/** What the sources of a Full model are called: its blocks are the outputs of single sublayers. */
function namesOfSublayers(sites) {
  const sublayers = sites.filter(({ kind }) => kind !== "final");
  const names = sublayers.map((site) => [`block ${site.index + 1}`, site.name]);
  const last = sites.at(-1).index - 1; // of a final site, which reads its output
  const sum = sublayers.find(({ index }) => index === last);
  return Object.fromEntries(sum ? [...names, [PARTIAL, sum.name]] : names);
}

/** What a source is called where no trace says more. */
export function sourceName(name) {
  return name === PARTIAL ? "partial sum" : name;
}

export function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** The 10 % and the 90 % quantile, between neighbours as numpy has them. */
export function spread(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return [LOW, HIGH].map((share) => {
    const at = share * (sorted.length - 1);
    const low = Math.floor(at);
    return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
  });
}

/** The site and source at which tokens differ most. */
export function liveliest({ sites }) {
  let best = { row: 0, column: 0, width: -1 };
  for (const { row, sources, weights } of sites)
    for (const column of sources.keys()) {
      const [low, high] = spread(weights.map((one) => one[column]));
      if (high - low > best.width) best = { row, column, width: high - low };
    }
  return { row: best.row, column: best.column };
}

/**
 * The mean weights of all tokens that a server has counted, by site and source; null where it has
 * counted none, or has not the sites of a trace.
 */
export function meansOf({ sites, tokens }, trace) {
  if (!sites.length || !sameSites({ sites }, trace)) return null;
  const total = tokens.prefill + tokens.decode;
  const sum = (phase, count, column) => (phase ? phase.mean[column] * count : 0);
  return sites.map(({ prefill, decode, sources }) =>
    sources.map(
      (_, at) => (sum(prefill, tokens.prefill, at) + sum(decode, tokens.decode, at)) / total,
    ),
  );
}

/** True if the cells of two traces belong together. */
export function sameSites(one, other) {
  const shape = ({ sites }) =>
    JSON.stringify(sites.map(({ index, kind, sources }) => [index, kind, sources]));
  return shape(one) === shape(other);
}
