// A run: an answer, the trace of exactly its tokens, and the predictions after each token.
import { Refusal, answer, statistics, trace } from "./api.js";
import { fitting, leftOut } from "./fit.js";
import { html } from "./svg.js";
import { show } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const TOP = 5; // number of the most probable tokens to request
const LENS = 3; // the same for the depth lens

/**
 * Run the request of ``options``; returns a sentence about it.
 *
 * info: the served model.  selection: see ``show``.  say: called with the progress.
 */
export async function run(request, { info, selection, signal, say }) {
  const { prompt, maxTokens, chat } = request;
  const isEdited = request.edits.length > 0;
  let input = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  let before = null;
  let promptTokens;
  let length; // of the sequence, at most
  if (maxTokens > 0) {
    say("Streaming the answer …");
    before = await answer(request, signal, streamed(prompt));
    promptTokens = before.prompt.length;
    input = { prompt: isEdited ? before.prompt : [...before.prompt, ...before.answer] };
    length = promptTokens + (isEdited ? maxTokens : before.answer.length);
    if (isEdited) input.max_tokens = maxTokens;
  } else {
    length = (await trace({ ...input, tokens: [0], sites: [] }, signal)).total_tokens;
    promptTokens = length;
  }
  const tokens = Math.min(length, request.last ?? length);
  const fits = info.trace
    ? fitting(info.trace, tokens, isEdited ? 2 * TOP : TOP, LENS)
    : { trace: tokens, lens: tokens }; // the server says why there are no traces
  const body = isEdited ? { ...input, edits: request.edits } : input;
  say(`Tracing ${fits.trace} tokens …`);
  const [result, lens, note] = await predicted(body, length, fits, signal);
  const served = await statistics(signal);
  byId("stream").hidden = true; // the same text follows, token by token
  // Prompt and answer were sent as one prompt, so the server cannot distinguish them.
  show({ ...result, prompt_tokens: promptTokens }, selection, false, { lens, served });
  showAnswers(
    before,
    isEdited && before ? result.tokens.filter(({ position }) => position >= promptTokens) : null,
  );
  const traced = `${result.tokens.length} tokens traced at ${result.sites.length} sites.`;
  return traced + leftOut(tokens, fits, Math.min(tokens, result.total_tokens)) + note;
}

/**
 * A trace with predictions, or without if the server refuses them; a separate lens of the last
 * tokens, if it does not fit into the trace; and a note.
 */
async function predicted(body, length, fits, signal) {
  const inOne = fits.lens === fits.trace ? { lens: LENS } : {};
  try {
    const result = await lastOf(fits.trace, length, { ...body, logprobs: TOP, ...inOne }, signal);
    if (result.lens) return [result, null, ""];
    const { lens } = await lastOf(fits.lens, result.total_tokens, { ...body, lens: LENS }, signal);
    return [result, lens, ""];
  } catch (error) {
    if (!(error instanceof Refusal) || !/logprobs|lens/.test(error.message)) throw error;
    const result = await lastOf(fits.trace, length, body, signal);
    return [result, null, ` Without predictions: ${error.message}`];
  }
}

/** The trace of the last tokens of a sequence that may end before ``length``. */
async function lastOf(count, length, body, signal) {
  const until = (end) =>
    trace({ ...body, tokens: { start: Math.max(0, end - count), end } }, signal);
  const result = await until(length);
  return result.tokens.length ? result : until(result.total_tokens);
}

/** A function that shows an answer as it grows. */
function streamed(prompt) {
  const shown = byId("stream");
  const text = html("span", { class: "answer" });
  shown.replaceChildren(prompt, text);
  shown.hidden = false;
  return (more) => {
    text.append(more);
    shown.scrollTop = shown.scrollHeight;
  };
}

function showAnswers(before, after) {
  byId("answers").hidden = !after;
  if (!after) return;
  const texts = [before.text, after.map(({ id, text }) => text ?? `#${id}`).join("")];
  let same = 0; // characters
  while (same < texts[0].length && texts[0][same] === texts[1][same]) same++;
  for (const [at, id] of ["answer-before", "answer-after"].entries()) {
    const rest = html("mark", {}, texts[at].slice(same));
    byId(id).replaceChildren(texts[at].slice(0, same), rest);
  }
  byId("answers").scrollIntoView({ block: "nearest" });
}
