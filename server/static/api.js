// The page's requests to its server, and the server's refusals.

const byId = (id) => document.getElementById(id);

/** A refusal with the server's message. */
export class Refusal extends Error {}

/** The refusal of a server that needs a key, without a key. */
export class KeyNeeded extends Refusal {}

/** An unreachable or busy server: the same request may succeed later. */
export class Away extends Refusal {}

const AWAY = [429, 502, 503, 504]; // statuses of the server, or of a proxy before it
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
  const reason = await response
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
  throw new kind(reason ?? `The server answered with status ${response.status}.`);
}

/** The JSON of a response; throws like ``send``. */
export async function ask(path, body, signal) {
  const response = await send(path, body, signal);
  return response.json().catch(ended);
}

/** Throw the error for a response that cannot be read to its end. */
function ended(error) {
  throw error.name === "AbortError" ? error : new Away(ENDED);
}

/** The message of a server's error. */
function message({ error, detail }) {
  const text = error?.message ?? error ?? detail;
  return typeof text === "string" ? text : null;
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
  const input = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const drawn = temperature > 0 ? { temperature, seed } : { temperature: 0 };
  const body = { ...input, max_tokens: maxTokens, ...drawn, stream: true, return_token_ids: true };
  const response = await send(chat ? "v1/chat/completions" : "v1/completions", body, signal);
  const result = { prompt: [], answer: [], text: "" };
  for await (const event of events(response)) {
    if (event.error) throw new Refusal(message(event) ?? "The server gave up.");
    result.prompt.push(...(event.prompt_token_ids ?? []));
    for (const choice of event.choices) {
      const text = chat ? (choice.delta.content ?? "") : choice.text;
      result.prompt.push(...(choice.prompt_token_ids ?? []));
      result.answer.push(...(choice.token_ids ?? []));
      result.text += text;
      grow(text);
    }
  }
  return result;
}

/** The server's statistics of the requests that it serves, or null without any. */
export function statistics(signal) {
  return ask("v1/attn_res/statistics", null, signal).catch((error) => {
    if (error.name === "AbortError") throw error;
    return null;
  });
}

/** The trace for a request's body. */
export function trace(body, signal) {
  return ask("v1/attn_res/trace", body, signal);
}
