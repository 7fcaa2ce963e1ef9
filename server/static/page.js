// The form: streams a completion, asks for the trace of exactly the tokens that were shown.
"use strict";

(() => {
  const byId = (id) => document.getElementById(id);
  let running = null; // what cancels the request in progress

  /** A refusal of the server's, in its own words. */
  class Refusal extends Error {}

  /** Ask the server; throws a Refusal, or an AbortError after a cancel. */
  async function ask(path, body, signal) {
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
      throw new Refusal("The server does not answer; is it still running?");
    }
    if (response.ok) return response;
    const said = await response
      .json()
      .then(message)
      .catch(() => null);
    if (response.status === 401) {
      byId("key-field").hidden = false;
      const wanted = key ? "this is not the server's API key" : "the server asks for an API key";
      throw new Refusal(`${said ?? "Unauthorized"}: ${wanted}.`);
    }
    throw new Refusal(said ?? `The server answered with status ${response.status}.`);
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
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) throw new Refusal("The connection ended before the answer did.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        if (part.startsWith("data: ")) yield JSON.parse(part.slice("data: ".length));
      }
    }
  }

  /** Stream a greedy completion; returns the token ids of prompt and answer. */
  async function complete(prompt, maxTokens, signal) {
    const body = {
      prompt,
      max_tokens: maxTokens,
      temperature: 0,
      stream: true,
      return_token_ids: true,
    };
    const response = await ask("v1/completions", body, signal);
    const shown = byId("stream");
    const answer = document.createElement("span");
    answer.className = "answer";
    shown.replaceChildren(prompt, answer);
    shown.hidden = false;
    const found = { prompt: [], answer: [] };
    for await (const event of events(response)) {
      if (event.error) throw new Refusal(message(event) ?? "The server gave up.");
      for (const choice of event.choices) {
        answer.append(choice.text);
        found.prompt.push(...(choice.prompt_token_ids ?? []));
        found.answer.push(...(choice.token_ids ?? []));
        shown.scrollTop = shown.scrollHeight;
      }
    }
    return found;
  }

  function say(status, error = "") {
    byId("status").textContent = status;
    byId("error").textContent = error;
  }

  async function run(signal) {
    const prompt = byId("prompt").value;
    say("Streaming the answer …");
    const found = await complete(prompt, byId("max-tokens").valueAsNumber, signal);
    const ids = [...found.prompt, ...found.answer];
    const last = byId("last").valueAsNumber || ids.length;
    const start = Math.max(0, ids.length - last);
    say(`Tracing ${ids.length - start} tokens …`);
    const body = { prompt: ids, tokens: { start } };
    const trace = await (await ask("v1/attn_res/trace", body, signal)).json();
    byId("stream").hidden = true; // the same text follows, token by token
    AttnResViewer.show(trace, found.prompt.length);
    say(`${trace.tokens.length} tokens traced at ${trace.sites.length} sites.`);
  }

  /** Run once at a time; whatever goes wrong is one sentence. */
  async function submit() {
    if (running) return;
    running = new AbortController();
    const [start, cancel] = [byId("run"), byId("cancel")];
    const focused = document.activeElement === start;
    cancel.disabled = false;
    start.disabled = true;
    if (focused) cancel.focus();
    AttnResViewer.hide();
    try {
      await run(running.signal);
    } catch (error) {
      if (error.name === "AbortError") say("Cancelled.");
      else say("", error instanceof Refusal ? error.message : `The page failed: ${error.message}.`);
    }
    const leave = document.activeElement === cancel;
    running = null;
    start.disabled = false;
    cancel.disabled = true;
    if (leave) start.focus();
    describe();
  }

  /** What is served, under the title. */
  async function describe() {
    if (byId("model").textContent) return;
    try {
      const info = await (await ask("v1/attn_res")).json();
      byId("model").textContent = info.sites
        ? `${info.format} format, ${info.backbone}, ${info.blocks} blocks, ${info.sites} sites`
        : "The served model has standard residuals: it has no depth attention to show.";
    } catch (error) {
      if (!byId("error").textContent) say("", error.message);
    }
  }

  byId("request").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("request").requestSubmit();
  });
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      byId("prompt").value = example.value;
      byId("prompt").focus();
    });
  }
  byId("cancel").addEventListener("click", () => running?.abort());
  describe();
})();
