// The page of a server: runs what its form, its examples or its address ask for.
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
const MOST_UNASKED = { prompt: 2000, tokens: 64 }; // characters and tokens that run without a click
let running = null; // what cancels the request in progress
let ended = Promise.resolve(); // when it has ended
let info = null; // what is served
let shownPrompt = null; // of the trace on the page

function say(status) {
  byId("status").textContent = status;
  forget();
}

/** Run what the form asks for, instead of what runs; ``wanted`` is what to choose. */
async function submit(wanted = null) {
  running?.abort();
  await ended;
  if (!running) ended = start(wanted);
}

/** One run; whatever goes wrong is one sentence. */
async function start(wanted) {
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
    const asked = options();
    remember(asked);
    const { signal } = running;
    say(await run(asked, { info, wanted: wanted ?? again(asked), signal, say }));
    setEdits(); // named and marked as in this trace
    shownPrompt = asked.prompt;
  } catch (error) {
    const isCancelled = error.name === "AbortError";
    const isLocked = error instanceof KeyNeeded && !choice();
    if (isLocked) await showExample().catch(hide);
    else if (isCancelled || error instanceof Refusal) stay();
    else hide();
    const isAway = error instanceof Away;
    if (isAway) info = null; // another model may be served when it is back
    const said = error instanceof Refusal ? error.message : `The page failed: ${error.message}.`;
    if (isCancelled) say("Cancelled.");
    else if (error instanceof KeyNeeded) say(said);
    else {
      say("");
      fail(said, isAway ? () => submit(wanted) : null);
    }
    byId("error").scrollIntoView({ block: "nearest" }); // the button may be far below
  }
  const leave = document.activeElement === cancel;
  running = null;
  go.disabled = false;
  cancel.disabled = true;
  if (leave) go.focus();
}

/** What to choose of a run without a link: the same cell, and of the same prompt the same token. */
function again({ prompt }) {
  const { token, site, source } = choice() ?? {};
  return prompt === shownPrompt ? { token, site, source } : { site, source };
}

/** What is served, beside the title. */
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

/** Run what the address names, or the example; what takes long waits for a click. */
function begin() {
  const wanted = recall() ?? {};
  const { prompt, maxTokens } = options();
  if (prompt.length > MOST_UNASKED.prompt || maxTokens > MOST_UNASKED.tokens)
    say(`Press “${byId("run").textContent}” to run the prompt of the link.`);
  else if (byId("request").checkValidity()) submit(wanted);
}

onChoice(() => {
  const chosen = choice();
  offerLink(chosen.isSaved);
  if (chosen.isSaved) return; // an address holds runs alone
  writeLink({
    token: String(chosen.token),
    site: chosen.site === null ? null : String(chosen.site),
    source: chosen.source,
  });
});
addEventListener("hashchange", begin);

// A saved trace takes the place of a run: nothing of that run stays beside it.
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
  event.preventDefault(); // not what the button with the focus does, too
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
