"""`everstep profile`: records the next steps of a running job in its workers, as one trace."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import click

from everstep.base.errors import ConfigError, EverstepError
from everstep.cli.running import ask_running
from everstep.cli.seconds import timeout
from everstep.report.history import History
from everstep.report.traces import merge
from everstep.report.words import size_text
from everstep.runtime import commands
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import PROFILES_FOLDER

_POLL_S = 0.2
_PATIENCE_S = 2.0


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1, 1000), default=5, show_default=True, help="Steps to record.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="File for the merged trace (DIR/profiles/TIME/trace.json.gz)."
)
@click.option("--workers", "listed", metavar="ID,ID", help="Only these workers (all that train).")
@click.option("--memory", is_flag=True, help="Record allocations as well.")
@click.option("--stacks", is_flag=True, help="Record Python's stacks as well; traces become large.")
@timeout("Seconds to wait for the trace.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def command(
    run_dir: Path,
    steps: int,
    out: Path | None,
    listed: str | None,
    memory: bool,
    stacks: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Record the next steps of the workers of the running job in DIR, and merge them into one Chrome trace.

    The job goes on; its bits stay the same. Look at the trace at https://ui.perfetto.dev or chrome://tracing.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    folder = run_dir / PROFILES_FOLDER / name
    if out is not None and not out.resolve().parent.is_dir():
        raise ConfigError(f"--out: expected a file in a directory that exists, got {out}")
    asked: dict[str, Any] = {"folder": name, "steps": steps, "memory": memory, "stacks": stacks}
    if listed is not None:
        asked["workers"] = _ids(listed)
    told = ask_running(run_dir, "profile", asked)
    watch = _Watch(run_dir, folder, told, sys.stderr if as_json else sys.stdout)
    watch.wait(timeout_s)
    folders, out = (None, out) if out is not None else (2, folder / "trace.json.gz")
    if not watch.written:
        missing = "; ".join(f"worker {i}: {why}" for i, why in sorted(watch.missing.items()))
        raise EverstepError(f"there is no profile: {missing}")
    paths = [watch.path(i) for i in sorted(watch.written)]
    count = merge(paths, History(run_dir).load().facts, out, folders)
    if as_json:
        result = {"path": str(out), "folder": str(folder), "events": count, "workers": sorted(watch.written)}
        result |= {"missing": {str(i): why for i, why in sorted(watch.missing.items())}}
        print(json.dumps({**result, "first_step": told.get("first_step"), "steps": steps}))
    else:
        print(f"{count} events of {len(paths)} worker{'s' * (len(paths) > 1)} are in {out}")
    return 0


def _ids(listed: str) -> list[int]:
    try:
        return sorted({int(part) for part in listed.split(",")})
    except ValueError:
        raise ConfigError(f"--workers: expected worker ids such as 0,2, got {listed!r}") from None


class _Watch:
    """State of the recordings. lives: the recording workers, worker_id -> incarnation; missing: reasons by worker."""

    def __init__(self, run_dir: Path, folder: Path, told: dict[str, Any], progress: TextIO) -> None:
        self.lives: dict[int, int] = {w["worker_id"]: w["incarnation"] for w in told["workers"]}
        self.written: set[int] = set()
        self.missing: dict[int, str] = {}
        self._run_dir = run_dir
        self._folder = folder
        self._told = told
        self._progress = progress

    def path(self, worker_id: int) -> Path:
        """Path of this worker's trace, which appears once it is whole."""
        return self._folder / f"worker-{worker_id}.json.gz"

    def _open(self) -> list[int]:
        return sorted(self.lives.keys() - self.written - self.missing.keys())

    def wait(self, timeout_s: float) -> None:
        """Wait until each worker has a trace or will have none; print each as it happens."""
        first, last = self._told["first_step"], self._told["first_step"] + self._told["steps"] - 1
        who = f"worker{'s' * (len(self.lives) > 1)} {', '.join(map(str, sorted(self.lives)))}"
        self._say(f"recording step{f's {first} to {last}' if last > first else f' {first}'} of {who}")
        end_s = time.monotonic() + timeout_s
        while True:
            running = is_locked(self._run_dir)  # a worker that is gone by now will write no more
            status: dict[str, Any] | None = None
            with contextlib.suppress(EverstepError):
                status = commands.ask(self._run_dir, "status", timeout_s=_PATIENCE_S)
            for worker_id in self._open():
                path = self.path(worker_id)
                if path.exists():
                    self.written.add(worker_id)
                    self._say(f"worker {worker_id}: {size_text(path.stat().st_size)}")
            if not self._open():
                return
            late = time.monotonic() > end_s
            for worker_id in self._open():
                why = f"not done after {timeout_s:g} s" if late else self._why_missing(worker_id, status, running)
                if why:
                    self.missing[worker_id] = why
                    self._say(f"worker {worker_id} is missing: {why}")
            time.sleep(_POLL_S)

    def _why_missing(self, worker_id: int, status: dict[str, Any] | None, running: bool) -> str:
        if not running:
            return "the job ended before its trace was written"
        if status is None:
            return ""
        profile = status.get("profile") or {}
        known = profile.get("name") == self._folder.name
        lives = {(w["worker_id"], w["incarnation"]) for w in status["workers"]}
        if (worker_id, self.lives[worker_id]) not in lives:
            return self._how_it_ended(worker_id)
        return str(profile["failed"].get(str(worker_id), "")) if known else ""

    def _how_it_ended(self, worker_id: int) -> str:
        marks = History(self._run_dir).load().facts.marks
        why = next((m.text for m in reversed(marks) if (m.kind, m.worker_id) == ("evicted", worker_id)), "it left")
        return f"{why}, while it recorded"

    def _say(self, text: str) -> None:
        print(text, file=self._progress, flush=True)
