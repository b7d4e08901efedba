"""Whole conversations with the coordinator, as text that people can read.

A file holds comments (`#`), events (lines that begin with `> `) and, indented under each event, what the coordinator
answered. Events: see `Script`. Only what matters of an effect is written, so that the files stay readable.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator_harness import MS, S, World, drop

from everstep.base.cause import Cause
from everstep.base.plan import Plan
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import Close, Knows, Persist, ProbePort, Report, Send

TRACES = sorted(Path(__file__).parent.glob("coordinator_*.txt"))


def plan_text(plan: Plan) -> str:
    seats = " ".join(f"{s.worker_id}:{','.join(map(str, s.lanes)) or s.role}" for s in plan.seats)
    members = " ".join(str(x.key) for x in plan.members)
    flags = f"{' prepared' if plan.prepared else ''}{f' joining {list(plan.joining)}' if plan.joining else ''}"
    repaired = f" repairs {plan.previous}" if plan.previous else ""
    return f"generation {plan.generation} [{plan.cause}]{flags}{repaired} members [{members}] lanes [{seats}]"


def message_text(x: m.AnyMessage) -> str:
    match x:
        case m.PlanNow() | m.PlanPrepared():
            return f"{type(x).__name__} {plan_text(x.plan)}"
        case m.Heal():
            donors = [d.worker_id for d in x.donors]
            return f"Heal ticket {x.ticket} in generation {x.plan.generation} from {donors}"
        case m.Dismissed():
            return f"Dismissed{' drained' if x.drained else ''}: {x.reason}"
        case m.JobEnded():
            return f"JobEnded {x.state} {x.exit_code} [{x.cause}]: {x.reason}"
        case m.KillWorker():
            return f"KillWorker {x.worker_id}.{x.incarnation}: {x.reason}"
        case m.SetSlots():
            return f"SetSlots {x.worker_ids}"
        case m.ProfileNow():
            return f"ProfileNow {x.name}: {x.steps} steps from {x.first_step}"
        case m.CommandReply():
            return f"CommandReply {'ok' if x.ok else x.error} {x.result or ''}".rstrip()
    return type(x).__name__


def entry_text(entry: dict[str, Any]) -> str:
    shown = {k: v for k, v in entry.items() if k not in ("kind", "plan", "agents", "reason")}
    if "plan" in entry:
        shown["generation"] = entry["plan"]["generation"]
    return f"{entry['kind']} " + " ".join(f"{k}={v}" for k, v in shown.items())


def effect_text(effect: Any) -> str | None:
    match effect:
        case Persist(entry):
            return f"persist {entry_text(entry)}".rstrip()
        case Send(_, m.Pong()):
            return None
        case Send(connection, message):
            return f"to {connection}: {message_text(message)}"
        case Knows(connection, plan):
            return f"{connection} has generation {plan.generation}"
        case Close(connection, reason):
            return f"close {connection}: {reason}"
        case ProbePort(key, address):
            return f"knock at {address}, of {key}"
        case Report(kind, fields):
            who = f" {fields['worker_id']}" if fields.get("worker_id") is not None else ""
            return f"report {kind}{who} [{fields['cause']}]: {fields['reason']}"
    raise AssertionError(effect)


class Script:
    """Reads events and writes effects.

    job workers=3 ...       a fresh job, with settings of the config in seconds or as they are
    agent 0.0 1.0           the agent connects and lists its lives
    hello 1.0               a worker connects (with the plan it was last given)
    exited 2.0 REASON       its agent saw it die, killed by what or with which exit code
    entered 0.0 2 5         it entered generation 2 and computes step 5
    progress 0.0 2 5        it leads generation 2, and step 5 was committed
    healed 2.1              it follows closely enough
    fault 0.0 1: 2 3        in generation 1 it could not transfer with workers 2 and 3
    pulse 1.0 forward 12    it has stood still for 12 s in this phase
    drop NAME               a connection ends
    wait 2.5                seconds pass; agents go on with heartbeats
    alive                   the agents see all workers alive while broken links are waited for
    command NAME k=v        somebody at the command line
    profiled 1.0 NAME [WHY] it has its trace, or says why not
    done 0.0 1 40           it wrote final/ after step 40
    restart                 the coordinator dies, another begins from the journal
    """

    def __init__(self) -> None:
        self.world = World()
        self.out: list[str] = []

    def attach(self, world: World) -> None:
        world.follows.update(self.world.follows)
        self.world = world
        handle = world.handle

        def noting(event: Any) -> list[Any]:
            effects = handle(event)
            self.out += [text for text in map(effect_text, effects) if text is not None]
            return effects

        world.handle = noting  # type: ignore[method-assign]

    def run(self, line: str) -> list[str]:
        self.out = []
        name, *words = line.split()
        getattr(self, f"do_{name}")(*words)
        return self.out

    def do_alive(self) -> None:
        self.world.no_death()

    def do_job(self, *words: str) -> None:
        config: dict[str, Any] = {}
        for word in words:
            key, value = word.split("=")
            number = int(value) if value.isdigit() else value
            config[key] = number * S if key.endswith("_ns") else number
        self.attach(World(**config))

    def do_agent(self, *lives: str) -> None:
        self.world.agent(*[life(x) for x in lives])

    def do_hello(self, worker: str) -> None:
        self.world.hello(*life(worker), plan=self.world.follows.get(f"w{worker}"))

    def do_exited(self, worker: str, *reason: str) -> None:
        worker_id, incarnation = life(worker)
        cause = Cause.KILLED if reason[0] == "killed" else Cause.EXITED
        self.world.exited(worker_id, incarnation, " ".join(reason), cause=cause)

    def do_entered(self, worker: str, generation: str, step: str) -> None:
        worker_id, incarnation = life(worker)
        if self.world.prepared is not None and self.world.prepared.generation == int(generation):
            self.world.follows[f"w{worker}"] = self.world.prepared
        self.world.now += 10 * MS
        self.world.entered(worker_id, int(generation), int(step), incarnation, settle=2.0)

    def do_progress(self, worker: str, generation: str, step: str) -> None:
        worker_id, incarnation = life(worker)
        self.world.now += 10 * MS
        self.world.progress(worker_id, int(generation), int(step), 0.0, incarnation)

    def do_healed(self, worker: str) -> None:
        self.world.healed(*life(worker))

    def do_fault(self, worker: str, generation: str, *accused: str) -> None:
        worker_id, incarnation = life(worker)
        self.world.fault(worker_id, int(generation.rstrip(":")), *map(int, accused), incarnation=incarnation)

    def do_pulse(self, worker: str, phase: str, still_s: str) -> None:
        self.world.beat((*life(worker), phase, int(float(still_s) * 1000)))

    def do_drop(self, name: str) -> None:
        drop(self.world, name)

    def do_wait(self, seconds: str) -> None:
        self.world.wait(int(float(seconds) * S))

    def do_command(self, name: str, *words: str) -> None:
        self.world.command(name, **{k: value(k, v) for k, v in (w.split("=") for w in words)})

    def do_profiled(self, worker: str, name: str, *reason: str) -> None:
        worker_id, incarnation = life(worker)
        told = {"name": name, "ok": not reason, "reason": " ".join(reason)}
        self.world.say(f"w{worker}", m.Profiled(worker_id=worker_id, incarnation=incarnation, **told))

    def do_done(self, worker: str, generation: str, step: str) -> None:
        worker_id, incarnation = life(worker)
        done = {"generation": int(generation), "step": int(step), "final_written": True}
        self.world.say(f"w{worker}", m.WorkerDone(worker_id=worker_id, incarnation=incarnation, **done))

    def do_restart(self) -> None:
        self.attach(self.world.restart())


def value(key: str, text: str) -> Any:
    if key == "workers" and "," in text:
        return [int(part) for part in text.split(",")]
    return int(text) if text.isdigit() else text


def life(text: str) -> tuple[int, int]:
    worker_id, incarnation = text.split(".")
    return int(worker_id), int(incarnation)


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_conversation(path: Path, golden: Callable[[Path, str], None]) -> None:
    script, lines = Script(), []
    for line in path.read_text().splitlines():
        if line.startswith(">"):
            lines.append(line)
            lines += [f"    {text}" for text in script.run(line[1:].strip())]
        elif line.startswith("#") or not line.strip():
            lines.append(line)
    golden(path, "\n".join(lines) + "\n")


def test_there_are_conversations() -> None:
    assert len(TRACES) >= 6
