// The page: takes in patches, keeps each run's data, redraws changed parts.

import { Actions, answer } from "./actions.js";
import { Overlay, Training } from "./charts.js";
import { $, attribute, el, forgetColours, write } from "./dom.js";
import { Drawer } from "./drawer.js";
import { fold, foldable, foldOnPhones } from "./fold.js";
import { linksDo } from "./links.js";
import { RunList } from "./list.js";
import * as panels from "./panels.js";
import { keep, told } from "./place.js";
import { fetched, follow, post, reconnect } from "./stream.js";
import { Timeline } from "./timeline.js";
import { explain } from "./words.js";
import { Workers } from "./workers.js";

const MOST_LINES = 4000;
const runs = [];
let selected = 0;
let clockMs = 0; // the server's clock minus ours
let keys = []; // what the server calls the runs that are here
let keyed = []; // and what the list calls them
let folder = null; // whose runs are listed; null: those here are all
let wanted = new URLSearchParams(location.search).getAll("run"); // of the list, what is asked for
let ticks = [...wanted];
let ticking = false; // the first run was opened by its box: the list stays open for the next one
let current = told("run"); // of what is asked for, the one to be shown
let lostMs = null; // since when, by our clock, the server has not been heard of; null: it is there

const workers = new Workers(pick);
const training = new Training();
const overlay = new Overlay();
const log = new panels.Log();
const timeline = new Timeline(readMoment, pick);
const actions = new Actions(() => runs[selected], () => keys[selected]);
const list = new RunList(show, tick, () => actions.unlocked);
const drawer = new Drawer(actions, () => keys[selected], (id) => workers.leave(id));

const fresh = () => ({ head: {}, rows: new Map(), curves: {}, generations: [], recoveries: [], incidents: [], checkpoints: { newest: null, missed: null, tiers: [] }, marks: [], lives: { spans: [], hidden: 0 }, account: {}, efficiency: { measured: [], left_out: "" }, metrics: {}, ledger: {}, config: {}, usage: null, log: [] });
/** The server's time; it stands still while the server is gone. */
const now = () => (lostMs ?? Date.now()) + clockMs;

// ---- taking in

function take(message, first) {
  const begin = performance.now();
  clockMs = message.now_ms - Date.now();
  heard();
  if (first) begin_anew(message);
  for (const [key, patch] of Object.entries(message.runs)) {
    const i = Number(key);
    if (patch.reset || first) {
      Object.assign(runs[i], fresh());
      if (i === selected) workers.clear();
    }
    merge(runs[i], patch);
  }
  if (message.list) list.take(message.list);
  const mine = message.runs[selected];
  if (first && runs[selected]) {
    choose(selected);
    arrive();
  }
  else if (mine) draw(runs[selected], mine);
  if (first || runs.length > 1 || message.list) several();
  document.documentElement.dataset.updateMs = (performance.now() - begin).toFixed(1);
}

/** A connection has begun: take its runs. */
function begin_anew(message) {
  const before = keyed[selected] ?? null;
  folder = message.folder;
  keys = message.keys;
  runs.splice(0, runs.length, ...message.keys.map((_, i) => ({ ...fresh(), number: i + 1 })));
  keyed = folder === null ? keys.map(String) : wanted.filter((name) => message.list?.rows[name] !== undefined).slice(0, keys.length);
  if (folder === null && !ticks.length) ticks = [...keyed];
  if (folder !== null) ticks = ticks.length ? ticks : [...keyed];
  selected = Math.max(0, keyed.indexOf(current ?? before));
  current = null;
}

