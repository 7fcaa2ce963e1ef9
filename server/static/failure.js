// The last error of the page, which goes as soon as the input changes, and the button for another try.

const byId = (id) => document.getElementById(id);
let again = null;

/** Say an error in place of the last one; with ``act``, *Retry* is there and does that. */
export function fail(sentence, act = null) {
  again = act;
  byId("error").textContent = sentence;
  byId("retry").hidden = act === null;
  byId("unopened").textContent = "";
}

/** Take the last error away. */
export function forget() {
  fail("");
}

byId("request").addEventListener("input", forget);
byId("retry").addEventListener("click", () => again());
