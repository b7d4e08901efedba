// The job's incidents, as marks on charts and on the workers' lives: the kinds shown, clusters of near ones, and the
// crosshair that all charts share.

import { $, attribute, el } from "./dom.js";

/** Kinds that are switched together. on: shown at first. */
const GROUPS = {
  faults: { kinds: ["fault", "evicted", "coordinator", "fallback", "launcher"], on: true },
  leaders: { kinds: ["leader"], on: false },
  healed: { kinds: ["healed"], on: false },
  checkpoints: { kinds: ["checkpoint"], on: false },
};
const HARD = new Set(GROUPS.faults.kinds);
const MANY = 10;
const NEAR_PX = 22;
const KEPT = "everstep-marks";

const shown = new Set(kept());

function kept() {
  const all = Object.keys(GROUPS);
  const said = localStorage.getItem(KEPT)?.split(",");
  return said ? all.filter((name) => said.includes(name)) : all.filter((name) => GROUPS[name].on);
}

/** Put a switch per kind into `root`; `changed` is called when one is pressed. */
export function switches(root, changed) {
  for (const name of Object.keys(GROUPS)) {
    const button = el("button", { type: "button", "aria-pressed": String(shown.has(name)), "data-marks": name }, name);
    button.addEventListener("click", () => {
      if (!shown.delete(name)) shown.add(name);
      localStorage.setItem(KEPT, [...shown].join());
      attribute(button, "aria-pressed", String(shown.has(name)));
      changed();
    });
    root.append(button);
  }
}

/** A run's marks that are switched on: [{ms, step, hard, worker, text}], by time. */
export function wanted(run) {
  const kinds = new Set([...shown].flatMap((name) => GROUPS[name].kinds));
  return run.marks.filter(([, , kind]) => kinds.has(kind)).map(([at, step, kind, worker, text]) => ({ ms: 1000 * at, step, hard: HARD.has(kind), worker, text }));
}

/** Marks with a place (`px`), near ones joined to a cluster: [{px, hard, marks}]. */
export function clustered(placed) {
  const sorted = placed.toSorted((a, b) => a.px - b.px);
  const found = [];
  for (const mark of sorted) {
    const last = found.at(-1);
    if (sorted.length > MANY && last && mark.px - last.from < NEAR_PX) {
      last.marks.push(mark);
      last.hard ||= mark.hard;
      last.px = (last.from + mark.px) / 2;
    } else found.push({ px: mark.px, from: mark.px, hard: mark.hard, marks: [mark] });
  }
  return found;
}

/** Text of a cluster. */
export const told = ({ marks }) => (marks.length === 1 ? marks[0].text : `${marks.length} marks: ${marks.slice(0, 3).map((mark) => mark.text).join("; ")}${marks.length > 3 ? "; …" : ""}`);

/** Show a cluster's text below the charts. */
export function point(cluster, links) {
  const node = $("mark-text");
  const text = told(cluster);
  if (node.textContent !== text) node.replaceChildren(...links(text));
}

// ---- the crosshair

/** The pointer's moment, for all charts: `at` is {ms, step}, either of which may be null, or null when it has left. */
class Crosshair {
  constructor() {
    this.followers = new Set();
    this.times = [];
    this.steps = [];
  }

  /** The curve that converts between moments and steps. times: seconds since 1970. */
  by(steps, times) {
    this.steps = steps;
    this.times = times;
  }

  step(step, from) {
    const i = nearest(this.steps, step);
    this.show({ step, ms: i === null ? null : 1000 * this.times[i] }, from);
  }

  time(ms, from) {
    const i = nearest(this.times, ms / 1000);
    this.show({ ms, step: i === null ? null : this.steps[i] }, from);
  }

  show(at, from = null) {
    for (const follower of this.followers) if (follower !== from) follower.follow(at);
  }
}

export const crosshair = new Crosshair();

/** The index of the value nearest to x in a rising list, null if it is empty. */
export function nearest(list, x) {
  let low = 0, high = list.length - 1;
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - list[low - 1] < list[low] - x ? low - 1 : low;
}
