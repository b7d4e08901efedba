// All panels but workers and curves: the head, generations, recoveries, account, scaling, checkpoints, ledger, log.

import { $, ago, attribute, bytes, clock, duration, el, number, percent, plural, styled, write } from "./dom.js";
import { linked, writeLinked } from "./links.js";
import { term } from "./words.js";

const PHASES = ["notice", "decide", "unblock", "regroup", "settle", "redo", "heal", "other"];
const phaseColour = (phase) => `var(--phase-${PHASES.includes(phase) ? phase : "other"})`;
const USES = { training: "c2", "start-up": "c0", "waiting for workers": "c1", "steps done again": "c5", evaluation: "c4", checkpoints: "c3", finishing: "c7", "not running": "line" };
const MOST_LINES = 300;

/** Handlers of clicks on a moment or a generation: {moment(ms, worker)}. */
export const acts = {};

/** The cause, as programs use it; an unknown one is left out, for the words beside it say more. */
const causeTag = (cause) => (cause === "unknown" ? [] : [el("code", { className: "cause" }, cause), " "]);

function table(header, rows, numbers = []) {
  const cell = (tag, text, i) => el(tag, { className: numbers.includes(i) ? "n" : "" }, text instanceof Node ? text : String(text));
  return el(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": header.join(", ") },
    el("table", {}, el("thead", {}, el("tr", {}, ...header.map((t, i) => cell("th", t, i)))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((t, i) => cell("td", t, i)))))),
  );
}

// ---- head

/** silentS: for how many seconds the dashboard has not been heard of; null: it is there. */
export function head(run, nowMs, silentS) {
  const h = run.head, state = silentS === null ? h.state : `${h.running ? "was " : ""}${h.state}`;
  document.title = `${silentS === null ? state : "connection lost"} · ${h.name} · everstep`;
  write($("name"), h.name);
  write($("task"), h.task);
  write($("state"), state);
  attribute($("state"), "data-state", h.state);
  const said = silentS !== null ? unheard(h, silentS) : h.loaded ? h.headline : { level: "lost", text: `reading the run's history, step ${h.step} so far …` };
  writeLinked($("sentence"), `${said.text} ${said.more ?? ""}`.trim());
  for (const id of ["sentence", "state"]) attribute($(id), "data-level", said.level);
  $("raised").hidden = !h.raised?.length;
  write($("raised"), (h.raised ?? []).join("\n"));
  const share = h.state === "completed" ? 100 : h.total ? Math.min(100, (100 * h.step) / h.total) : 0;
  $("progress").firstElementChild.style.width = `${share}%`;
  attribute($("progress"), "aria-valuenow", Math.round(share));
  attribute($("progress"), "aria-valuetext", h.total ? `step ${h.step} of ${h.total}` : `step ${h.step}`);
  tiles(run, nowMs);
}

/** The sentence while the dashboard is gone: nothing is known of now. */
function unheard(h, silentS) {
  const passed = duration(Math.max(1, Math.floor(silentS))).replace(".0 s", " s");
  const text = `Last heard of ${passed} ago, at step ${h.step}: this page is cut off from its dashboard.`;
  return { level: "lost", text, more: h.running ? "Below is what it said last." : `It said last: ${h.headline.text}` };
}

