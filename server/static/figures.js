// The figures of a trace as SVG elements.  Nothing here knows the page.
"use strict";

const AttnResFigures = (() => {
  // Sequential colours grow in lightness alone, lines are Okabe and Ito's or near them: both can be
  // told apart by any eye.  A weight of zero differs from the background, which means no source.
  const THEMES = {
    light: {
      background: "#ffffff",
      text: "#1b2430",
      faint: "#5b6675",
      token: "#c4500a",
      mean: "#0072b2",
      weights: ["#e6ebe6", "#a8d8c8", "#4aa9c1", "#2263a8", "#0c1f5c"],
    },
    dark: {
      background: "#171b22",
      text: "#e4e9f0",
      faint: "#9aa6b6",
      token: "#ffa657",
      mean: "#6cb6ff",
      weights: ["#262e3a", "#24507f", "#2a8fae", "#7ccfb4", "#f4f3a8"],
    },
  };
  const ROOT = 3; // of a weight, for its colour: of 90 sources each has about 0.01
  const FONT = 11;
  const LETTER = 0.56 * FONT; // about the width of one

  /** A trace with what its figures share: columns, names of sites, means over its tokens. */
  function summarise(trace) {
    const names = new Set(trace.sites.flatMap((site) => site.sources));
    const columns = [...names].filter((name) => name !== "partial");
    if (names.has("partial")) columns.push("partial");
    const sites = trace.sites.map((site, row) => ({ ...site, row, name: siteName(site) }));
    const means = sites.map((site) => ({
      weights: columnMeans(site.weights),
      rms: columnMeans(site.rms),
      entropy: d3.mean(site.entropy),
    }));
    return { trace, columns, sites, means };
  }

  function columnMeans(rows) {
    return d3.transpose(rows).map((column) => d3.mean(column));
  }

  function siteName(site) {
    if (site.kind === "final") return "final norm";
    return `${site.kind === "mlp" ? "MLP" : site.kind} of layer ${site.layer}`;
  }

  /** What a site says of a token, or of the mean where the token is null. */
  function read(summary, site, token) {
    if (token === null) return summary.means[site.row];
    return {
      weights: site.weights[token],
      rms: site.rms[token],
      entropy: site.entropy[token],
    };
  }

  /** Heat map, sites x sources, of a token or of the mean (null). */
  function weights(summary, token, width, themeName) {
    const theme = THEMES[themeName];
    const { sites, columns } = summary;
    const cells = sites.flatMap((site) => {
      const found = read(summary, site, token);
      return site.sources.map((source, at) => ({
        row: site.row,
        source,
        weight: found.weights[at],
        title:
          `${site.name}\n${source}: ${number(found.weights[at])}\n` +
          `rms ${number(found.rms[at])}`,
      }));
    });
    const few = sites.length <= 24;
    const margins = { marginTop: 40, marginRight: 14, marginBottom: 36, marginLeft: few ? 76 : 54 };
    const cellHeight = Math.min(22, Math.max(5, Math.floor(440 / sites.length)));
    const cellWidth = (width - margins.marginLeft - margins.marginRight) / columns.length;
    const named = fits(`block ${columns.length}`, cellWidth);
    const at = { x: "source", y: "row" };
    const hit = { ...at, maxRadius: Math.hypot(cellWidth, cellHeight) / 2 };
    return finish(
      Plot.plot({
        width,
        ...margins,
        height: cellHeight * sites.length + margins.marginTop + margins.marginBottom,
        x: {
          type: "band",
          domain: columns,
          padding: 0,
          ticks: sourceTicks(columns, cellWidth),
          tickFormat: (name) => shortSource(name, cellWidth),
          tickSize: 3,
          label: named ? "source" : "source (numbers are finished blocks)",
          ...centred,
        },
        y: {
          type: "band",
          domain: d3.range(sites.length),
          padding: 0,
          ticks: few ? d3.range(sites.length) : siteTicks(sites, 24),
          tickFormat: (row) => (few ? shortSite(sites[row]) : layerOf(sites[row])),
          tickSize: 3,
          label: few ? null : "layer",
          ...centred,
        },
        color: {
          type: "pow",
          exponent: 1 / ROOT,
          domain: [0, 1],
          interpolate: d3.piecewise(d3.interpolateLab, theme.weights),
        },
        marks: [
          ramp(theme, margins.marginLeft),
          Plot.cell(cells, {
            ...at,
            fill: "weight",
            inset: Math.min(cellWidth, cellHeight) < 9 ? 0 : 0.5,
            shapeRendering: "crispEdges", // no seams between cells
          }),
          Plot.cell(cells, Plot.pointer({ ...hit, stroke: theme.text, strokeWidth: 1.5 })),
          tip(cells, hit, theme),
        ],
      }),
      theme,
    );
  }

  /** Root mean square of the sources by depth, of a token and the mean. */
  function magnitude(summary, token, width, themeName) {
    const theme = THEMES[themeName];
    const series = seriesOf(summary, token, theme, ({ row, name, sources }, { rms }) =>
      sources.map((source, at) => ({
        row,
        source,
        value: rms[at],
        block: sources.length, // of whose partial sum this is
        title: `${name}\n${source}: rms ${number(rms[at])}`,
      })),
    );
    const items = [...seriesItems(theme), { label: "finished source", square: theme.faint }];
    if (summary.columns.includes("partial"))
      items.push({ label: "partial sum", line: theme.faint });
    const crowded = summary.columns.length > 30;
    const marks = series.flatMap(({ colour, dash, points }) => {
      const partial = points.filter(({ source }) => source === "partial");
      const finished = firstOfEach(points.filter(({ source }) => source !== "partial"));
      const at = { x: "row", y: "value" };
      return [
        Plot.line(finished, { ...at, stroke: colour, strokeOpacity: 0.5, strokeDasharray: dash }),
        Plot.line(partial, {
          ...at,
          z: "block",
          stroke: colour,
          strokeWidth: 1.75,
          strokeDasharray: dash,
        }),
        Plot.dot(partial, { ...at, r: 1.6, fill: colour }),
        Plot.dot(finished, { ...at, r: crowded ? 2 : 3.2, symbol: "square", fill: colour }),
      ];
    });
    const all = series.flatMap(({ points }) => points);
    return lines(summary, width, theme, items, "rms", marks, all);
  }

  /** Entropy of every site, of a token and the mean, below the most that it could be. */
  function entropy(summary, token, width, themeName) {
    const theme = THEMES[themeName];
    const series = seriesOf(summary, token, theme, ({ row, name, sources }, found) => [
      {
        row,
        value: found.entropy,
        title: `${name}\nentropy ${number(found.entropy)} of ${number(Math.log(sources.length))}`,
      },
    ]);
    const bound = summary.sites.map(({ row, sources }) => ({
      row,
      value: Math.log(sources.length),
    }));
    const at = { x: "row", y: "value" };
    const marks = [
      Plot.line(bound, { ...at, stroke: theme.faint, strokeDasharray: "1.5,3" }),
      ...series.flatMap(({ colour, dash, points }) => [
        Plot.line(points, { ...at, stroke: colour, strokeWidth: 1.75, strokeDasharray: dash }),
        Plot.dot(points, { ...at, r: 2, fill: colour }),
      ]),
    ];
    const items = [
      ...seriesItems(theme),
      { label: "all sources alike", line: theme.faint, dash: "1.5,3" },
    ];
    const all = series.flatMap(({ points }) => points);
    return lines(summary, width, theme, items, "entropy (nats)", marks, all);
  }

  /** The mean below, the token above it, each with the points that ``pointsOf`` makes of a site. */
  function seriesOf(summary, token, theme, pointsOf) {
    return [
      { of: null, colour: theme.mean, dash: "5,3", suffix: "mean over tokens" },
      { of: token, colour: theme.token, suffix: "chosen token" },
    ].map(({ of, colour, dash, suffix }) => ({
      colour,
      dash,
      points: summary.sites
        .flatMap((site) => pointsOf(site, read(summary, site, of)))
        .map((point) => ({ ...point, title: `${point.title}\n${suffix}` })),
    }));
  }

  function seriesItems(theme) {
    return [
      { label: "chosen token", line: theme.token },
      { label: "mean over tokens", line: theme.mean, dash: "5,3" },
    ];
  }

  function firstOfEach(points) {
    return [
      ...d3
        .rollup(
          points,
          ([first]) => first,
          ({ source }) => source,
        )
        .values(),
    ];
  }

  /** A chart over the sites. */
  function lines(summary, width, theme, items, label, marks, points) {
    const { sites } = summary;
    const key = legend(items, theme, width);
    const at = { x: "row", y: "value" };
    return finish(
      Plot.plot({
        width,
        height: 270 + key.height,
        marginTop: key.height + 14,
        marginRight: 14,
        marginBottom: 36,
        marginLeft: 48,
        x: {
          type: "linear",
          domain: [-0.5, sites.length - 0.5],
          ticks: siteTicks(sites, (width - 62) / 34),
          tickFormat: (row) => layerOf(sites[row]),
          tickSize: 3,
          label: "layer (its attention, then its MLP)",
          ...centred,
        },
        y: { zero: true, nice: true, grid: true, ticks: 6, label, ...centred },
        marks: [key.mark, ...marks, tip(points, { ...at, maxRadius: 30 }, theme)],
      }),
      theme,
    );
  }

  const centred = { labelAnchor: "center", labelArrow: "none" };

  function tip(points, options, theme) {
    const looks = {
      fill: theme.background,
      stroke: theme.faint,
      fontSize: 12,
      lineHeight: 1.25,
      lineWidth: 30,
    };
    return Plot.tip(points, Plot.pointer({ ...options, title: "title", ...looks }));
  }

  /** Plot's own <style> is the page's, which allows none that is not in its style sheet. */
  function finish(svg, theme) {
    svg.querySelector("style").remove();
    return d3
      .select(svg)
      .attr("role", "img")
      .attr("font-size", FONT)
      .attr("color", theme.text)
      .node();
  }

  // Ticks: as many as there is room for.

  function stepFor(count, most) {
    return [1, 2, 4, 5, 8, 10, 16, 20, 25, 50].find((step) => count / step <= most) ?? 100;
  }

  /** Rows of sites: the first of every layer, or of every few, and the final one. */
  function siteTicks(sites, most) {
    const first = sites.filter(
      ({ kind, layer }, row) => kind !== "final" && layer !== sites[row - 1]?.layer,
    );
    const step = stepFor(first.length, most);
    const rows = first.filter((_, at) => at % step === 0).map(({ row }) => row);
    const final = sites.findIndex(({ kind }) => kind === "final");
    return final < 0 ? rows : [...rows.filter((row) => final - row >= 1.5 * step), final];
  }

  function layerOf(site) {
    return site.kind === "final" ? "final" : String(site.layer);
  }

  function shortSite(site) {
    if (site.kind === "final") return "final";
    return `${site.kind === "mlp" ? "MLP" : site.kind} ${site.layer}`;
  }

  /** Names of columns: every block, or every few, and both ends. */
  function sourceTicks(columns, cellWidth) {
    const blocks = columns.filter((name) => name.startsWith("block "));
    const step = stepFor(blocks.length, (blocks.length * cellWidth) / 26);
    const room = Math.ceil(34 / cellWidth); // columns between a number and a word
    return columns.filter((name, at) => {
      if (!name.startsWith("block ")) return true;
      const free = columns.at(-1) !== "partial" || columns.length - 1 - at >= room;
      return blockNumber(name) % step === 0 && at >= Math.min(room, step) && free;
    });
  }

  function fits(name, cellWidth) {
    return name.length * LETTER < cellWidth - 4;
  }

  function blockNumber(name) {
    return Number(name.slice("block ".length));
  }

  function shortSource(name, cellWidth) {
    if (fits(name, cellWidth)) return name;
    if (name.startsWith("block ")) return name.slice("block ".length);
    return name === "embedding" ? "emb." : "part.";
  }

  function number(value) {
    return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(3);
  }

  // Keys: marks of the figure's own, so that a downloaded figure has them.

  /** The colours of weights from 0 to 1, in the top margin. */
  function ramp(theme, left) {
    const steps = 48;
    const step = 3;
    return (index, scales) => {
      const g = d3.create("svg:g").attr("transform", `translate(${left},6)`);
      g.selectAll("rect")
        .data(d3.range(steps))
        .join("rect")
        .attr("x", (at) => at * step)
        .attr("width", step + 0.3)
        .attr("height", 9)
        .attr("fill", (at) => scales.color((at / (steps - 1)) ** ROOT));
      g.selectAll("text")
        .data([0, 0.5, 1])
        .join("text")
        .attr("x", (share) => share * steps * step)
        .attr("y", 21)
        .attr("fill", theme.text)
        .text((share) => String(share ** ROOT));
      g.append("text")
        .attr("x", steps * step + 10)
        .attr("y", 9)
        .attr("text-anchor", "start")
        .attr("fill", theme.text)
        .text("weight");
      return g.node();
    };
  }

  /** Which line is which, in as many rows as the width asks for. */
  function legend(items, theme, width) {
    let x = 0;
    let y = 0;
    const places = items.map(({ label }) => {
      const size = 34 + label.length * LETTER;
      if (x > 0 && x + size > width - 62) {
        x = 0;
        y += 16;
      }
      const place = { x, y };
      x += size;
      return place;
    });
    const mark = () => {
      const g = d3.create("svg:g").attr("transform", "translate(48,8)");
      items.forEach(({ label, line, square, dash }, at) => {
        const item = g.append("g").attr("transform", `translate(${places[at].x},${places[at].y})`);
        if (square) {
          item.append("path").attr("fill", square).attr("d", "M7,-3h6v6h-6z");
        } else {
          item
            .append("path")
            .attr("d", "M0,0h20")
            .attr("stroke", line)
            .attr("stroke-width", 2)
            .attr("stroke-dasharray", dash ?? null);
        }
        item
          .append("text")
          .attr("x", 25)
          .attr("y", 4)
          .attr("text-anchor", "start")
          .attr("fill", theme.text)
          .text(label);
      });
      return g.node();
    };
    return { mark, height: y + 16 };
  }

  /** The text of an SVG file with a title, from a figure on the page. */
  function file(svg, title, themeName) {
    const theme = THEMES[themeName];
    const copy = svg.cloneNode(true);
    const { width, height } = svg.viewBox.baseVal;
    const top = 28;
    for (const shown of copy.querySelectorAll('[aria-label="tip"]')) shown.remove();
    d3.select(copy)
      .attr("xmlns", "http://www.w3.org/2000/svg")
      .attr("viewBox", `0 ${-top} ${width} ${height + top}`)
      .attr("width", width)
      .attr("height", height + top)
      .call((root) =>
        root
          .insert("rect", ":first-child")
          .attr("y", -top)
          .attr("width", width)
          .attr("height", height + top)
          .attr("fill", theme.background),
      )
      .append("text")
      .attr("x", 8)
      .attr("y", -10)
      .attr("text-anchor", "start")
      .attr("font-size", 13)
      .attr("font-weight", "bold")
      .attr("fill", theme.text)
      .text(title);
    return new XMLSerializer().serializeToString(copy);
  }

  return { summarise, weights, magnitude, entropy, file };
})();
