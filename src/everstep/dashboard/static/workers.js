// The grid of workers, by stage. Elements are kept and changed in place: a thousand of them cost little.

import { $, attribute, bytes, el, number, plural, write } from "./dom.js";
import { NARROW } from "./fold.js";
import { WORDS } from "./words.js";

const GLYPH = { leader: "L", active: "A", standby: "S", spare: "·", healing: "H", suspect: "?", dead: "✕", left: "–" };
const COMPACT_FROM = 64, COMPACT_ON_PHONES = 8;

export class Workers {
  /** picked: called with the id of a worker that the user picks. */
  constructor(picked) {
    this.picked = picked;
    this.tiles = new Map();
    this.groups = new Map();
    this.order = [];
    this.chosen = null;
    this.rows = new Map();
    this.root = $("stages");
    this.root.addEventListener("keydown", (event) => this.move(event));
    this.root.addEventListener("click", (event) => {
      const tile = event.target.closest(".worker");
      if (tile) this.choose(Number(tile.dataset.id));
    });
    $("worker-legend").append(...Object.entries(GLYPH).filter(([name]) => name !== "left").map(([name, glyph]) => el("li", { "data-glyph": glyph, "data-state": name, title: WORDS[name] ?? "" }, name)));
  }

  clear() {
    this.root.replaceChildren();
    this.tiles.clear();
    this.groups.clear();
    this.rows = new Map();
    this.order = [];
    this.chosen = null;
  }

  update(rows) {
    this.rows = rows;
    const compact = rows.size > (NARROW.matches ? COMPACT_ON_PHONES : COMPACT_FROM);
    const wanted = new Map();
    for (const id of [...rows.keys()].sort((a, b) => a - b)) {
      const row = rows.get(id);
      if (row.state === "left") continue;
      const key = row.stage ?? "none";
      if (!wanted.has(key)) wanted.set(key, []);
      wanted.get(key).push(id);
    }
    const keys = [...wanted.keys()].sort((a, b) => (a === "none") - (b === "none") || a - b);
    for (const key of this.groups.keys()) if (!wanted.has(key)) this.drop(key);
    keys.forEach((key, i) => this.place(key, wanted.get(key), keys.length, i, compact));
    const order = keys.flatMap((key) => wanted.get(key));
    for (const id of this.tiles.keys()) if (!order.includes(id) && !rows.has(id)) this.tiles.delete(id);
    this.order = order;
    for (const id of order) this.paint(this.tiles.get(id), id, rows.get(id), compact);
    $("worker-legend").hidden = !order.length;
    if (!order.length) write(this.root, "no worker has joined yet");
    if (!this.root.querySelector('[tabindex="0"]') && order.length) this.tiles.get(order[0]).tabIndex = 0;
  }

  drop(key) {
    this.groups.get(key).section.remove();
    this.groups.delete(key);
  }

  place(key, ids, count, index, compact) {
    let group = this.groups.get(key);
    if (!group) {
      const title = el("h3");
      const grid = el("div", { className: "grid", role: "group" });
      group = { section: el("div", {}, title, grid), title, grid, signature: "" };
      this.groups.set(key, group);
    }
    if (!this.groups.size || this.root.firstChild?.nodeType === Node.TEXT_NODE) this.root.replaceChildren();
    if (this.root.children[index] !== group.section) this.root.insertBefore(group.section, this.root.children[index] ?? null);
    const name = key === "none" ? "Not in a pool" : count > 1 && key !== "none" ? `Stage ${key}` : "Pool";
    write(group.title, `${name} · ${plural(ids.length, "worker")}`);
    attribute(group.grid, "aria-label", name);
    group.grid.classList.toggle("compact", compact);
    const signature = ids.join();
    if (signature === group.signature) return;
    group.signature = signature;
    group.grid.replaceChildren(...ids.map((id) => this.tile(id)));
  }

  tile(id) {
    let tile = this.tiles.get(id);
    if (!tile) {
      tile = el("button", { type: "button", className: "worker", tabIndex: -1, "data-id": id, "aria-pressed": "false" });
      this.tiles.set(id, tile);
    }
    return tile;
  }

  paint(tile, id, row, compact) {
    const facts = [`step ${row.step}`, row.lanes.length ? plural(row.lanes.length, "lane") : "no lanes"];
    const speed = row.rate ? `${number(row.rate)} samples/s` : row.state === "dead" ? `life ${row.life} is over` : "";
    const doing = [row.rss ? bytes(row.rss) : null, row.phase].filter(Boolean).join(" · ");
    const key = `${compact}|${row.state}|${facts}|${speed}|${doing}|${row.reason}`;
    if (tile.painted === key) return;
    tile.painted = key;
    attribute(tile, "data-state", row.state);
    const trouble = row.state === "dead" || row.state === "suspect" ? row.reason : "";
    attribute(tile, "aria-label", [`worker ${id}`, row.state, ...(trouble ? [trouble] : facts), speed, doing].filter(Boolean).join(", "));
    if (compact) {
      if (tile.textContent !== GLYPH[row.state]) tile.replaceChildren(GLYPH[row.state] ?? row.state[0]);
      tile.title = `worker ${id}: ${row.state}`;
      return;
    }
    if (tile.children.length !== 5) {
      const line = () => el("span", { className: "facts" });
      tile.replaceChildren(el("b", {}, `worker ${id}`), el("span", { className: "state" }), line(), line(), line());
    }
    write(tile.children[1], row.state);
    attribute(tile.children[2], "title", WORDS.lane);
    write(tile.children[2], trouble || facts.join(" · "));
    write(tile.children[3], speed);
    write(tile.children[4], doing);
  }

  choose(id) {
    if (this.chosen !== null) this.tiles.get(this.chosen)?.setAttribute("aria-pressed", "false");
    this.chosen = id;
    this.tiles.get(id)?.setAttribute("aria-pressed", "true");
    this.reach(id);
    this.picked(id);
  }

  /** Unpick the worker; the focus stays. */
  leave(id) {
    this.tiles.get(id)?.setAttribute("aria-pressed", "false");
    this.chosen = null;
    this.reach(id);
    this.tiles.get(id)?.focus({ preventScroll: true });
  }

  /** Make this the worker that Tab reaches. */
  reach(id) {
    const tile = this.tiles.get(id);
    if (!tile) return;
    this.root.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    tile.tabIndex = 0;
  }

  focus(id) {
    this.reach(id);
    this.tiles.get(id).focus();
  }

  move(event) {
    const tile = event.target.closest?.(".worker");
    if (!tile) return;
    const at = this.order.indexOf(Number(tile.dataset.id));
    const grid = tile.parentElement;
    const across = Math.max(1, getComputedStyle(grid).gridTemplateColumns.split(" ").length);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -at, End: this.order.length - 1 - at }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.focus(this.order[Math.min(this.order.length - 1, Math.max(0, at + step))]);
  }
}