function tiles(run, nowMs) {
  const h = run.head;
  const saved = run.checkpoints.newest;
  const dead = h.states.dead ?? 0, healing = h.states.healing ?? 0, spare = h.states.spare ?? 0, suspect = h.states.suspect ?? 0;
  const beside = [dead && `${dead} dead`, suspect && `${suspect} suspected`, healing && `${healing} healing`, spare && plural(spare, "spare")].filter(Boolean);
  const { "not running": stoppedS = 0, ...ran } = run.account, ranS = Object.values(ran).reduce((sum, s) => sum + s, 0);
  const items = [
    ["Step", `${h.step}${h.total ? ` / ${h.total}` : ""}`, h.eta_s ? `${duration(h.eta_s)} left` : ""],
    ["Loss", h.loss_text || "–", h.loss_step ? `of step ${h.loss_step}` : h.strange ? `not finite: ${h.strange.text}` : Object.entries(run.metrics.values ?? {}).slice(0, 2).map(([k, v]) => `${k} ${v === null ? "not finite" : number(v, 4)}`).join(", "), { bad: "bad", warning: "warn" }[h.strange?.level] ?? ""],
    ["Samples/s", number(h.rate ?? (h.running ? null : h.mean_rate)), h.rate !== null ? `over the last ${plural(h.rate_steps, "step")}` : h.mean_rate ? `mean, undisturbed${h.running ? `: ${number(h.mean_rate)}` : ""}` : ""],
    ["Workers", h.wanted && h.ended_ns === null ? `${h.members} / ${h.wanted}` : h.ended_ns === null ? `${h.members}` : "ended", beside.join(", "), dead || suspect ? "bad" : h.running && h.members < h.wanted ? "warn" : ""],
    ["Generation", h.generation, plural(h.recoveries, "recovery").replace("recoverys", "recoveries")],
    ["Goodput", percent(h.goodput), h.steps_lost ? `${plural(h.steps_lost, "step")} done again` : "", ""],
    ["Checkpoint", saved ? `step ${saved[1]}` : "none", saved ? `${saved[0]}, ${ago(saved[2], nowMs)}` : ""],
    ["Wall time", h.began_ns ? duration(ranS) : "–", h.running && !h.answers ? "coordinator silent" : stoppedS ? `not running: ${duration(stoppedS)}` : ""],
  ];
  const root = $("tiles");
  items.forEach(([name, value, note, tone], i) => {
    const box = root.children[i] ?? root.appendChild(el("div", {}, el("dt"), el("dd", {}, el("span"), el("small"))));
    if (box.children[0].textContent !== name) box.children[0].replaceChildren(term(name.toLowerCase(), name));
    write(box.children[1].children[0], value);
    write(box.children[1].children[1], note);
    attribute(box, "data-tone", tone ?? "");
  });
}

// ---- beside the curves

export function generations(run, nowMs) {
  const list = run.generations;
  const { ended_ns, running, last_ns } = run.head, end = running && !ended_ns ? nowMs : (ended_ns ?? last_ns ?? nowMs * 1e6) / 1e6;
  const wanted = Math.max(1, run.head.wanted, ...list.map((g) => g[3]));
  $("strip").replaceChildren(
    ...list.map((g, i) => {
      const width = Math.max(0, (list[i + 1]?.[1] ?? end) - g[1]);
      const part = styled(el("i", { title: `generation ${g[0]}: ${plural(g[3], "worker")}` }), { flex: `${width} 0 0`, background: g[3] >= wanted ? "var(--c2)" : "var(--c1)" });
      return part;
    }),
  );
  $("generations").replaceChildren(
    ...list.toReversed().slice(0, 60).map((g) =>
      el("li", { "data-generation": g[0] }, el("strong", {}, `${g[0]} `), ...causeTag(g[6]), ...linked(g[5] || "no reason given"), " ", el("span", { className: "soft" }, `· step ${g[2]}, ${plural(g[3], "worker")}, leader ${g[4].join(", ")}, ${clock(g[1])}`)),
    ),
  );
}

/** Whether any event has told of the job. */
function knows(run) {
  return Boolean(run.head.began_ns || run.head.step);
}

export function recoveries(run) {
  if (!$("phase-legend").children.length) {
    $("phase-legend").append(...PHASES.map((phase) => styled(el("li", { "data-glyph": "" }, term(phase)), { "--swatch": phaseColour(phase) })));
  }
  const list = run.recoveries.toReversed();
  $("phase-legend").hidden = !list.length;
  $("recoveries").replaceChildren(...(list.length ? falls(list) : [el("p", { className: "soft" }, run.incidents.some(([, , end]) => end === null) ? `none has ended${run.head.running ? " yet" : ""}` : knows(run) ? "none was needed" : "unknown")]));
}

/** One line per incident, newest first: the fault, the reaction, the duration. */
export function incidents(run) {
  const lines = run.incidents.toReversed().map(([, begin, , , cause, level, line]) => {
    const when = el("button", { type: "button", className: "link-to", title: "read the log at this moment", onclick: () => acts.moment(begin, null) }, clock(begin));
    return el("li", { "data-level": level }, when, " ", ...causeTag(cause), ...linked(line));
  });
  $("incidents").replaceChildren(...(lines.length ? lines : [el("li", { className: "soft" }, knows(run) ? "no fault" : "unknown: there are no events")]));
}

/** Recoveries as waterfalls: each phase in its colour, at its place. */
export function falls(list) {
  const longest = Math.max(0.001, ...list.map((r) => r[1]));
  return list.map(([begin, seconds, worker, step, reason, phases, cause]) => {
    const said = phases.map(([phase, , s]) => `${phase} ${duration(s)}`).join(", ");
    const track = el("div", { className: "track", role: "img", "aria-label": said, title: said });
    track.append(...phases.map(([phase, at, s]) => styled(el("i", { "data-phase": phase }), { left: `${(100 * at) / longest}%`, width: `${(100 * s) / longest}%`, background: phaseColour(phase) })));
    const when = el("button", { type: "button", className: "link-to", title: "read the log at this moment", onclick: () => acts.moment(begin, null) }, clock(begin));
    return el("div", { className: "fall" }, when, track, el("span", {}, duration(seconds)), el("span", { className: "why" }, ...causeTag(cause), ...linked(`step ${step}: ${reason}`)));
  });
}