function merge(run, patch) {
  for (const name of ["head", "generations", "recoveries", "incidents", "checkpoints", "marks", "lives", "account", "efficiency", "metrics", "ledger", "usage", "config"]) {
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
  panels.head(run, at, silent());
  if (changed.workers) workers.update(run.rows);
  if (changed.workers || changed.recoveries) drawer.update(run, at);
  if (changed.lives || changed.marks) timeline.draw(run, at);
  if (changed.curves || changed.marks || changed.usage || changed.efficiency) training.update(run);
  if (changed.generations || changed.head) panels.generations(run, at);
  if (changed.recoveries || changed.incidents) panels.recoveries(run);
  if (changed.incidents) panels.incidents(run);
  if (changed.account) panels.account(run);
  if (changed.efficiency) panels.scaling(run);
  if (changed.checkpoints) panels.checkpoints(run);
  if (changed.ledger) panels.ledger(run, checkLedger);
  if (changed.log) log.more(run);
  if (changed.workers) actions.targets(run);
  if (changed.head) actions.allow();
}

const EVERYTHING = { head: 1, workers: 1, lives: 1, curves: 1, generations: 1, recoveries: 1, incidents: 1, account: 1, efficiency: 1, checkpoints: 1, ledger: 1, log: 1 };

let arrived = false;
/** Show the moment that the address names, once. */
function arrive() {
  const found = told("at")?.match(/^(\d{1,15})(?:~(\d{1,7}))?$/);
  if (found && !arrived) readMoment(Number(found[1]), found[2] === undefined ? null : Number(found[2]));
  arrived = true;
}

/** Another run has other moments and steps. */
function depart() {
  for (const name of ["look", "steps", "times", "at"]) keep(name, null);
  training.unzoom();
}

function choose(i) {
  if (i !== selected) depart();
  keep("run", i ? keyed[i] : null);
  selected = i;
  drawer.close();
  workers.clear();
  timeline.clear();
  log.show(runs[i], told("at") !== null);
  draw(runs[i], EVERYTHING);
  several();
}

/** Show a run of the list, after asking the server for it if necessary. */
function show(key) {
  const at = keyed.indexOf(key);
  if (at >= 0) {
    choose(at);
    return $("hero").scrollIntoView({ block: "start" });
  }
  depart();
  ticking = false;
  wanted = ticks.includes(key) ? ticks : [key];
  current = key;
  request();
}

/** Compare other runs; with a list, the server sends only the ticked ones. */
function tick(key, yes) {
  ticks = yes ? [...ticks, key] : ticks.filter((other) => other !== key);
  if (folder === null) return several();
  wanted = ticks;
  ticking = yes;
  if (!wanted.includes(current)) current = wanted[0] ?? null;
  request();
}

function request() {
  const query = new URLSearchParams(wanted.map((name) => ["run", name]));
  history.replaceState(null, "", wanted.length ? `?${query}${location.hash}` : "/");
  reconnect();
}

let overlayTimer = 0;
function several() {
  const listed = list.rows.size > 0 || folder !== null;
  $("overview").hidden = !listed;
  const view = runs.length ? "run" : "list";
  if (folder !== null && document.body.dataset.view !== view) fold($("overview"), view === "run" && !ticking);
  document.body.dataset.view = view;
  list.mark(ticks, keyed[selected]);
  const nav = $("runs"), names = runs.length > 1 ? runs : [];
  while (nav.children.length > names.length) nav.lastElementChild.remove();
  while (nav.children.length < names.length) {
    const i = nav.children.length;
    nav.append(el("button", { type: "button", onclick: () => choose(i) }));
  }
  names.forEach((run, i) => {
    write(nav.children[i], `${i + 1} ${run.head.name ?? "…"}`);
    attribute(nav.children[i], "aria-current", String(i === selected));
  });
  if (!overlayTimer) overlayTimer = setTimeout(drawOverview, overlay.drawn ? 1900 : 0);
}

function drawOverview() {
  overlayTimer = 0;
  const together = runs.filter((_, i) => ticks.includes(keyed[i]));
  if ($("compared").hidden !== together.length < 2) foldOnPhones($("charts"), together.length > 1);
  $("compared").hidden = together.length < 2;
  if (together.length < 2) return;
  overlay.update(together);
  panels.compared(together);
}

// ---- details

/** Show the log at a moment: all lines, or those of a worker and the events. */
async function readMoment(ms, worker) {
  const about = worker === null ? "" : `&worker=${worker}`;
  const found = await fetched(`/api/runs/${keys[selected]}/log?at=${Math.max(0, Math.round(ms))}${about}`);
  if (!found.ok) return answer(found);
  fold($("log"), false);
  log.at({ ms, worker, lines: found.lines });
  $("log-title").scrollIntoView({ block: "start" });
  $("log").focus({ preventScroll: true });
}

function pick(id) {
  if (!runs[selected]?.rows.has(id)) return;
  actions.aim(id);
  drawer.open(id, runs[selected], now());
}

function showGeneration(name) {
  const entry = $("generations").querySelector(`[data-generation="${name}"]`);
  fold($("generations"), false);
  entry?.scrollIntoView({ block: "center" });
  $("generations").focus({ preventScroll: true });
}

async function checkLedger() {
  if (!actions.unlocked) return answer({ ok: false, error: "unlock the actions first" });
  const button = $("check-ledger");
  button.disabled = true;
  const result = await post(`/api/runs/${keys[selected]}/ledger`);
  button.disabled = false;
  if (result.ok) {
    runs[selected].ledger = result.result;
    panels.ledger(runs[selected], checkLedger);
  } else answer(result);
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

/** For how many seconds the server has not been heard of; null: it is there. */
const silent = () => (lostMs === null ? null : (Date.now() - lostMs) / 1000);

/** The server is gone, or wants a token again: all that is shown is as old as its last word. */
function lost(heardMs) {
  if (!heardMs) return;
  lostMs = heardMs;
  attribute(document.body, "data-lost", "yes");
  actions.cut(true);
  age();
}

/** A message has come: what is shown is true again. */
function heard() {
  if (lostMs === null) return;
  lostMs = null;
  document.body.removeAttribute("data-lost");
  actions.cut(false);
}

/** Redraw parts that change with time: ages, and the ends of open spans. */
function age() {
  const run = runs[selected];
  list.age(silent());
  if (!run?.head.state) {
    document.title = `${lostMs === null ? "" : "connection lost · "}everstep`;
    return;
  }
  panels.head(run, now(), silent());
  if (run.head.running && lostMs === null) timeline.draw(run, now());
}

function setUp() {
  $("theme").addEventListener("click", () => {
    const at = THEMES.indexOf(localStorage.getItem("everstep-theme") ?? "system");
    localStorage.setItem("everstep-theme", THEMES[(at + 1) % THEMES.length]);
    paint();
  });
  explain($("words"));
  systemDark.addEventListener("change", paint);
  paint();
  foldable();
  log.moved = (moment) => keep("at", moment && `${Math.round(moment.ms)}${moment.worker === null ? "" : `~${moment.worker}`}`);
  training.switched = () => timeline.draw(runs[selected], now());
  panels.acts.moment = readMoment;
  linksDo({ worker: pick, step: (step) => (fold($("charts"), false), training.stand(step)), generation: showGeneration });
  for (const button of document.querySelectorAll("[data-axis]")) {
    attribute(button, "aria-pressed", String(button.dataset.axis === training.axis));
    button.addEventListener("click", () => {
      training.axis = button.dataset.axis;
      keep("axis", training.axis === "time" ? "time" : null);
      for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
      training.update(runs[selected]);
    });
  }
  const words = { live: "live", lost: "connection lost", locked: "token needed" };
  follow(take, (state, heardMs) => {
    attribute($("link"), "data-state", state);
    write($("link"), words[state]);
    if (state !== "live") lost(heardMs);
    if (state === "locked") actions.open(false);
  }, () => (wanted.length ? `?${new URLSearchParams(wanted.map((name) => ["run", name]))}` : ""));
  setInterval(age, 1000);
}

setUp();
