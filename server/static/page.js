// The page of a server: runs the request of its form, its examples or its address.
import { Away, KeyNeeded, Refusal, ask } from "./api.js";
import { offerLink } from "./copy_link.js";
import { setEdits } from "./edits.js";
import { fail, forget } from "./failure.js";
import { clearLink, writeLink } from "./link.js";
import { options, recall, remember } from "./options.js";
import { run } from "./run.js";
import { onOpen, showExample } from "./saved.js";
import { choice, hide, onChoice, stay, wait } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const MOST_UNASKED = { prompt: 2000, tokens: 64 }; // characters and tokens of a link that run without a click
let running = null; // the AbortController of the request in progress
let ended = Promise.resolve(); // when it has ended
let info = null; // the served model
let shownPrompt = null; // the prompt of the trace on the page

function say(status) {
  byId("status").textContent = status;
  forget();
}

/** Run the form's request instead of the running one; ``selection``: see ``show``. */
async function submit(selection = null) {
  running?.abort();
  await ended;
  if (!running) ended = start(selection);
}

/** One run; every failure becomes one sentence. */
async function start(selection) {
  running = new AbortController();
  const [go, cancel] = [byId("run"), byId("cancel")];
  const focused = [go, byId("retry")].includes(document.activeElement);
  cancel.disabled = false;
  go.disabled = true;
  if (focused) cancel.focus();
  say("");
  wait();
  try {
    await describe();
    if (!info.sites)
      throw new Refusal("The served model has standard residuals: it has no site to trace.");
    const request = options();
    remember(request);
    const { signal } = running;
    say(await run(request, { info, selection: selection ?? again(request), signal, say }));
    setEdits(); // named and marked as in this trace
    shownPrompt = request.prompt;
  } catch (error) {
    const isCancelled = error.name === "AbortError";
    const isLocked = error instanceof KeyNeeded && !choice();
    if (isLocked) await showExample().catch(hide);
    else if (isCancelled || error instanceof Refusal) stay();
    else hide();
    const isAway = error instanceof Away;
    if (isAway) info = null; // another model may be served when it is back
    const reason = error instanceof Refusal ? error.message : `The page failed: ${error.message}.`;
    if (isCancelled) say("Cancelled.");
    else if (error instanceof KeyNeeded) say(reason);
    else {
      say("");
      fail(reason, isAway ? () => submit(selection) : null);
    }
    byId("error").scrollIntoView({ block: "nearest" }); // the button may be far below
  }
  const leave = document.activeElement === cancel;
  running = null;
  go.disabled = false;
  cancel.disabled = true;
  if (leave) go.focus();
}

/** The selection of a run without a link: the same cell, and for the same prompt the same token. */
function again({ prompt }) {
  const { token, site, source } = choice() ?? {};
  return prompt === shownPrompt ? { token, site, source } : { site, source };
}

/** Show the served model beside the title. */
async function describe() {
  if (!info) {
    const { data } = await ask("v1/models");
    info = { name: data[0].id, ...(await ask("v1/attn_res")) };
  }
  const { name, format, backbone, blocks, sites } = info;
  byId("model").textContent = sites
    ? `${name}: ${format} format, ${backbone}, ${blocks} blocks, ${sites} sites`
    : `${name}: standard residuals`;
}

/** Run the request of the address, or the example; a long one waits for a click. */
function begin() {
  const selection = recall() ?? {};
  const { prompt, maxTokens } = options();
  if (prompt.length > MOST_UNASKED.prompt || maxTokens > MOST_UNASKED.tokens)
    say(`Press “${byId("run").textContent}” to run the prompt of the link.`);
  else if (byId("request").checkValidity()) submit(selection);
}

onChoice(() => {
  const chosen = choice();
  offerLink(chosen.isSaved);
  if (chosen.isSaved) return; // an address holds only runs
  writeLink({
    token: String(chosen.token),
    site: chosen.site === null ? null : String(chosen.site),
    source: chosen.source,
  });
});
addEventListener("hashchange", begin);

// A saved trace replaces a run completely.
onOpen(async (name) => {
  running?.abort();
  await ended;
  shownPrompt = null;
  setEdits([]);
  for (const id of ["answers", "stream"]) byId(id).hidden = true;
  clearLink();
  say(`${name} is shown, not a run of this prompt.`);
});

// The form.

byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || byId("guide").open) return;
  event.preventDefault(); // the focused button must not act, too
  byId("request").requestSubmit();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    byId("prompt").value = example.value;
    setEdits([]);
    submit({});
  });
}
byId("cancel").addEventListener("click", () => running?.abort());
begin();
