// Colours and their scales, the same as in the figures of `attnres-serve inspect`.

// matplotlib's viridis and RdBu_r at even steps.
const VIRIDIS = stops(
  "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3b528b 375b8d 33638d 2f6b8e 2c728e " +
    "297a8e 26828e 23898e 21918c 1f988b 1fa088 22a785 28ae80 32b67a 3fbc73 4ec36b 5ec962 70cf57 " +
    "84d44b 98d83e addc30 c2df23 d8e219 ece51b fde725",
);
const RED_BLUE = stops(
  "053061 2065ab 4393c3 90c4dd d1e5f0 f7f6f6 fddbc7 f3a481 d6604d b1182b 67001f",
);
const FEW_SOURCES = 32; // for which a square root shows small weights
const WEIGHT_TICKS = [0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1];

// Colours of Okabe and Ito, which can be distinguished with every kind of colour blindness.
const INKS = {
  light: {
    background: "#ffffff",
    text: "#1b2430",
    faint: "#5b6675",
    neutral: "#595959",
    band: "#f0f2f5",
    bar: "#cfe0f1",
    attention: "#0072b2",
    mlp: "#d55e00",
    mixer: "#009e73",
    final: "#000000",
  },
  dark: {
    background: "#171b22",
    text: "#e4e9f0",
    faint: "#9aa6b6",
    neutral: "#b4bdc9",
    band: "#20262f",
    bar: "#234058",
    attention: "#56b4e9",
    mlp: "#f08a3c",
    mixer: "#35c79a",
    final: "#ffffff",
  },
};

/** The colours of everything but weights, in a theme. */
export function inkOf(theme) {
  return INKS[theme];
}

function stops(text) {
  return text.split(" ").map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
}

function between(colours, share) {
  const at = Math.min(1, Math.max(0, share)) * (colours.length - 1);
  const low = Math.min(Math.floor(at), colours.length - 2);
  const mixed = colours[low].map((part, i) => part + (at - low) * (colours[low + 1][i] - part));
  return `rgb(${mixed.map(Math.round).join(", ")})`;
}

/**
 * The scale of weights from 0 to 1: a square root, or a cube root for many sources, fixed so that
 * figures compare.  ``place`` of a value is from 0 to 1, and ``at`` a place stands that value.
 */
export function weightScale(sources) {
  const root = sources <= FEW_SOURCES ? 2 : 3;
  const place = (weight) => weight ** (1 / root);
  return {
    name: "weight",
    place,
    at: (share) => share ** root,
    colour: (weight) => between(VIRIDIS, place(weight)),
    ticks: WEIGHT_TICKS,
  };
}

/** The scale of differences of weights, from -most to most. */
export function differenceScale(most) {
  const place = (value) => (value / most + 1) / 2;
  return {
    name: "change",
    place,
    at: (share) => (2 * share - 1) * most,
    colour: (value) => between(RED_BLUE, place(value)),
    ticks: [-most, -most / 2, 0, most / 2, most],
  };
}

/** Black or white, whichever is read more easily on a colour ``rgb(...)``. */
export function inkOn(colour) {
  const [red, green, blue] = colour
    .match(/\d+/g)
    .map((part) =>
      part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4,
    );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000" : "#fff";
}
