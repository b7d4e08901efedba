// One worker in detail: its state, last lines, newest traceback, recoveries, and actions.

import { $, ago, attribute, bytes, clock, duration, el, number, percent, write } from "./dom.js";
import { writeLinked } from "./links.js";
import { falls, logLine } from "./panels.js";
import { fetched } from "./stream.js";
import { term } from "./words.js";

const EVERY_MS = 2000;
const NAMED = { life: "life", stage: "stage", lanes: "lane", step: "step" };

export class Drawer {
  /** actions: buttons for a worker; key: the chosen run's name on the server; closed: called when the drawer closes. */
  constructor(actions, key, closed) {
    this.actions = actions;
    this.key = key;
    this.closed = closed;
    this.id = null;
    this.root = $("drawer");
    $("drawer-close").addEventListener("click", () => this.close());
    this.root.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    setInterval(() => this.id !== null && this.read(), EVERY_MS);
  }

  open(id, run, nowMs) {
    if (this.id === null) this.before = document.activeElement;
    this.id = id;
    write($("drawer-title"), `Worker ${id}`);
    write($("drawer-answer"), "");
    $("drawer-log").replaceChildren();
    this.shown = this.told = "";
    $("drawer-actions").replaceChildren(...this.actions.ofWorker(id, $("drawer-answer")));
    this.root.hidden = false;
    this.update(run, nowMs);
    this.actions.allow();
    this.root.focus({ preventScroll: true });
    this.read();
  }

  close() {
    if (this.id === null) return;
    const id = this.id;
    this.id = null;
    this.root.hidden = true;
    this.closed(id);
    if (this.before?.isConnected) this.before.focus({ preventScroll: true });
  }

  update(run, nowMs) {
    const row = this.id === null ? null : run.rows.get(this.id);
    if (!row) return;
    write($("drawer-state"), row.state);
    attribute($("drawer-state"), "data-state", row.state);
    $("drawer-why").hidden = !row.cause;
    writeLinked($("drawer-why"), row.cause ? `${row.cause}: ${row.reason}` : "");
    const used = row.device ?? {};
    const pairs = [
      ["life", `${row.life}${row.since ? `, ${row.state} since ${ago(row.since, nowMs)}` : ""}`],
      ["doing", row.phase || "–"],
      ["stage", row.stages.join(", ") || "none"],
      ["lanes", row.lanes.join(", ") || "none"],
      ["step", row.step],
      ["samples per second", row.rate ? number(row.rate) : "–"],
      ...spent(row.spent),
      ["memory", bytes(row.rss)],
      ["processor", row.cpu === null ? "–" : `${number(row.cpu, 2)} cores`],
      ...(used.allocated ? [["device memory", `${bytes(used.allocated)} allocated, ${bytes(used.reserved)} reserved`]] : []),
      [row.cell ? "processes by rank" : "process", row.pid ? row.cell || `${row.pid} on ${row.host || "?"}` : "–"],
    ];
    const signature = JSON.stringify(pairs);
    if (this.shown !== signature) {
      this.shown = signature;
      $("drawer-facts").replaceChildren(...pairs.map(([name, value]) => el("div", {}, el("dt", {}, term(NAMED[name], name)), el("dd", {}, String(value)))));
    }
    const own = run.recoveries.filter((recovery) => recovery[2] === this.id).toReversed();
    const told = JSON.stringify(own);
    if (this.told === told) return;
    this.told = told;
    $("drawer-recoveries").replaceChildren(...(own.length ? falls(own) : [el("p", { className: "soft" }, "none because of it")]));
  }

  async read() {
    const id = this.id, found = await fetched(`/api/runs/${this.key()}/workers/${id}`);
    if (id !== this.id || !found.ok) return;
    const log = $("drawer-log"), last = JSON.stringify(found.log.at(-1) ?? null) + found.log.length;
    if (log.last !== last) {
      log.last = last;
      log.replaceChildren(...(found.log.length ? found.log.toReversed().map(logLine) : [el("p", { className: "empty" }, "no lines yet")]));
    }
    $("drawer-traceback").hidden = $("drawer-traceback-title").hidden = !found.traceback;
    write($("drawer-traceback"), found.traceback);
    write($("drawer-traceback-title"), `Newest traceback${found.traceback_ms ? `, ${clock(found.traceback_ms)}` : ""}`);
    const traces = $("drawer-traces");
    if (traces.last === found.traces.join()) return;
    traces.last = found.traces.join();
    traces.replaceChildren(...found.traces.map((name) => el("p", { className: "small" }, el("a", { href: `/api/runs/${this.key()}/profiles/${name}`, download: "" }, `trace ${name}`), " for ui.perfetto.dev")));
  }
}

/** A worker's time and bytes by use, from the newest samples. */
function spent(found) {
  if (!found) return [];
  const sent = Object.entries(found.bytes_per_s ?? {}).map(([name, of]) => `${name} ${bytes(Math.round(of))}/s`);
  return [
    ["step time", found.step_s ? `${duration(found.step_s)}, over the last ${duration(found.over_s)}` : "–"],
    ["communication", found.step_s ? `${duration(found.communication_s)} per step` : "–"],
    ["sent", sent.join(", ") || "nothing"],
    ["at work", found.busy === null || found.busy === undefined ? "–" : `${percent(found.busy)} of the time`],
  ];
}
