// The theme: the system's until the button is pressed.

const system = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const button = document.getElementById("theme");

/** ``light`` or ``dark``. */
export function theme() {
  return root.dataset.theme ?? (system.matches ? "dark" : "light");
}

/** Call a function whenever the theme changes. */
export function onTheme(act) {
  function changed() {
    offer();
    act();
  }
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    changed();
  });
  system.addEventListener("change", changed);
  offer();
}

/** Say on the button which theme it gives. */
function offer() {
  button.textContent = theme() === "dark" ? "Light theme" : "Dark theme";
}
