"""Short jobs of a script or task that is checked: on one worker; on several, one of which is killed and healed; resumed
on another number of workers; in pipeline stages. All must end with the same bits.

Each is a real `everstep run` of a few steps, in a folder that is thrown away. Code after the loop is not run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.base.below import write_atomically
from everstep.base.cause import Cause
from everstep.base.errors import ConfigError
from everstep.cli.run_dir import read_digest
from everstep.cli.task_loading import TaskSpec
from everstep.observe.events import read_events
from everstep.runtime.link.address import EVENTS_FILE
from everstep.runtime.process import own_command

_IN_REHEARSAL, _TRIED = "EVERSTEP_REHEARSAL", "job"
_KILL = "kill:target=worker:1,at=2"
_STRUCK = (1, 0)
"""Worker and incarnation that `_KILL` strikes."""
_DEATHS = (Cause.KILLED, Cause.CRASHED, Cause.EXITED, Cause.EXCEPTION, Cause.OOM, Cause.CORRUPT, Cause.NONDETERMINISTIC)
_LEAST_S = 5.0
_SETTINGS = "settings.yaml"


@dataclass(frozen=True)
class CheckTarget:
    """A script, with its own arguments, or a task. settings: of the user, by dotted key."""

    spec: TaskSpec
    argv: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ShortJobs:
    """Jobs of one script or task. steps: of the longest, no more than it has. until_s: monotonic end of all."""

    checked: CheckTarget
    folder: Path
    steps: int
    until_s: float
    covered: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Run them one after the other, and compare."""
        settings = {name: value for name, value in self.checked.settings.items() if name not in ("steps", "epochs")}
        write_atomically(self.folder / _SETTINGS, json.dumps(settings))
        first = self._job("one", "one worker", "--workers", "1", "--steps", str(self.steps))
        if first is None:
            return
        half, lanes = self.steps // 2, lanes_of(self.folder / "one" / EVENTS_FILE)
        if lanes < 2:
            self.notes.append("several workers, a kill, a resume on another size: lanes=1 is work for one worker")
            return
        text = "two workers, one of which is killed and healed"
        many = ("--workers", "2", "--min-workers", "2", "--steps", str(self.steps), "--chaos", _KILL)
        kept = ("--set", f"checkpoint.disk.every_steps={half}", "--set", "checkpoint.disk.keep_last=9")
        killed = self._job("killed", text, *many, *kept)
        self._compare(first, killed, text)
        path = self.folder / "killed" / "checkpoints" / f"step-{half:010d}"
        if killed is not None and path.is_dir():
            size, word = ("3", "three workers") if lanes > 2 else ("1", "one worker")
            text = f"the same, resumed on {word} after step {half}"
            more = ("--workers", size, "--steps", str(self.steps), "--resume-from", str(path))
            self._compare(first, self._job("resumed", text, *more), text)
        if self.checked.spec.kind != "script":
            text = "two pipeline stages"
            split = ("--workers", "2", "--stages", "2", "--steps", str(self.steps))
            self._compare(first, self._job("split", text, *split, may_refuse=True), text)
        else:
            self.notes.append("pipeline stages: a script runs its model's forward pass itself, so it cannot be cut")

    def _compare(self, one: dict[str, Any], other: dict[str, Any] | None, text: str) -> None:
        if other is None:
            return
        if (one["step"], one["model"], one.get("state")) == (other["step"], other["model"], other.get("state")):
            self.covered.append(f"{text}: {one['step']} steps to the bits of one worker")
            return
        says = f"{text}: after step {other['step']} the weights differ from those of one undisturbed worker"
        self._find(says, "let what a batch computes depend on the batch, the model and step.number alone")

    def _job(self, name: str, text: str, *options: str, may_refuse: bool = False) -> dict[str, Any] | None:
        """The digest with which a job ends; None if it does not, or there is no time for it."""
        left_s = self.until_s - time.monotonic()
        if left_s < _LEAST_S:
            self.notes.append(f"{text}: no time left (--max-seconds)")
            return None
        run_dir = self.folder / name
        it = self.checked
        command = own_command("everstep", "run", it.spec.text, *options, "--run-dir", str(run_dir))
        command += ["--config", str(self.folder / _SETTINGS), "--set", "rehearse=false"]
        command += ["--", *it.argv] if it.argv else []
        environment = {**os.environ, _IN_REHEARSAL: _TRIED, "WANDB_MODE": "disabled"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=left_s
            )
        except subprocess.TimeoutExpired:
            self.notes.append(f"{text}: it was not through in time (--max-seconds)")
            return None
        for how in deaths(run_dir / EVENTS_FILE, _STRUCK if _KILL in options else None):
            self._find(f"in a job on {text} {how}", "mend that: a job goes on without it, but slowly")
        try:
            digest = read_digest(run_dir) if done.returncode == 0 else None
        except ConfigError as error:
            self.notes.append(f"{text}: {error}")
            return None
        if digest is not None:
            return digest
        why = _last(done.stderr) or _last(done.stdout) or f"exit code {done.returncode}"
        if may_refuse and done.returncode == 2:
            self.notes.append(f"{text}: {why}")
        else:
            self._find(f"a job on {text} fails: {why}", "see its message")
        return None

    def _find(self, says: str, remedy: str) -> None:
        name = os.path.basename(self.checked.spec.where)
        at = re.search(rf"\({re.escape(name)}:(\d+)\)", says)
        said = {"kind": "job", "object": name, "file": name, "line": int(at[1]) if at else 0, "says": says}
        said |= {"remedy": remedy, "refused": True}
        self.findings.append({**said, "changed": 0})


def lanes_of(events: Path) -> int:
    """Lanes of a job, as its first plan has them."""
    plans = (e for e in read_events(events) if e.get("kind") == "generation_started")
    return sum(map(len, next(plans)["lanes"].values()))


def deaths(events: Path, killed: tuple[int, int] | None) -> list[str]:
    """How workers of a job have died of themselves; killed: worker and incarnation that was killed on purpose."""
    found = [e for e in read_events(events) if e.get("kind") == "worker_evicted" and e.get("cause") in _DEATHS]
    lives = {(e.get("worker_id"), e.get("incarnation")): str(e.get("reason", "")) for e in found}
    return sorted({f"a worker died of itself: {how}" for life, how in lives.items() if life != killed})


def _last(text: str) -> str:
    """The line that says why, "" if there is none."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "")
    return said.removeprefix("everstep: ").removeprefix("error: ")
