// The lives of the workers over time, live: each one's states, with faults as lines. A click opens the log there.

import { $, attribute, clock, duration, el, number, styled } from "./dom.js";
import { clustered, crosshair, told, wanted } from "./marks.js";
import { keep, span } from "./place.js";

const COMPACT_FROM = 24;
const DRAG_PX = 6;
const UNITS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000];

export class Timeline {
  /** open: called with (ms, worker) to read the log of a moment; pick: called with a worker's id. */
  constructor(open, pick) {
    this.open = open;
    this.pick = pick;
    this.root = $("gantt");
    this.rows = new Map();
    this.window = span("look"); // [begin, end] in ms when zoomed
    this.last = null; // or so many seconds up to now
    this.box = el("div", { className: "lives-rows" });
    this.lines = el("div", { className: "lives-marks", "aria-hidden": "true" });
    this.cursor = el("i", { className: "lives-cursor", hidden: true });
    this.selection = el("i", { className: "lives-selection", hidden: true });
    this.axis = el("div", { className: "lives-axis", "aria-hidden": "true" });
    this.plane = el("div", { className: "lives-plane", "aria-hidden": "true" }, this.lines, this.cursor, this.selection);
    this.note = el("p", { className: "soft", hidden: true });
    this.root.append(el("div", { className: "lives" }, this.box, this.plane), this.axis, this.note);
    this.root.addEventListener("pointermove", (event) => this.hover(event));
    this.root.addEventListener("pointerleave", () => this.left());
    this.root.addEventListener("pointerdown", (event) => this.down(event));
    this.root.addEventListener("pointerup", (event) => this.up(event));
    this.root.addEventListener("dblclick", () => this.look(null, null));
    this.root.addEventListener("keydown", (event) => this.key(event));
    for (const button of document.querySelectorAll("[data-last]")) button.addEventListener("click", () => this.look(null, Number(button.dataset.last) || null));
    crosshair.followers.add(this);
    this.width = 1; // kept, since to ask for it would have the whole page laid out at each update
    new ResizeObserver(([entry]) => {
      this.width = Math.max(1, entry.contentRect.width);
      if (this.run) this.draw(this.run, this.nowMs);
    }).observe(this.lines);
  }

  clear() {
    this.window = span("look");
    this.press();
    this.signature = "";
    this.rows.clear();
    this.box.replaceChildren();
  }

  /** Show a time range: [begin, end] in ms; or the last seconds; or, with neither, everything. */
  look(window, last) {
    keep("look", window);
    this.window = window;
    this.last = last;
    this.press();
    if (this.run) this.draw(this.run, this.nowMs);
  }

  /** Let the buttons say which time is shown. */
  press() {
    for (const button of document.querySelectorAll("[data-last]")) attribute(button, "aria-pressed", String(!this.window && (Number(button.dataset.last) || null) === this.last));
  }

  draw(run, nowMs) {
    this.run = run;
    this.nowMs = nowMs;
    const { head, lives } = run;
    const end = head.running && !head.ended_ns ? nowMs : (head.ended_ns ?? head.last_ns ?? nowMs * 1e6) / 1e6;
    const begin = Math.min(head.began_ns ? head.began_ns / 1e6 : end - 1, end - 1);
    this.span = this.window ?? [this.last ? Math.max(begin, end - 1000 * this.last) : begin, end];
    const ids = [...new Set(lives.spans.map(([id]) => id))].sort((a, b) => a - b);
    const signature = ids.join();
    if (signature !== this.signature) this.make(ids, signature);
    const own = new Map(ids.map((id) => [id, []]));
    for (const span of lives.spans) own.get(span[0]).push(span);
    for (const [id, row] of this.rows) this.paint(row, id, own.get(id), end);
    this.mark(run);
    this.ticks();
    this.note.hidden = !lives.hidden;
    if (lives.hidden) this.note.textContent = `${number(lives.hidden)} more workers had less trouble and are not drawn`;
  }

