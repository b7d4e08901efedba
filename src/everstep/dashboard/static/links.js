// Links in a reason: workers, steps and generations that it names. Text stays text.

import { el } from "./dom.js";
import { WORDS } from "./words.js";

const NAMED = /\b(worker|step|generation) (\d{1,9})\b/g;
const acts = {};

/** Handlers of links: {worker(id), step(number), generation(number)}. */
export const linksDo = (found) => Object.assign(acts, found);

/** A text as nodes, with a link for each of these. */
export function linked(text) {
  const said = String(text ?? ""), found = [];
  let from = 0;
  for (const match of said.matchAll(NAMED)) {
    const [whole, kind, id] = match;
    found.push(said.slice(from, match.index), el("button", { type: "button", className: "link-to", "data-kind": kind, title: WORDS[kind] ?? "", onclick: (event) => (event.stopPropagation(), acts[kind]?.(Number(id))) }, whole));
    from = match.index + whole.length;
  }
  return [...found, said.slice(from)].filter((part) => part !== "");
}

/** Put a text with its links into a node, touching the page only where it changes. */
export function writeLinked(node, text) {
  const said = String(text ?? "");
  if (node.textContent !== said) node.replaceChildren(...linked(said));
}
