// A run: an answer, the trace of exactly the tokens that were shown, and what follows each.
import { Refusal, answer, statistics, trace } from "./api.js";
import { fitting, leftOut } from "./fit.js";
import { html } from "./svg.js";
import { show } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const TOP = 5; // most probable tokens that are asked for
const LENS = 3; // of the depth lens

/**
 * Run what ``options`` gives; returns a sentence about it.
 *
 * info: what is served.  wanted: what to choose, as of ``show``.  say: told what is going on.
 */
export async function run(asked, { info, wanted, signal, say }) {
  const { prompt, maxTokens, chat } = asked;
  const isEdited = asked.edits.length > 0;
  let given = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  let before = null;
  let promptTokens;
  let length; // of the sequence, at most
  if (maxTokens > 0) {
    say("Streaming the answer …");
    before = await answer(asked, signal, streamed(prompt));
    promptTokens = before.prompt.length;
    given = { prompt: isEdited ? before.prompt : [...before.prompt, ...before.answer] };
    length = promptTokens + (isEdited ? maxTokens : before.answer.length);
    if (isEdited) given.max_tokens = maxTokens;
  } else {
    length = (await trace({ ...given, tokens: [0], sites: [] }, signal)).total_tokens;
    promptTokens = length;
  }
  const tokens = Math.min(length, asked.last ?? length);
  const fits = info.trace
    ? fitting(info.trace, tokens, isEdited ? 2 * TOP : TOP, LENS)
    : { trace: tokens, lens: tokens }; // the server says why there are no traces
  const body = isEdited ? { ...given, edits: asked.edits } : given;
  say(`Tracing ${fits.trace} tokens …`);
  const [found, lens, note] = await predicted(body, length, fits, signal);
  const served = await statistics(signal);
  byId("stream").hidden = true; // the same text follows, token by token
  // Prompt and answer went as one prompt, so the server cannot tell them apart.
  show({ ...found, prompt_tokens: promptTokens }, wanted, false, { lens, served });
  showAnswers(
    before,
    isEdited && before ? found.tokens.filter(({ position }) => position >= promptTokens) : null,
  );
  const traced = `${found.tokens.length} tokens traced at ${found.sites.length} sites.`;
  return traced + leftOut(tokens, fits, Math.min(tokens, found.total_tokens)) + note;
}

/**
 * A trace with what each token predicts, or without where the server refuses that; the lens of its
 * last tokens, if that has no room in it; and a note.
 */
async function predicted(body, length, fits, signal) {
  const inOne = fits.lens === fits.trace ? { lens: LENS } : {};
  try {
    const found = await lastOf(fits.trace, length, { ...body, logprobs: TOP, ...inOne }, signal);
    if (found.lens) return [found, null, ""];
    const { lens } = await lastOf(fits.lens, found.total_tokens, { ...body, lens: LENS }, signal);
    return [found, lens, ""];
  } catch (error) {
    if (!(error instanceof Refusal) || !/logprobs|lens/.test(error.message)) throw error;
    const found = await lastOf(fits.trace, length, body, signal);
    return [found, null, ` Without predictions: ${error.message}`];
  }
}

/** The trace of the last tokens of a sequence that may end before ``length``. */
async function lastOf(count, length, body, signal) {
  const until = (end) =>
    trace({ ...body, tokens: { start: Math.max(0, end - count), end } }, signal);
  const found = await until(length);
  return found.tokens.length ? found : until(found.total_tokens);
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
