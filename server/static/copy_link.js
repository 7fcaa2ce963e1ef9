// The button that copies the address, which holds the state of the page.
import { link } from "./link.js";

const byId = (id) => document.getElementById(id);

/** Copy a text; true if the browser let us. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // only over https and on this machine
    return true;
  } catch {
    const held = document.createElement("textarea");
    held.value = text;
    document.body.append(held);
    held.select();
    const isCopied = document.execCommand("copy");
    held.remove();
    return isCopied;
  }
}

/** Let the button copy the address; ``isSaved`` says whether a file is shown, which has none. */
export function offerLink(isSaved) {
  byId("copy").disabled = isSaved;
}

byId("copy").addEventListener("click", async () => {
  const isCopied = await copy(link());
  byId("copied").textContent = isCopied
    ? "The link is copied. It runs this prompt again."
    : "The browser copies nothing here; the address of the page is the link.";
  byId("copy").focus();
});
