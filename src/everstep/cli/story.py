"""What has happened in a job so far, from its events; and the summary at its end. Pure: events in, facts out."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.observe.events import KINDS
from everstep.report import words

Event = Mapping[str, Any]

_NOTICED = ("worker_evicted", "coordinator_restarted")
MEMBERS = ("leader", "active", "standby")
_UNTOLD = ("job_started", "step_committed")
_WINDOW = 20


@dataclass
class WorkerLine:
    """What is known of one worker: its place in the newest plan. `pid`, `host`: None where no event said so."""

    worker_id: int
    incarnation: int = 0
    role: str = "spare"
    lanes: tuple[int, ...] = ()
    pid: int | None = None
    host: str | None = None


@dataclass
class Story:
    """Takes in events in file order and knows the state of the job.

    total_steps: None while unknown. wanted: with how many workers the job was started, 0 while unknown. `recoveries_s`:
    durations of all recoveries. `steps_lost`: committed steps that a fallback had to give up.
    """

    total_steps: int | None = None
    step: int = 0
    loss: float | None = None
    generation: int = 0
    wanted: int = 0
    workers: dict[int, WorkerLine] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_step: int = 0
    injected: int = 0
    noticed: int = 0
    steps_lost: int = 0
    samples: int = 0
    state: str = "starting"
    reason: str = ""
    exit_code: int | None = None
    began_ns: int = 0
    ended_ns: int = 0
    waiting: str = ""
    checkpoints: int = 0
    checkpoints_failed: int = 0
    checkpoint_step: int = 0
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def take(self, event: Event) -> None:
        """Take in the next event."""
        kind = event["kind"]
        time_ns = int(event.get("time_unix_ns") or 0)
        self.began_ns = self.began_ns or time_ns
        self.ended_ns = max(self.ended_ns, time_ns)
        self.generation = max(self.generation, int(event.get("generation") or 0))
        if kind == "job_started":
            self.wanted = int(event.get("workers") or 0)
            self.step = int(event.get("step") or 0)
        elif kind == "step_committed":
            self._step(event, time_ns)
        elif kind == "generation_started":
            self._plan(event)
        elif kind == "worker_joined":
            self._joined(event)
        elif kind in _NOTICED:
            self.noticed += 1
            if kind == "worker_evicted":
                self.workers.pop(int(event["worker_id"]), None)
                self.state = "recovering"
        elif kind == "fault_injected":
            self.injected += 1
        elif kind == "recovery_completed":
            self.recoveries_s.append(float(event.get("duration_s") or 0.0))
        elif kind == "evaluated":
            self.metrics = dict(event.get("metrics") or {})
            self.metrics_step = int(event.get("step") or 0)
        elif kind == "fallback":
            self._fall_back(event)
        elif kind == "checkpoint_completed":
            self.checkpoints += 1
            self.checkpoint_step = max(self.checkpoint_step, int(event.get("step") or 0))
        elif kind == "checkpoint_failed":
            self.checkpoints_failed += 1
        elif kind == "waiting":
            self.state, self.waiting = "waiting", str(event.get("reason") or "")
        elif kind in ("job_completed", "job_failed"):
            default = "completed" if kind == "job_completed" else "failed"
            self.state = str(event.get("state") or default)
            self.reason = str(event.get("reason") or "")
            self.exit_code = event.get("exit_code")

    def _fall_back(self, event: Event) -> None:
        """Steps that are done again; not known yet where a checkpoint is refused, or the event names no step."""
        if event.get("step") is None or event.get("what") == "checkpoint":
            return
        back_to = int(event["step"])
        self.steps_lost += max(0, self.step - back_to)
        self.step = min(self.step, back_to)

    def _step(self, event: Event, time_ns: int) -> None:
        self.step = max(self.step, int(event["step"]))
        self.loss = event.get("loss", self.loss)
        self.samples += int(event.get("samples") or 0)
        self._recent.append((time_ns, self.samples))
        self.state, self.waiting = "running", ""

    def _plan(self, event: Event) -> None:
        lanes = event.get("lanes") or {}
        leader = event.get("leader")
        known = self.workers
        self.workers = {i: w for i, w in known.items() if str(i) not in lanes}
        for worker in self.workers.values():
            worker.role, worker.lanes = self._outside(len(lanes)), ()
        for text, taken in lanes.items():
            i = int(text)
            role = "leader" if i == leader else "active" if taken else "standby"
            line = known.get(i) or WorkerLine(i)
            self.workers[i] = replace(line, role=role, lanes=tuple(taken))

    def _joined(self, event: Event) -> None:
        i = int(event["worker_id"])
        incarnation = int(event.get("incarnation") or 0)
        members = sum(w.role in MEMBERS for w in self.workers.values())
        if i not in self.workers or self.workers[i].incarnation != incarnation:
            role = self._outside(members)
            self.workers[i] = WorkerLine(i, incarnation, role, pid=event.get("pid"), host=event.get("host"))

    def _outside(self, members: int) -> str:
        """The role of a worker that is in no plan: it is on its way in if somebody is missing."""
        return "joining" if self.generation and (not self.wanted or members < self.wanted) else "spare"

    @property
    def samples_per_s(self) -> float | None:
        """Over the last steps."""
        if len(self._recent) < 2:
            return None
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        return (s1 - s0) * 1e9 / (t1 - t0) if t1 > t0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step, at the speed of the last ones."""
        if self.total_steps is None or len(self._recent) < 2 or self.step >= self.total_steps:
            return None
        seconds = (self._recent[-1][0] - self._recent[0][0]) / 1e9
        return (self.total_steps - self.step) * seconds / (len(self._recent) - 1)

    @property
    def faults_survived(self) -> int:
        """Faults that were injected, or noticed without having been injected."""
        return max(self.injected, self.noticed)


def tell(events: Iterable[Event], total_steps: int | None = None) -> Story:
    """The story of these events."""
    story = Story(total_steps)
    for event in events:
        story.take(event)
    return story


def summary(
    story: Story, exit_code: int, run_dir: str, digest: Mapping[str, Any] | None, missing_rows: str = ""
) -> dict[str, Any]:
    """The object that `run --json` ends with.

    missing_rows: what the ledger lacks. A job that was done in order is completed, but without the proof not in order.
    """
    states = {0: "completed", 130: "interrupted", 143: "interrupted"}
    times = sorted(story.recoveries_s)
    return {
        "kind": "summary",
        "state": states.get(exit_code, "failed"),
        "exit_code": exit_code or int(bool(missing_rows)),
        "reason": "; ".join(text for text in (story.reason, missing_rows) if text) or None,
        "steps": int(digest["step"]) if digest is not None else story.step,
        "faults_survived": story.faults_survived,
        "steps_lost": story.steps_lost,
        "recoveries": len(times),
        "recovery_s": {"median": statistics.median(times) if times else None, "max": times[-1] if times else None},
        "generations": story.generation,
        "checkpoints": {
            "completed": story.checkpoints,
            "failed": story.checkpoints_failed,
            "newest": story.checkpoint_step or None,
        },
        "ledger_complete": not missing_rows,
        "digest": dict(digest) if digest is not None else None,
        "loss": story.loss,
        "metrics": story.metrics or None,
        "wall_s": round((story.ended_ns - story.began_ns) / 1e9, 3),
        "run_dir": run_dir,
    }


def sentence(event: Event) -> str | None:
    """An event as a line for people; None for those that say nothing new (each step, what a launcher does)."""
    kind = event["kind"]
    return words.sentence(event) if kind in KINDS and kind not in _UNTOLD else None
