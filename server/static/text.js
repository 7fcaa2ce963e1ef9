// Tokens as text: what has no shape gets a sign.
import { html } from "./svg.js";

const MARKS = { " ": "·", "\t": "⇥", "\n": "↵" };
const SHAPELESS = /([\p{C}\p{Z}])/u;

/** The text of a token, or null where it says nothing: bytes of a character have none alone. */
export function textOf({ text }) {
  return text && !text.includes("\uFFFD") ? text : null;
}

/** Why a token is shown as a number, or null where it is not. */
export function unnamed(token) {
  return textOf(token) === null ? `id ${token.id}: a token without text of its own` : null;
}

function parts(token) {
  const text = textOf(token);
  if (text === null) return [[`#${token.id}`, true]];
  return text
    .split(SHAPELESS)
    .filter((part) => part !== "")
    .map((part) =>
      SHAPELESS.test(part) ? [MARKS[part] ?? `U+${codePoint(part)}`, true] : [part, false],
    );
}

function codePoint(character) {
  return character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

/** A token as nodes; signs have a separate class. */
export function visible(token) {
  return parts(token).map(([text, isMark]) =>
    isMark ? html("span", { class: "mark" }, text) : text,
  );
}

/** A token as a plain string of at most so many characters. */
export function short(token, most = 12) {
  const text = parts(token)
    .map(([part]) => part)
    .join("");
  return [...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text;
}

/** A token between quotation marks, so that blanks and line breaks are seen; or its id. */
export function quoted(token) {
  const text = textOf(token);
  if (text === null) return `id ${token.id}`;
  return JSON.stringify(text).replace(/[^\P{C}]|[^\P{Z} ]/gu, (sign) => `\\u{${codePoint(sign)}}`);
}

/** A token as a person says it. */
export function spoken(token) {
  return `token ${token.position}, ${quoted(token)}`;
}