export function account(run) {
  const entries = Object.entries(run.account);
  const whole = entries.reduce((sum, [, s]) => sum + s, 0) || 1;
  const tint = (use) => (use.startsWith("recovery: ") ? phaseColour(use.slice(10)) : `var(--${USES[use] ?? "bad"})`);
  $("account").replaceChildren(...entries.map(([use, s]) => styled(el("i", { title: `${use}: ${duration(s)}` }), { flex: `${s} 0 0`, background: tint(use) })));
  $("account-list").replaceChildren(
    ...entries.map(([use, s]) => el("div", {}, styled(el("dt", {}, use), { "--swatch": tint(use) }), el("dd", {}, `${duration(s)} · ${((100 * s) / whole).toFixed(2)} %`))),
  );
}

export function scaling(run) {
  const { measured: all, left_out } = run.efficiency;
  const measured = all.toSorted((a, b) => b.steps - a.steps).slice(0, 8).sort((a, b) => a.workers - b.workers);
  const rows = measured.map((e) => [e.workers, number(e.samples_per_s), e.speed_up.toFixed(2), e.ideal.toFixed(2), percent(e.efficiency), `± ${Math.round(100 * e.spread)} %`, e.steps]);
  const window = el("p", { className: "soft small" }, "Rates over all steps that no fault, evaluation or change fell into.");
  const note = all.length < 2 && !left_out ? el("p", { className: "soft" }, "Efficiency compares numbers of workers: so far there was one.") : null;
  $("scaling").replaceChildren(...[rows.length ? table(["workers", "samples/s", `speed-up, of ${all[0].relative_to}`, "ideal", "efficiency", "spread of a step", "steps"], rows, [0, 1, 2, 3, 4, 5, 6]) : null, rows.length ? window : null, left_out && el("p", { className: "soft" }, left_out), note].filter(Boolean));
}

export function checkpoints({ checkpoints: { tiers, missed } }) {
  if (!tiers.length) return $("checkpoints").replaceChildren(el("p", { className: "soft" }, "none so far"));
  const rows = tiers.map(({ tier, newest, skipped, failed }) => {
    const [step, size, took, stall] = newest ?? [];
    return [tier, newest ? `step ${step}` : "none", newest ? bytes(size) : "–", duration(took), duration(stall), skipped, failed];
  });
  const told = missed && el("p", { className: missed[2] ? "soft" : "bad" }, `The last one ${missed[2] ? "was skipped" : "failed"} (${missed[0]}, step ${missed[1]}): `, ...causeTag(missed[3]), missed[4]);
  $("checkpoints").replaceChildren(...[table(["tier", "newest", "size", "took", "stall", "skipped", "failed"], rows, [2, 3, 4, 5, 6]), told].filter(Boolean));
}

export function ledger(run, check) {
  const l = run.ledger;
  const button = el("button", { type: "button", id: "check-ledger", onclick: check }, "Check now");
  let text = el("p", { className: "soft" }, "not checked yet");
  if (l.note) text = el("p", { className: "warn" }, l.note);
  else if (l.clean === true) text = el("p", { className: "good" }, `Clean: every sample of ${plural(l.steps, "step")} counted exactly once.`);
  else if (l.clean === false) text = el("div", {}, el("p", { className: "bad" }, `Not clean: ${plural(l.problems.length, "problem")}.`), el("ul", {}, ...l.problems.map((p) => el("li", {}, p))));
  $("ledger").replaceChildren(text, button);
}

