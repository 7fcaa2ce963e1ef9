// The theme, which is the system's.

const dark = matchMedia("(prefers-color-scheme: dark)");

/** ``light`` or ``dark``. */
export function theme() {
  return dark.matches ? "dark" : "light";
}

/** Call a function whenever the theme changes. */
export function onTheme(act) {
  dark.addEventListener("change", act);
}
