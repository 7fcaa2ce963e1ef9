// How much of a sequence one answer has room for.

const LENS_VECTORS = 4096; // that are read at most, for each costs a product with the head

/**
 * Of so many tokens, how many of the last fit into a trace, and into one with a lens; at least one,
 * so that the server says what is wrong where none fits.
 *
 * limits: ``trace`` of what is served.  top, lensTop: how many tokens are named behind each token,
 * and at each vector of a lens.
 */
export function fitting(limits, tokens, top, lensTop) {
  const { weights, weights_per_token, lens, lens_per_token } = limits;
  const room = (of, each) => Math.max(1, Math.min(tokens, Math.floor(of / each)));
  const each = weights_per_token + top;
  const withLens = room(weights, each + lensTop * lens_per_token);
  return {
    trace: room(weights, each),
    lens: Math.min(withLens, room(Math.min(LENS_VECTORS, lens), lens_per_token)),
  };
}

/**
 * A sentence about what was left out of so many ``tokens``, or nothing; ``total`` is how many there
 * were, for an answer may end early.
 */
export function leftOut(tokens, { trace, lens }, total) {
  const because = "because an answer has no room for more";
  if (trace < tokens) {
    const ofLens = lens < trace ? `, and the depth lens is of the last ${lens}` : "";
    return ` These are the last of ${total} tokens${ofLens}, ${because}.`;
  }
  return lens < trace ? ` The depth lens is of the last ${lens} tokens, ${because}.` : "";
}
