// The page: takes in patches, keeps what is known of each run, redraws what changed.

import { $, attribute, el, forgetColours, write } from "./dom.js";
import { Overlay, Training } from "./charts.js";
import * as panels from "./panels.js";
import { follow, known, post } from "./stream.js";
import { Workers } from "./workers.js";

const MOST_LINES = 4000;
const runs = [];
let selected = 0;
let clockMs = 0; // the server's clock minus ours
let unlocked = false;

const workers = new Workers(aim);
const training = new Training();
const overlay = new Overlay();
const log = new panels.Log();

const fresh = () => ({ head: {}, rows: new Map(), curves: {}, generations: [], recoveries: [], checkpoints: [], marks: [], account: {}, efficiency: [], metrics: {}, ledger: {}, usage: null, log: [] });
const now = () => Date.now() + clockMs;

// ---- taking in

function take(message, first) {
  const begin = performance.now();
  clockMs = message.now_ms - Date.now();
  while (runs.length < message.count) runs.push(fresh());
  for (const [key, patch] of Object.entries(message.runs)) {
    const i = Number(key);
    if (patch.reset || first) {
      Object.assign(runs[i], fresh());
      if (i === selected) workers.clear();
    }
    merge(runs[i], patch);
  }
  const mine = message.runs[selected];
  if (mine) draw(runs[selected], mine);
  if (runs.length > 1) several();
  document.documentElement.dataset.updateMs = (performance.now() - begin).toFixed(1);
}

function merge(run, patch) {
  for (const name of ["head", "generations", "recoveries", "checkpoints", "marks", "account", "efficiency", "metrics", "ledger", "usage"]) {
    if (patch[name] !== undefined) run[name] = patch[name];
  }
  if (patch.workers) {
    const { fields, rows, gone } = patch.workers;
    for (const [id, values] of Object.entries(rows)) run.rows.set(Number(id), Object.fromEntries(fields.map((field, i) => [field, values[i]])));
    for (const id of gone) run.rows.delete(id);
  }
  for (const [name, { start, x, columns }] of Object.entries(patch.curves ?? {})) {
    const old = run.curves[name] ?? { x: [], columns: columns.map(() => []) };
    run.curves[name] = { x: old.x.slice(0, start).concat(x), columns: columns.map((c, i) => old.columns[i].slice(0, start).concat(c)) };
  }
  if (patch.log) {
    run.log.push(...patch.log);
    if (run.log.length > MOST_LINES) run.log.splice(0, run.log.length - MOST_LINES);
  }
}

// ---- drawing

function draw(run, changed) {
  const at = now();
  if (run.head.state === undefined) return;
  panels.head(run, at);
  if (changed.workers) workers.update(run.rows, at);
  if (changed.curves || changed.marks || changed.usage || changed.efficiency) training.update(run);
  if (changed.generations || changed.head) panels.generations(run, at);
  if (changed.recoveries) panels.recoveries(run);
  if (changed.account) panels.account(run);
  if (changed.efficiency) panels.scaling(run);
  if (changed.checkpoints) panels.checkpoints(run, at);
  if (changed.ledger) panels.ledger(run, checkLedger);
  if (changed.log) log.more(run);
  if (changed.workers) targets(run);
  if (changed.head) allowed();
}

const EVERYTHING = { head: 1, workers: 1, curves: 1, generations: 1, recoveries: 1, account: 1, efficiency: 1, checkpoints: 1, ledger: 1, log: 1 };

function choose(i) {
  selected = i;
  workers.clear();
  log.show(runs[i]);
  draw(runs[i], EVERYTHING);
  several();
}

let overlayTimer = 0;
function several() {
  const nav = $("runs");
  $("overview").hidden = false;
  while (nav.children.length < runs.length) {
    const i = nav.children.length;
    nav.append(el("button", { type: "button", onclick: () => choose(i) }));
  }
  runs.forEach((run, i) => {
    write(nav.children[i], `${i + 1} ${run.head.name ?? "…"}`);
    attribute(nav.children[i], "aria-current", String(i === selected));
  });
  if (!overlayTimer) overlayTimer = setTimeout(drawOverview, overlay.drawn ? 1900 : 0);
}

function drawOverview() {
  overlayTimer = 0;
  const focus = $("cards").contains(document.activeElement) ? [...$("cards").children].indexOf(document.activeElement) : -1;
  panels.cards(runs, selected, choose);
  if (focus >= 0) $("cards").children[focus]?.focus();
  overlay.update(runs);
}

// ---- actions

function answer(result) {
  const node = $("answer");
  write(node, result.ok ? result.text : result.error);
  node.className = `answer ${result.ok ? "good" : "bad"}`;
}

async function unlock(given) {
  const result = await post("/api/token", {}, given);
  if (result.ok) write($("answer"), "");
  else answer(result);
  unlocks(result.ok === true);
}

function unlocks(yes) {
  unlocked = yes;
  $("unlock").hidden = unlocked;
  $("actions").hidden = !unlocked;
  allowed();
}

function allowed() {
  const running = runs[selected]?.head.running === true;
  for (const button of $("actions").querySelectorAll("button")) button.disabled = !running;
}

