// A run: an answer, the trace of exactly the tokens that were shown, and what follows each.
import { Refusal, answer, trace } from "./api.js";
import { show } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const TOP = 5; // most probable tokens that are asked for
const LENS = 3; // of the depth lens
const LENS_VECTORS = 4096; // that are read at most, for each costs a product with the head

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
  const start = Math.max(0, length - (asked.last ?? length));
  say(`Tracing ${length - start} tokens …`);
  const body = { ...given, tokens: { start } };
  if (isEdited) body.edits = asked.edits;
  const [found, note] = await predicted(body, (length - start) * vectors(info), signal);
  if (!found.tokens.length)
    throw new Refusal("The answer ended before the last tokens; trace more of them.");
  byId("stream").hidden = true; // the same text follows, token by token
  // Prompt and answer went as one prompt, so the server cannot tell them apart.
  show({ ...found, prompt_tokens: promptTokens }, wanted);
  showAnswers(
    before,
    isEdited && before ? found.tokens.filter(({ position }) => position >= promptTokens) : null,
  );
  return `${found.tokens.length} tokens traced at ${found.sites.length} sites.${note}`;
}

/** Vectors of a token that a lens reads, at most: mixes, open sums, blocks and the embedding. */
function vectors({ sites, blocks }) {
  return 2 * sites + blocks + 1;
}

/** A trace with what each token predicts, or without where the server refuses that; and a note. */
async function predicted(body, readings, signal) {
  const wanted = { logprobs: TOP };
  if (readings <= LENS_VECTORS) wanted.lens = LENS;
  try {
    return [
      await trace({ ...body, ...wanted }, signal),
      wanted.lens ? "" : " Too many for the depth lens.",
    ];
  } catch (error) {
    if (!(error instanceof Refusal) || !/logprobs|lens/.test(error.message)) throw error;
    return [await trace(body, signal), ` Without predictions: ${error.message}`];
  }
}

/** A function that shows an answer as it grows. */
function streamed(prompt) {
  const shown = byId("stream");
  const text = document.createElement("span");
  text.className = "answer";
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
    const rest = document.createElement("mark");
    rest.textContent = texts[at].slice(same);
    byId(id).replaceChildren(texts[at].slice(0, same), rest);
  }
  byId("answers").scrollIntoView({ block: "nearest" });
}
