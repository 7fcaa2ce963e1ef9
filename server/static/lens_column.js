// The depth lens beside the heat maps: the token that every site's mix would predict.
import { frame } from "./depth_map.js";
import { label, LETTER, root, svg } from "./svg.js";
import { short } from "./text.js";

/** A panel whose rows are those of the heat maps; ``show`` fills it for a token. */
export function lensColumn(summary, { width, rowHeight, ink }) {
  const { sites } = summary;
  const [left, across] = [6, width - 12];
  const height = frame.top + sites.length * rowHeight + frame.bottom;
  const name = across < 110 ? "top token" : "top token of the mix";
  const rows = svg("g", {});
  const step = Math.ceil(12 / rowHeight); // rows between two texts
  const node = root(
    width,
    height,
    ink,
    { role: "img" },
    rows,
    label(name, left + across / 2, height - 8, "middle", { fill: ink.faint }),
  );
  return {
    node,
    show(token) {
      const texts = sites.flatMap(({ row, lens }) => {
        const likely = lens?.[token]?.top[0];
        if (!likely) return [];
        const [y, middle] = [frame.top + row * rowHeight, frame.top + (row + 0.5) * rowHeight];
        const size = {
          x: left,
          y: y + 0.5,
          width: across * Math.exp(likely.logprob),
          height: rowHeight - 1,
        };
        const isNamed = row % step === 0 || row === sites.length - 1;
        const text = short(likely, Math.floor(across / LETTER));
        return [
          svg("rect", { ...size, fill: ink.bar }),
          ...(isNamed ? [label(text, left + 3, middle)] : []),
        ];
      });
      const isRead = sites.some(({ lens }) => lens?.[token]);
      const none = ["not read for", "this token"].map((text, line) =>
        label(text, width / 2, frame.top + 12 + 14 * line, "middle", { fill: ink.faint }),
      );
      rows.replaceChildren(...(isRead ? texts : none));
    },
  };
}