/** Comparison of several runs: which final states are equal to the bit, and a row for each run with the settings that
differ; runs that are equal stand together. */
export function compared(runs) {
  const named = runs.map((run) => run.head.name), names = named.map((name, i) => (named.indexOf(name) === named.lastIndexOf(name) ? name : `${runs[i].number} ${name}`)), digests = runs.map((run) => run.head.digest && `${run.head.digest} ${run.head.digest_version}`);
  const missing = names.filter((_, i) => !digests[i]), groups = [...new Set(digests.filter(Boolean))];
  const told = groups.map((digest) => names.filter((_, i) => digests[i] === digest)).filter((group) => group.length > 1).map((group) => `${group.join(", ")} are equal to the bit`);
  const whole = groups.length === 1 && !missing.length;
  const versions = new Set(runs.filter((run) => run.head.digest).map((run) => run.head.digest_version));
  const unlike = versions.size > 1 ? "Their digests are of different versions, which say nothing of each other: see everstep verify." : "The final states are not all equal.";
  const lacking = missing.length ? `No final state to compare yet: ${missing.join(", ")}.` : "";
  const said = whole ? "The final states are bitwise equal." : [lacking, lacking ? "" : unlike, told.length ? `${told.join("; ")}.` : ""].filter(Boolean).join(" ");
  write($("verdict"), said);
  $("verdict").className = `small ${missing.length || versions.size > 1 ? "soft" : whole ? "good" : "warn"}`;
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort().filter((key) => new Set(runs.map((run) => run.config[key] ?? "")).size > 1);
  const order = runs.map((_, i) => i).sort((a, b) => groups.indexOf(digests[a]) - groups.indexOf(digests[b]) || a - b);
  const rows = order.map((i) => [names[i], digests[i] ? `${digests[i].slice(0, 12)}${told.length && digests.filter((d) => d === digests[i]).length > 1 ? " =" : ""}` : "–", ...keys.map((key) => runs[i].config[key] ?? "")]);
  const signature = JSON.stringify([keys, rows]);
  if ($("settings").shown === signature) return;
  $("settings").shown = signature;
  $("settings").replaceChildren(table(["run", "digest", ...keys], rows), ...(keys.length ? [] : [el("p", { className: "soft small" }, "No setting differs.")]));
}

// ---- log

export class Log {
  constructor() {
    this.root = $("log");
    this.shown = 0;
    this.moment = null;
    $("filters").addEventListener("input", () => this.all());
    $("filters").addEventListener("submit", (event) => event.preventDefault());
  }

  /** Show a run's newest lines; again: the same run's after a new connection, so a moment that is read stays. */
  show(run, again = false) {
    this.run = run;
    this.moment = again ? this.moment : null;
    this.all();
  }

  /** The lines around a moment instead of the newest; null: the newest again. */
  at(moment) {
    this.moment = moment;
    this.moved?.(moment);
    if (moment?.worker !== null && moment) $("log-worker").value = "";
    this.all();
    const line = this.root.querySelector(".at");
    if (line) this.root.scrollTop = line.offsetTop - this.root.offsetTop - this.root.clientHeight / 3;
  }

  /** Add new lines. */
  more(run) {
    if (run !== this.run) return this.show(run);
    const fresh = run.log.filter((line) => line[0] > this.shown && this.wanted(line));
    this.shown = run.log.at(-1)?.[0] ?? 0;
    if (!fresh.length || this.moment) return;
    this.root.querySelector(".empty")?.remove();
    this.root.prepend(...fresh.slice(-MOST_LINES).reverse().map(logLine));
    while (this.root.children.length > MOST_LINES) this.root.lastElementChild.remove();
  }

  all() {
    if (!this.run) return;
    const found = (this.moment?.lines ?? this.run.log).filter((line) => this.wanted(line)).slice(-MOST_LINES).reverse();
    this.shown = this.run.log.at(-1)?.[0] ?? 0;
    const nodes = found.map(logLine);
    this.root.replaceChildren(...(nodes.length ? nodes : [el("p", { className: "empty" }, "nothing to show")]));
    const note = $("log-moment");
    note.hidden = !this.moment;
    if (!this.moment) return;
    const { ms, worker } = this.moment;
    const best = found.reduce((near, line, i) => (Math.abs(line[1] - ms) < Math.abs(found[near]?.[1] - ms) ? i : near), 0);
    nodes[best]?.classList.add("at");
    const back = el("button", { type: "button", onclick: () => this.at(null) }, "back to the newest");
    note.replaceChildren(`Around ${clock(ms)}${worker === null ? "" : `: the events, and what worker ${worker} said`}. `, back);
  }

  wanted([, , level, kind, worker, , text]) {
    if (level === "info" && kind.startsWith("checkpoint") && !$("log-checkpoints").checked) return false;
    const order = ["info", "warning", "error"];
    if (order.indexOf(level) < order.indexOf($("log-level").value)) return false;
    const id = $("log-worker").value.trim();
    if (id && String(worker) !== id) return false;
    return text.toLowerCase().includes($("log-text").value.trim().toLowerCase());
  }
}

export function logLine([, ms, level, , , step, text]) {
  return el("p", { "data-level": level }, el("span", { className: "soft", title: step === null ? "" : `step ${step}` }, clock(ms)), el("span", {}, level), el("span", {}, ...linked(text)));
}
