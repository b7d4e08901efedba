// Panels that fold: a click on the heading, remembered; on a phone most of them are folded at first.

import { attribute, el } from "./dom.js";

const KEPT = "everstep-folded";
export const NARROW = matchMedia("(max-width: 560px)");
const OPEN_ON_PHONES = new Set(["lives-title", "workers-title", "curves-title", "overview-title"]);

const said = () => new Map(JSON.parse(localStorage.getItem(KEPT) ?? "[]"));

function set(panel, button, folded) {
  panel.toggleAttribute("data-folded", folded);
  attribute(button, "aria-expanded", String(!folded));
}

/** Make every panel's heading a button that folds it. */
export function foldable() {
  for (const title of document.querySelectorAll("main section.panel > h2, main section.panel > .head > h2")) {
    const panel = title.closest(".panel"), button = el("button", { type: "button", className: "fold" }, ...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const folded = !panel.hasAttribute("data-folded"), all = said().set(title.id, folded);
      set(panel, button, folded);
      if (title.id !== "overview-title") localStorage.setItem(KEPT, JSON.stringify([...all]));
    });
    set(panel, button, said().get(title.id) ?? (NARROW.matches && !OPEN_ON_PHONES.has(title.id)));
  }
}

/** Fold or unfold the panel that holds this element. */
export function fold(node, folded) {
  const panel = node.closest(".panel"), button = panel?.querySelector("button.fold");
  if (button) set(panel, button, folded);
}

/** The same on a phone alone: the curves of one run stand among those of all runs that are compared. */
export function foldOnPhones(node, folded) {
  if (NARROW.matches) fold(node, folded);
}
