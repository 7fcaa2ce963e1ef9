// A comparison of two runs: the difference of this run from the baseline.
import { sameSites } from "./trace.js";

/**
 * The difference of two summaries, or null where their cells do not belong together.
 *
 * Returns ``mean`` (sites x sources), ``token`` (the same of a token by its number in this run, or
 * null where the other run has no such token at its place) and ``most``, the largest change of all.
 */
export function difference(summary, kept) {
  if (!sameSites(summary, kept)) return null;
  const less = (one, other) => one.map((value, column) => value - other[column]);
  const mean = summary.sites.map((site, row) => less(site.mean, kept.sites[row].mean));
  const places = new Map(
    kept.trace.tokens.map(({ position, id }, at) => [`${position} ${id}`, at]),
  );
  const token = (at) => {
    const { position, id } = summary.trace.tokens[at];
    const other = places.get(`${position} ${id}`);
    if (other === undefined) return null;
    return summary.sites.map((site, row) => less(site.weights[at], kept.sites[row].weights[other]));
  };
  let most = 0;
  const count = (rows) =>
    rows?.forEach((row) => row.forEach((value) => (most = Math.max(most, Math.abs(value)))));
  count(mean);
  summary.trace.tokens.forEach((_, at) => count(token(at)));
  return { mean, token, most: most || 1 };
}
