// What the page asks of its own server, and how the server refuses.

const byId = (id) => document.getElementById(id);

/** A refusal of the server's, in its own words. */
export class Refusal extends Error {}

/** The refusal of a server that asks for a key, while there is none. */
export class KeyNeeded extends Refusal {}

/** The refusal of a server that is away or busy: the same request may be answered later. */
export class Away extends Refusal {}

const AWAY = [429, 502, 503, 504]; // of the server, or of a proxy before it
const ENDED = "The connection ended before the answer did.";

/** Send a request; throws a Refusal, or an AbortError after a cancel. */
async function send(path, body, signal) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  const key = byId("key").value; // kept nowhere else
  if (key) headers.Authorization = `Bearer ${key}`;
  if (/[^\x20-\x7e]/.test(key))
    throw new Refusal("An API key has printable ASCII characters only.");
  const method = body ? "POST" : "GET";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Away("The server does not answer; is it still running?");
  }
  if (response.ok) return response;
  const said = await response
    .json()
    .then(message)
    .catch(() => null);
  if (response.status === 401) {
    byId("key-field").hidden = false;
    if (key) throw new Refusal("This is not the server's API key.");
    throw new KeyNeeded(
      "This server asks for an API key. Enter it above to run your own prompts. " +
        "Until then the page shows a saved run of the demo model.",
    );
  }
  const kind = AWAY.includes(response.status) ? Away : Refusal;
  throw new kind(said ?? `The server answered with status ${response.status}.`);
}

/** The JSON that the server answers; throws as ``send`` does. */
export async function ask(path, body, signal) {
  const response = await send(path, body, signal);
  return response.json().catch(ended);
}

/** Throw what it means that the rest of an answer cannot be read. */
function ended(error) {
  throw error.name === "AbortError" ? error : new Away(ENDED);
}

/** The sentence in an error of the server's. */
function message({ error, detail }) {
  const said = error?.message ?? error ?? detail;
  return typeof said === "string" ? said : null;
}

/** The events of a stream, up to its [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(ended);
    if (done) throw new Away(ENDED);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice("data: ".length));
    }
  }
}

/**
 * Stream an answer to a text, or to a chat of one message; returns the token ids of both and the
 * answer's text.
 */
export async function answer({ prompt, chat, maxTokens, temperature, seed }, signal, grow) {
  const given = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const drawn = temperature > 0 ? { temperature, seed } : { temperature: 0 };
  const body = { ...given, max_tokens: maxTokens, ...drawn, stream: true, return_token_ids: true };
  const response = await send(chat ? "v1/chat/completions" : "v1/completions", body, signal);
  const found = { prompt: [], answer: [], text: "" };
  for await (const event of events(response)) {
    if (event.error) throw new Refusal(message(event) ?? "The server gave up.");
    found.prompt.push(...(event.prompt_token_ids ?? []));
    for (const choice of event.choices) {
      const text = chat ? (choice.delta.content ?? "") : choice.text;
      found.prompt.push(...(choice.prompt_token_ids ?? []));
      found.answer.push(...(choice.token_ids ?? []));
      found.text += text;
      grow(text);
    }
  }
  return found;
}

/** What the server has counted of what it serves, or null where it does not say. */
export function statistics(signal) {
  return ask("v1/attn_res/statistics", null, signal).catch((error) => {
    if (error.name === "AbortError") throw error;
    return null;
  });
}

/** The trace that a body asks for. */
export function trace(body, signal) {
  return ask("v1/attn_res/trace", body, signal);
}