async function ask(name, body) {
  write($("answer"), "…");
  answer(await post(`/api/runs/${selected}/${name}`, body));
}

async function checkLedger() {
  if (!unlocked) return answer({ ok: false, error: "unlock the actions first" });
  const button = $("check-ledger");
  button.disabled = true;
  const result = await post(`/api/runs/${selected}/ledger`);
  button.disabled = false;
  if (result.ok) {
    runs[selected].ledger = result.result;
    panels.ledger(runs[selected], checkLedger);
  } else answer(result);
}

/** A button that does nothing until it is pressed a second time within 4 s. */
function armed(label, act) {
  const button = el("button", { type: "submit" }, label);
  let timer = 0;
  const disarm = () => {
    clearTimeout(timer);
    delete button.dataset.armed;
    write(button, label);
  };
  return [
    button,
    (event) => {
      event.preventDefault();
      if (button.dataset.armed) return disarm(), act();
      button.dataset.armed = "yes";
      write(button, `${label}: sure?`);
      timer = setTimeout(disarm, 4000);
    },
  ];
}

function actionRow(label, act, ...fields) {
  const [button, submit] = armed(label, act);
  return el("form", { className: "row", onsubmit: submit, autocomplete: "off" }, ...fields, button);
}

const FAULTS = [["kill", "kill"], ["stop,for=5", "stop for 5 s"], ["stop", "stop for good"], ["raise", "raise an exception"], ["partition,for=5", "cut off for 5 s"]];
const ANYBODY = [["random", "any worker"], ["coordinator", "the coordinator"]];

function fault() {
  const [kind, ...more] = $("fault-kind").value.split(",");
  return [`${kind}:target=${$("fault-target").value}`, ...more].join();
}

/** Whom a fault may strike: anyone, the leader of a stage, a worker. */
function targets(run) {
  const list = $("fault-target");
  const living = [...run.rows].filter(([, row]) => row.state !== "dead" && row.state !== "left");
  const stages = [...new Set(living.flatMap(([, row]) => row.stages))].sort((a, b) => a - b);
  const leaders = stages.map((stage) => [`leader:${stage}`, stages.length > 1 ? `the leader of stage ${stage}` : "the leader"]);
  const wanted = [...ANYBODY, ...leaders, ...living.map(([id]) => [`worker:${id}`, `worker ${id}`])];
  const signature = wanted.join();
  if (list.made === signature) return;
  const kept = list.value;
  list.made = signature;
  list.replaceChildren(...wanted.map(([value, text]) => el("option", { value }, text)));
  if (wanted.some(([value]) => value === kept)) list.value = kept;
}

/** Whoever is picked among the workers is the one that actions mean. */
function aim(id) {
  $("drain-worker").value = id;
  $("fault-target").value = `worker:${id}`;
}

function buildActions() {
  const input = (id, text, value, more = {}) => el("label", {}, text, el("input", { id, value, required: true, ...more }));
  const whole = { inputMode: "numeric", pattern: "[0-9]+" };
  const options = (of) => of.map(([value, text]) => el("option", { value }, text));
  $("actions").replaceChildren(
    el("form", { className: "row", onsubmit: (e) => (e.preventDefault(), ask("checkpoint", {})) }, el("button", { type: "submit" }, "Checkpoint now")),
    actionRow("Drain", () => ask("drain", { worker_id: Number($("drain-worker").value) }), input("drain-worker", "Worker that is to leave", "", whole)),
    actionRow("Scale", () => ask("scale", { workers: Number($("scale-workers").value) }), input("scale-workers", "Number of workers", "", whole)),
    actionRow("Inject", () => ask("chaos", { fault: fault() }), el("label", {}, "Fault", el("select", { id: "fault-kind" }, ...options(FAULTS))), el("label", {}, "Target", el("select", { id: "fault-target" }, ...options(ANYBODY)))),
  );
}

// ---- set-up

const THEMES = ["system", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function paint() {
  const wanted = localStorage.getItem("everstep-theme") ?? "system";
  document.documentElement.dataset.theme = wanted === "system" ? (systemDark.matches ? "dark" : "light") : wanted;
  attribute($("theme"), "aria-label", `Colours: ${wanted === "system" ? "as the system" : wanted}`);
  forgetColours();
  if (runs[selected]?.head.state) training.update(runs[selected]);
}

function setUp() {
  $("theme").addEventListener("click", () => {
    const at = THEMES.indexOf(localStorage.getItem("everstep-theme") ?? "system");
    localStorage.setItem("everstep-theme", THEMES[(at + 1) % THEMES.length]);
    paint();
  });
  systemDark.addEventListener("change", paint);
  paint();
  buildActions();
  $("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    unlock($("token").value.trim());
  });
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      training.axis = button.dataset.axis;
      for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
      training.update(runs[selected]);
    });
  }
  known().then(unlocks);
  const words = { live: "live", lost: "connection lost", locked: "token needed" };
  follow(take, (state) => {
    attribute($("link"), "data-state", state);
    write($("link"), words[state]);
    if (state === "locked") unlocks(false);
  });
  setInterval(() => runs[selected]?.head.state && panels.head(runs[selected], now()), 1000);
}

setUp();
