// Actions of a page on a running job. Harmful actions need two presses; actions for which the dashboard lacks the job's
// token cannot be pressed at all.

import { $, attribute, el, write } from "./dom.js";
import { known, post } from "./stream.js";

/** The role whose token an action needs, as the coordinator defines it. */
const NEEDS = { checkpoint: "operate", drain: "operate", scale: "operate", profile: "operate", stop: "operate", chaos: "inject" };
const FAULTS = [["kill", "kill"], ["stop,for=5", "stop for 5 s"], ["stop", "stop for good"], ["raise", "raise an exception"], ["partition,for=5", "cut off for 5 s"]];
const ANYBODY = [["random", "any worker"], ["coordinator", "the coordinator"]];

/** A button that does nothing until it is pressed a second time, at the latest 4 s after the pointer or the keyboard's
focus has left it. */
function armed(label, needs, act) {
  const button = el("button", { type: "submit", "data-needs": needs }, label);
  let timer = 0;
  const disarm = () => {
    clearTimeout(timer);
    delete button.dataset.armed;
    write(button, label);
  };
  const wait = () => {
    clearTimeout(timer);
    if (button.dataset.armed) timer = setTimeout(() => (button.matches(":hover, :focus-visible") ? wait() : disarm()), 4000);
  };
  button.onpointerleave = button.onblur = wait;
  const submit = (event) => {
    event.preventDefault();
    if (button.disabled) return;
    if (button.dataset.armed) return disarm(), act();
    button.dataset.armed = "yes";
    write(button, `${label}: sure?`);
    wait();
  };
  return [button, submit];
}

function row(label, needs, act, ...fields) {
  const [button, submit] = armed(label, needs, act);
  return el("form", { className: "row", onsubmit: submit, autocomplete: "off" }, ...fields, button);
}

export class Actions {
  /** run: the chosen run; key: its name on the server. */
  constructor(run, key) {
    this.run = run;
    this.key = key;
    this.unlocked = this.lost = false;
    this.build();
    $("unlock").addEventListener("submit", (event) => {
      event.preventDefault();
      this.unlock($("token").value.trim());
    });
    known().then((yes) => this.open(yes));
  }

  build() {
    const input = (id, text, more = {}) => el("label", {}, text, el("input", { id, required: true, ...more }));
    const whole = { inputMode: "numeric", pattern: "[0-9]+" };
    const options = (of) => of.map(([value, text]) => el("option", { value }, text));
    const checkpoint = el("button", { type: "submit", "data-needs": "checkpoint" }, "Checkpoint now");
    $("actions").replaceChildren(
      el("form", { className: "row", onsubmit: (e) => (e.preventDefault(), this.ask("checkpoint", {})) }, checkpoint),
      row("Drain", "drain", () => this.ask("drain", { worker_id: Number($("drain-worker").value) }), input("drain-worker", "Worker that is to leave", whole)),
      row("Scale", "scale", () => this.ask("scale", { workers: Number($("scale-workers").value) }), input("scale-workers", "Number of workers", whole)),
      row("Inject", "chaos", () => this.ask("chaos", { fault: fault() }), el("label", {}, "Fault", el("select", { id: "fault-kind" }, ...options(FAULTS))), el("label", {}, "Target", el("select", { id: "fault-target" }, ...options(ANYBODY)))),
      row("Stop the job", "stop", () => this.ask("stop", {}), el("span", { className: "soft small" }, "It takes a checkpoint and ends; everstep run goes on from there.")),
    );
  }

  /** Actions on one worker, as buttons; the answer is written into `node`. */
  ofWorker(id, node) {
    const profile = el("button", { type: "submit", "data-needs": "profile" }, "Profile 5 steps");
    const alone = el("form", { onsubmit: (e) => (e.preventDefault(), this.ask("profile", { steps: 5, workers: [id] }, node)) }, profile);
    const twice = (label, needs, name, args) => {
      const [button, submit] = armed(label, needs, () => this.ask(name, args, node));
      return el("form", { onsubmit: submit }, button);
    };
    return [alone, twice("Drain", "drain", "drain", { worker_id: id }), twice("Kill", "chaos", "chaos", { fault: `kill:target=worker:${id}` })];
  }

  async unlock(given) {
    const result = await post("/api/token", {}, given);
    if (result.ok) write($("answer"), "");
    else answer(result);
    const focused = $("unlock").contains(document.activeElement);
    this.open(result.ok === true);
    if (this.unlocked && focused) $("actions-title").focus({ preventScroll: true });
  }

  open(yes) {
    this.unlocked = yes;
    $("unlock").hidden = yes;
    $("actions").hidden = !yes;
    this.allow();
  }

  /** The server is gone: nothing can be asked; or it is back. */
  cut(lost) {
    this.lost = lost;
    this.allow();
  }

  /** Enable the buttons while the job runs, as far as the dashboard has the tokens for their actions. */
  allow() {
    const head = this.run()?.head ?? {};
    for (const button of document.querySelectorAll("button[data-needs]")) {
      const role = NEEDS[button.dataset.needs];
      const why = this.lost ? "this page is cut off from its dashboard" : !this.unlocked ? "unlock the actions first" : !head.running ? "no job is running" : head.may?.includes(role) ? "" : `the dashboard has no token for '${role}' of this job`;
      button.disabled = why !== "";
      attribute(button, "title", why);
    }
  }

  async ask(name, body, node = $("answer")) {
    write(node, "…");
    answer(await post(`/api/runs/${this.key()}/${name}`, body), node);
  }

  /** Possible targets of a fault: anyone, the leader of a stage, a worker. */
  targets(run) {
    const list = $("fault-target");
    const living = [...run.rows].filter(([, w]) => w.state !== "dead" && w.state !== "left");
    const stages = [...new Set(living.flatMap(([, w]) => w.stages))].sort((a, b) => a - b);
    const leaders = stages.map((stage) => [`leader:${stage}`, stages.length > 1 ? `the leader of stage ${stage}` : "the leader"]);
    const wanted = [...ANYBODY, ...leaders, ...living.map(([id]) => [`worker:${id}`, `worker ${id}`])];
    const signature = wanted.join();
    if (list.made === signature) return;
    const kept = list.value;
    list.made = signature;
    list.replaceChildren(...wanted.map(([value, text]) => el("option", { value }, text)));
    if (wanted.some(([value]) => value === kept)) list.value = kept;
  }

  /** Actions apply to the worker that is picked. */
  aim(id) {
    $("drain-worker").value = id;
    $("fault-target").value = `worker:${id}`;
  }
}

export function answer(result, node = $("answer")) {
  write(node, result.ok ? result.text : result.error);
  node.className = `answer ${result.ok ? "good" : "bad"}`;
}

function fault() {
  const [kind, ...more] = $("fault-kind").value.split(",");
  return [`${kind}:target=${$("fault-target").value}`, ...more].join();
}
