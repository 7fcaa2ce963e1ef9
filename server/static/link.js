// The fragment of the address: prompt, options, edits, and what is chosen.  It is sent to no server.

const PAUSE = 200; // milliseconds: browsers refuse an address that changes with every key
const changes = {};
let waiting = null;

/** What the fragment says, by name; texts as they stand in it. */
export function readLink() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Say something in the fragment, soon; a value of null is left out. */
export function writeLink(some) {
  Object.assign(changes, some);
  waiting ??= setTimeout(write, PAUSE);
}

/** The whole address, including its fragment. */
export function link() {
  clearTimeout(waiting);
  write();
  return location.href;
}

/** Say nothing in the fragment. */
export function clearLink() {
  clearTimeout(waiting);
  waiting = null;
  for (const name of Object.keys(changes)) delete changes[name];
  history.replaceState(null, "", location.pathname + location.search);
}

function write() {
  waiting = null;
  const fields = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") fields.delete(name);
    else fields.set(name, value);
    delete changes[name];
  }
  history.replaceState(null, "", `#${fields}`);
}