  make(ids, signature) {
    this.signature = signature;
    this.rows = new Map(
      ids.map((id) => {
        const who = el("button", { type: "button", className: "who", tabIndex: -1, title: `worker ${id}`, onclick: () => this.pick(id) }, String(id));
        const track = el("div", { className: "life-track", tabIndex: 0, role: "img", "data-id": id });
        return [id, { node: el("div", { className: "life" }, who, track), track, bars: [] }];
      }),
    );
    this.box.classList.toggle("compact", ids.length > COMPACT_FROM);
    this.box.replaceChildren(...[...this.rows.values()].map((row) => row.node));
    if (!ids.length) this.box.replaceChildren(el("p", { className: "soft" }, "no worker has joined yet"));
  }

  paint(row, id, spans, end) {
    const [from, to] = this.span, whole = to - from;
    const seen = spans.filter(([, , , begin, until]) => (until ?? end) >= from && begin <= to);
    while (row.bars.length > seen.length) row.bars.pop().remove();
    while (row.bars.length < seen.length) row.bars.push(row.track.appendChild(el("i")));
    seen.forEach(([, life, state, begin, until], i) => {
      const bar = row.bars[i];
      const low = Math.max(begin, from), high = Math.min(until ?? end, to);
      attribute(bar, "data-state", state);
      styled(bar, { left: `${((100 * (low - from)) / whole).toFixed(3)}%`, width: `${((100 * Math.max(0, high - low)) / whole).toFixed(3)}%` });
      bar.span = { life, state, begin, until: until ?? end };
    });
    row.spans = seen;
    const last = spans.at(-1), lost = spans.filter(([, , state]) => state === "dead").length;
    attribute(row.track, "aria-label", `worker ${id}: ${last ? last[2] : "unknown"}${lost ? `, died ${lost} time${lost > 1 ? "s" : ""}` : ""}; arrow keys go through its life, Enter opens the log`);
  }

  mark(run) {
    const [from, to] = this.span, width = this.width;
    const until = this.window ? to : Infinity; // a launcher is missed after its last word: its mark is at the edge
    const at = (ms) => Math.min(((Math.min(ms, to) - from) / (to - from)) * width, width - 2);
    const placed = wanted(run).filter((mark) => mark.ms >= from && mark.ms <= until).map((mark) => ({ ...mark, px: at(mark.ms) }));
    this.clusters = clustered(placed);
    this.lines.replaceChildren(
      ...this.clusters.map((cluster) => {
        const line = styled(el("i", { className: cluster.hard ? "hard" : "" }), { left: `${cluster.px.toFixed(1)}px` });
        if (cluster.marks.length > 1) line.append(el("b", {}, String(cluster.marks.length)));
        return line;
      }),
    );
  }

  ticks() {
    const [from, to] = this.span, width = this.width;
    const seconds = (to - from) / 1000;
    const unit = UNITS_S.find((u) => (width * u) / seconds >= 84) ?? UNITS_S.at(-1);
    const shift = unit >= 3600 ? 60000 * new Date(from).getTimezoneOffset() : 0;
    const first = Math.ceil((from - shift) / (1000 * unit)) * 1000 * unit + shift;
    const found = [];
    for (let at = first; at <= to && found.length < 40; at += 1000 * unit) {
      const px = ((at - from) / (to - from)) * width;
      if (px > 24 && px < width - 24) found.push(styled(el("span", {}, moment(at, unit)), { left: `${px.toFixed(1)}px` }));
    }
    this.axis.replaceChildren(...found);
  }

  // ---- pointing

  timeAt(event) {
    const box = this.lines.getBoundingClientRect();
    const share = (event.clientX - box.left) / (box.width || 1);
    return share < 0 || share > 1 || !this.span ? null : this.span[0] + share * (this.span[1] - this.span[0]);
  }

