// A trace on the page: its tokens to choose from, the figures of the chosen one, downloads, theme.
"use strict";

const AttnResViewer = (() => {
  const byId = (id) => document.getElementById(id);
  const { weights, magnitude, entropy } = AttnResFigures;
  const PICTURES = [
    {
      id: "weights",
      ofToken: true,
      title: () => `Depth attention of ${spoken(chosen)}`,
      svg: (...size) => weights(summary, chosen, ...size),
    },
    {
      id: "mean-weights",
      title: () => "Depth attention, mean over tokens",
      svg: (...size) => weights(summary, null, ...size),
    },
    {
      id: "magnitude",
      ofToken: true,
      title: () => `Magnitude of sources, ${spoken(chosen)}`,
      svg: (...size) => magnitude(summary, chosen, ...size),
    },
    {
      id: "entropy",
      ofToken: true,
      title: () => `Entropy by site, ${spoken(chosen)}`,
      svg: (...size) => entropy(summary, chosen, ...size),
    },
  ];
  // What a space, a tab and a line break look like; other characters without a shape are named.
  const MARKS = { " ": "·", "\t": "⇥", "\n": "↵" };
  const SHAPELESS = /([\p{C}\p{Z}])/u;

  let summary = null;
  let answerStart = 0; // position of the first token that the model gave
  let chosen = 0; // index in the trace's tokens
  let waiting = null; // pictures that the next frame draws

  /** Show a trace; ``promptTokens`` where another request made the answer. */
  function show(trace, promptTokens = trace.prompt_tokens) {
    summary = AttnResFigures.summarise(trace);
    answerStart = promptTokens;
    byId("viewer").hidden = false;
    byId("tokens").replaceChildren(...trace.tokens.flatMap(chip));
    byId("figures").hidden = trace.tokens.length === 0;
    if (trace.tokens.length > 0) choose(trace.tokens.length - 1);
    byId("tokens").scrollTop = byId("tokens").scrollHeight;
    draw(PICTURES);
  }

  function hide() {
    byId("viewer").hidden = true;
  }

  // Tokens.

  function chips() {
    return byId("tokens").querySelectorAll('[role="option"]');
  }

  /** A token that can be chosen, and a line break where its text has one. */
  function chip(token, index) {
    const span = document.createElement("span");
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", spoken(index));
    span.className = token.position < answerStart ? "prompt" : "answer";
    span.setAttribute("aria-selected", "false");
    span.tabIndex = -1;
    span.dataset.index = index;
    span.append(...visible(token));
    return token.text?.includes("\n") ? [span, document.createElement("br")] : [span];
  }

  function visible({ id, text }) {
    if (!text) return [mark(`#${id}`)];
    const parts = text.split(SHAPELESS).filter((part) => part !== "");
    return parts.map((part) =>
      SHAPELESS.test(part) ? mark(MARKS[part] ?? `U+${codePoint(part)}`) : part,
    );
  }

  function mark(text) {
    const span = document.createElement("span");
    span.className = "mark";
    span.textContent = text;
    return span;
  }

  function codePoint(character) {
    return character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  }

  function spoken(index) {
    const { position, id, text } = summary.trace.tokens[index];
    return `token ${position}, ${text ? JSON.stringify(text) : `id ${id}`}`;
  }

  function choose(index) {
    const all = chips();
    for (const at of [chosen, index]) {
      all[at]?.setAttribute("aria-selected", String(at === index));
      if (all[at]) all[at].tabIndex = at === index ? 0 : -1; // one stop for the Tab key
    }
    chosen = index;
    const { tokens, total_tokens } = summary.trace;
    const { position, id } = tokens[index];
    const part = position < answerStart ? "prompt" : "answer";
    const place = `of the ${part}; the sequence has ${total_tokens} tokens`;
    byId("chosen").textContent = `Chosen: ${spoken(index)} (id ${id}), ${place}.`;
    draw(PICTURES.filter(({ ofToken }) => ofToken));
  }

  /** The chip above or below, nearest to the middle of the chosen one. */
  function neighbour(step) {
    const all = [...chips()];
    const middle = ({ left, right }) => (left + right) / 2;
    const from = all[chosen].getBoundingClientRect();
    let best = chosen;
    let line = null;
    for (let at = chosen + step; at >= 0 && at < all.length; at += step) {
      const box = all[at].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 2) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) >= 2) break;
      const distance = (one) => Math.abs(middle(one) - middle(from));
      if (best === chosen || distance(box) < distance(all[best].getBoundingClientRect())) best = at;
    }
    return best;
  }

  const KEYS = {
    ArrowLeft: () => Math.max(0, chosen - 1),
    ArrowRight: () => Math.min(chips().length - 1, chosen + 1),
    ArrowUp: () => neighbour(-1),
    ArrowDown: () => neighbour(1),
    Home: () => 0,
    End: () => chips().length - 1,
  };

  byId("tokens").addEventListener("keydown", (event) => {
    if (!(event.key in KEYS) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(KEYS[event.key]());
    chips()[chosen].focus();
  });

  byId("tokens").addEventListener("click", (event) => {
    const found = event.target.closest('[role="option"]');
    if (!found) return;
    choose(Number(found.dataset.index));
    found.focus();
  });

  // Figures.

  /** Draw pictures in the next frame, each once however often it was asked for. */
  function draw(pictures) {
    if (waiting === null) {
      waiting = new Set();
      requestAnimationFrame(() => {
        const now = waiting;
        waiting = null;
        now.forEach(drawOne);
      });
    }
    pictures.forEach((picture) => waiting.add(picture));
  }

  function drawOne({ id, title, svg: make }) {
    const place = byId(id).querySelector(".plot");
    if (place.clientWidth === 0) return; // hidden
    const svg = make(place.clientWidth, theme());
    svg.setAttribute("aria-label", title());
    place.replaceChildren(svg);
  }

  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (summary === null || contentRect.width === width) return;
    width = contentRect.width;
    draw(PICTURES);
  }).observe(byId("figures"));

  // Downloads.

  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href));
  }

  for (const { id, title, ofToken } of PICTURES) {
    const button = byId(id).querySelector("button");
    button.setAttribute(
      "aria-label",
      `Download as SVG: ${byId(id).querySelector("h2").textContent}`,
    );
    button.addEventListener("click", () => {
      const svg = byId(id).querySelector("svg");
      const suffix = ofToken ? `-token-${summary.trace.tokens[chosen].position}` : "";
      const text = AttnResFigures.file(svg, title(), theme());
      save(`attn-res-${id}${suffix}.svg`, "image/svg+xml", text);
    });
  }

  byId("json").addEventListener("click", () =>
    save("attn-res-trace.json", "application/json", JSON.stringify(summary.trace)),
  );

  // Theme: the system's until the button is pressed.

  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;

  function theme() {
    return root.dataset.theme ?? (system.matches ? "dark" : "light");
  }

  function themeChanged() {
    byId("theme").setAttribute("aria-pressed", String(theme() === "dark"));
    if (summary !== null) draw(PICTURES);
  }

  byId("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    themeChanged();
  });
  system.addEventListener("change", themeChanged);
  themeChanged();

  // A file that holds its own trace.
  const embedded = byId("trace");
  if (embedded) {
    const trace = JSON.parse(embedded.textContent);
    byId("model").textContent = trace.model;
    show(trace);
  }

  return { show, hide };
})();
