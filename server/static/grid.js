// A grid of coloured cells that a pointer, a finger or the arrow keys reach one by one.
import { svg } from "./svg.js";

/**
 * Cells as a group of an SVG element.
 *
 * rows: how many columns each row has, from the left.
 * x, y, width, height: where the grid stands, and of one cell, in pixels.
 * name: returns the description of a cell, when it gets the focus.
 * point: called with a cell that is pointed at or has the focus, and with null when none is.
 * pick: called with a cell that is clicked, or chosen by Enter or Space.
 */
export function grid({ rows, x, y, width, height, name, point, pick }) {
  const cells = rows.map((columns, row) =>
    Array.from({ length: columns }, (_, column) =>
      svg("rect", {
        role: "gridcell",
        tabindex: -1,
        x: x + column * width,
        y: y + row * height,
        width,
        height,
        "shape-rendering": "crispEdges", // no seams between cells
        "data-row": row,
        "data-column": column,
      }),
    ),
  );
  const hidden = { width, height, fill: "none", "pointer-events": "none", visibility: "hidden" };
  const ring = svg("rect", { class: "ring", ...hidden });
  const picked = svg("rect", { class: "ring picked", ...hidden });
  const lines = cells.map((row) => svg("g", { role: "row" }, ...row));
  // An SVG element that listens for the focus would be a stop of the Tab key, but for its tabindex.
  const node = svg("g", { tabindex: -1 }, ...lines);
  let stop = null; // the one cell that the Tab key reaches

  const placeOf = (cell) => ({
    row: Number(cell.dataset.row),
    column: Number(cell.dataset.column),
  });

  function put(frame, place) {
    frame.setAttribute("visibility", place ? "visible" : "hidden");
    if (!place) return;
    frame.setAttribute("x", x + place.column * width);
    frame.setAttribute("y", y + place.row * height);
  }

  function stopAt(cell) {
    stop?.setAttribute("tabindex", -1);
    stop = cell;
    stop?.setAttribute("tabindex", 0);
  }

  function reach(cell) {
    cell.setAttribute("aria-label", name(placeOf(cell)));
    put(ring, placeOf(cell));
    point(placeOf(cell));
  }

  const KEYS = {
    ArrowLeft: (row, column) => cells[row][column - 1],
    ArrowRight: (row, column) => cells[row][column + 1],
    ArrowUp: (row, column) => cells[row - 1]?.[Math.min(column, cells[row - 1].length - 1)],
    ArrowDown: (row, column) => cells[row + 1]?.[Math.min(column, cells[row + 1].length - 1)],
    Home: (row) => cells[row][0],
    End: (row) => cells[row].at(-1),
  };

  node.addEventListener("keydown", (event) => {
    const cell = event.target.closest("[role=gridcell]");
    if (!cell || event.ctrlKey || event.altKey || event.metaKey) return;
    const { row, column } = placeOf(cell);
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pick({ row, column });
    } else if (event.key in KEYS) {
      event.preventDefault();
      const next = KEYS[event.key](row, column);
      if (next) {
        stopAt(next);
        next.focus();
      }
    }
  });
  node.addEventListener("focusin", (event) => {
    if (event.target !== node) reach(event.target);
  });
  node.addEventListener("pointerover", (event) => {
    if (event.target.dataset.row !== undefined) reach(event.target);
  });
  for (const end of ["focusout", "pointerleave"])
    node.addEventListener(end, () => {
      put(ring, null);
      point(null);
    });
  node.addEventListener("click", (event) => {
    if (event.target.dataset.row === undefined) return;
    stopAt(event.target);
    pick(placeOf(event.target));
  });
  stopAt(cells[0]?.[0] ?? null);

  return {
    node,
    rings: [picked, ring],
    /** Fill every cell with a colour. */
    paint(colourOf) {
      cells.forEach((row, at) =>
        row.forEach((cell, column) => cell.setAttribute("fill", colourOf(at, column))),
      );
    },
    /** Frame the cell that is chosen, or none. */
    choose(place) {
      put(picked, place);
      const cell = place && cells[place.row]?.[place.column];
      for (const one of node.querySelectorAll("[aria-selected]"))
        one.removeAttribute("aria-selected");
      cell?.setAttribute("aria-selected", "true");
      if (cell && !node.contains(document.activeElement)) stopAt(cell);
    },
  };
}