  hover(event) {
    const ms = this.timeAt(event);
    if (ms === null) return this.left();
    const row = event.target.closest?.(".life")?.querySelector(".life-track");
    if (this.from !== undefined && Math.abs(event.clientX - this.from) > DRAG_PX) {
      const [low, high] = [this.from, event.clientX].sort((a, b) => a - b), left = this.lines.getBoundingClientRect().left;
      this.selection.hidden = false;
      styled(this.selection, { left: `${low - left}px`, width: `${high - low}px` });
    }
    this.follow({ ms });
    crosshair.time(ms, this);
    this.say(ms, row ? Number(row.dataset.id) : null);
  }

  left() {
    this.follow(null);
    crosshair.show(null, this);
  }

  follow(at) {
    const inside = at !== null && at.ms !== null && this.span && at.ms >= this.span[0] && at.ms <= this.span[1];
    this.cursor.hidden = !inside;
    if (inside) styled(this.cursor, { left: `${((100 * (at.ms - this.span[0])) / (this.span[1] - this.span[0])).toFixed(3)}%` });
  }

  /** Text for a moment: the worker's state then, and incidents near it. */
  say(ms, id) {
    const span = this.run?.lives.spans.find(([of, , , begin, until]) => of === id && begin <= ms && (until ?? Infinity) >= ms);
    const whole = this.span[1] - this.span[0], width = this.width;
    const near = this.clusters?.find((cluster) => Math.abs(cluster.px - ((ms - this.span[0]) / whole) * width) < 7);
    const words = [precise(ms, whole)];
    if (span) words.push(`worker ${id}, life ${span[1]}: ${span[2]} ${span[4] ? `for ${duration((span[4] - span[3]) / 1000)}` : `since ${clock(span[3])}`}`);
    if (near) words.push(told(near));
    $("moment").textContent = words.join(" · ");
  }

  down(event) {
    if (event.button === 0 && this.timeAt(event) !== null) this.from = event.clientX;
  }

  up(event) {
    const from = this.from, ms = this.timeAt(event);
    this.from = undefined;
    this.selection.hidden = true;
    if (from === undefined || ms === null) return;
    const width = this.lines.getBoundingClientRect().width, scale = (this.span[1] - this.span[0]) / width;
    const moved = event.clientX - from;
    if (Math.abs(moved) > DRAG_PX) return this.look([ms - moved * scale, ms].sort((a, b) => a - b), this.last);
    const row = event.target.closest?.(".life")?.querySelector(".life-track");
    this.open(ms, row ? Number(row.dataset.id) : null);
  }

  /** Arrow keys go from change to change of a worker's life; Enter reads the log there. */
  key(event) {
    const track = event.target.closest?.(".life-track");
    if (!track || !["ArrowLeft", "ArrowRight", "Enter", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const id = Number(track.dataset.id), spans = this.rows.get(id)?.spans ?? [];
    if (!spans.length) return;
    if (event.key === "Enter") return this.open(spans[Math.min(this.at ?? spans.length - 1, spans.length - 1)][3], id);
    const at = this.whose === id ? (this.at ?? spans.length) : spans.length;
    this.whose = id;
    this.at = event.key === "Home" ? 0 : event.key === "End" ? spans.length - 1 : Math.min(spans.length - 1, Math.max(0, at + (event.key === "ArrowLeft" ? -1 : 1)));
    const ms = Math.max(this.span[0], spans[this.at][3]);
    this.follow({ ms });
    crosshair.time(ms, this);
    this.say(ms, id);
  }
}

function moment(ms, unit) {
  const two = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (unit < 1) return `${clock(ms)}.${Math.floor((ms % 1000) / 100)}`;
  if (unit < 60) return clock(ms);
  return new Date(ms).toLocaleString("en-GB", unit < 21600 ? two : { day: "numeric", month: "short", ...(unit < 86400 ? two : {}) });
}

const precise = (ms, whole) => (whole < 600_000 ? `${clock(ms)}.${String(Math.floor(ms % 1000)).padStart(3, "0")}` : clock(ms));
