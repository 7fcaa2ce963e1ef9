// The panels of the page, side by side on the rows of one depth axis.
import { differenceScale, inkOf, weightScale } from "./colours.js";
import { depthMap } from "./depth_map.js";
import { figureFile } from "./figure_file.js";
import { legend } from "./legend.js";
import { lensColumn } from "./lens_column.js";
import { entropy, magnitude } from "./profile.js";
import { save } from "./save.js";
import { spoken } from "./text.js";
import { theme } from "./theme.js";
import { tokenMap } from "./token_map.js";

const byId = (id) => document.getElementById(id);
const LEAST_HEIGHT = 280; // pixels of all rows together
const AXES = 60; // of a map's width, for all but the columns
const BESIDES = 605; // of the screen's height, for all but the rows
const FINGER = 24; // pixels that it needs
const ROW = { least: 3, most: FINGER };
const phone = matchMedia("(max-width: 60rem)"); // as in page.css: figures below each other
const NAMES = ["weights", "second", "magnitude", "entropy", "lens", "over-tokens"];
const drawn = {}; // by name what its maker returned, with its title
let beside = null; // what files need that the page has beside a figure, see ``build``

/**
 * Draw everything anew.
 *
 * view: ``summary``, ``kept`` (``{ mean, token, most }`` of a comparison, or null), ``served`` means, ``mode`` of the
 * second map, and the acts ``nameOf``, ``point``, ``pick`` of cells, ``pickToken``.
 */
export function build(view) {
  const { summary, mode } = view;
  const means = mode === "served" ? view.served : summary.sites.map(({ mean }) => mean);
  const ink = inkOf(theme());
  const scale = weightScale(summary.widest);
  const other = isMean(mode) ? scale : differenceScale(view.kept.most);
  byId("lens").hidden = !summary.hasLens;
  byId("figures").classList.toggle("with-lens", summary.hasLens);
  const half = byId("figures").clientWidth / 2 - AXES;
  byId("figures").classList.toggle("wide", summary.widest * FINGER > half);
  const besides = phone.matches ? 0 : BESIDES; // a finger scrolls from one figure to the next
  const rows = Math.max(LEAST_HEIGHT, innerHeight - besides) / summary.sites.length;
  const rowHeight = Math.max(ROW.least, Math.min(ROW.most, rows > 6 ? Math.floor(rows) : rows));
  const leftmost = byId("weights").offsetLeft;
  const size = (name) => ({ width: byId(name).clientWidth, rowHeight, ink });
  const isFirst = (name) => byId(name).offsetLeft === leftmost;
  const acts = { name: view.nameOf, point: view.point, pick: view.pick };
  drawn.weights = depthMap(summary, { ...size("weights"), hasLayers: true, scale: null, ...acts });
  drawn.second = depthMap(summary, {
    ...size("second"),
    hasLayers: isFirst("second"),
    scale: other,
    ...acts,
  });
  drawn.magnitude = magnitude(summary, { ...size("magnitude"), hasBlocks: false });
  drawn.entropy = entropy(summary, {
    ...size("entropy"),
    hasBlocks: byId("entropy").clientWidth > 150,
  });
  drawn.lens = summary.hasLens ? lensColumn(summary, size("lens")) : null;
  for (const name of NAMES.slice(0, 5)) put(name);
  if (isMean(mode)) drawn.second.paint((row, column) => scale.colour(means[row][column]));
  byId("legend").replaceChildren(legend(summary, byId("legend").clientWidth, ink));
  drawn["over-tokens"] = null;
  const lacksAxis = NAMES.slice(isFirst("second") ? 2 : 1, 5);
  const scales = { weights: scale, "over-tokens": scale };
  beside = { summary, rowHeight, ink, lacksAxis, scales };
  update(view);
}

/** Show the token and the cell that are chosen: ``token``, ``cell`` (or null) and ``marks``. */
export function update(view) {
  const { summary, token, cell, mode } = view;
  const scale = weightScale(summary.widest);
  const edited = summary.trace.edits?.length ? ", edited" : "";
  const what = `${spoken(summary.trace.tokens[token])}${edited}`;
  drawn.weights.paint((row, column) => scale.colour(summary.sites[row].weights[token][column]));
  if (!isMean(mode)) {
    const other = differenceScale(view.kept.most);
    const change = mode === "token" ? view.kept.token(token) : view.kept.mean;
    drawn.second.paint((row, column) =>
      change ? other.colour(change[row][column]) : "transparent",
    );
  }
  for (const name of ["magnitude", "entropy", "lens"]) drawn[name]?.show(token);
  for (const name of ["weights", "second"]) {
    drawn[name].choose(cell);
    drawn[name].mark(view.marks);
  }
  title("weights", `Depth attention of ${what}`);
  title("second", `${view.modeTitle}${edited}`);
  title("magnitude", `Magnitude of sources, ${what}`);
  title("entropy", `Entropy by site, ${what}`);
  if (drawn.lens) title("lens", `Depth lens of ${what}`);
  overTokens(view, scale, edited);
}

/** The map of the chosen site over the tokens; drawn anew only for another site. */
function overTokens(view, scale, edited) {
  const { summary, token, cell } = view;
  const name = "over-tokens";
  byId(name).hidden = cell === null;
  if (cell === null) return;
  const site = summary.sites[cell.row];
  if (drawn[name]?.row !== cell.row) {
    const { nameOf } = summary;
    const options = { width: byId(name).clientWidth, ink: inkOf(theme()), scale, nameOf };
    const at = ({ row, column }) => [{ row: site.row, column: row }, column];
    const map = tokenMap(site, summary.trace.tokens, {
      ...options,
      name: (place) => view.nameOf(...at(place)),
      point: (place) => (place ? view.point(...at(place)) : view.point(null)),
      pick: (place) => view.pickOver(...at(place)),
    });
    drawn[name] = { ...map, row: cell.row };
    put(name);
  }
  drawn[name].show(token);
  drawn[name].choose({ row: cell.column, column: token });
  byId("over-title").textContent = `Site ${site.index}, ${site.name}: every token`;
  title(name, `Depth attention of site ${site.index}, ${site.name}, over the tokens${edited}`);
}

/** True if the second map has weights, not their differences. */
function isMean(mode) {
  return mode === "mean" || mode === "served";
}

function put(name) {
  byId(name)
    .querySelector(".plot")
    .replaceChildren(...(drawn[name] ? [drawn[name].node] : []));
}

function title(name, text) {
  drawn[name].node.setAttribute("aria-label", text);
}

for (const name of NAMES) {
  const button = byId(name).querySelector("figcaption > button");
  button.setAttribute("aria-label", `Save as SVG: ${name.replace("-", " ")}`);
  button.addEventListener("click", () => {
    const { lacksAxis, scales, ...common } = beside;
    const options = { ...common, hasAxis: lacksAxis.includes(name), scale: scales[name] ?? null };
    save(
      `attn-res-${name}.svg`,
      "image/svg+xml",
      figureFile(drawn[name].node, { name, ...options }),
    );
  });
}
