"""The reading library: all facts of a job from its run directory, kept current while the files grow.

The dashboard, reports, comparisons, `top` and `logs` all read through it. Reading is incremental and in bounded
portions, so that a caller can do other work between two of them; memory is bounded for files of any size.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.base.doors import at_port, is_loopback
from everstep.base.errors import ConfigError
from everstep.base.given import read_json
from everstep.checkpoint.names import manifest_name, step_of
from everstep.observe.events import KINDS
from everstep.order.cursor import last_step
from everstep.report.facts import SET_BACK_NS, Facts, by_itself, heard_lately, lost_mark
from everstep.report.headline import Headline, Now, headline
from everstep.report.incidents import Incident, lost_launcher
from everstep.report.job_condition import ENDED
from everstep.report.shown_settings import is_secret
from everstep.report.tail import Folder, Tail, free_bytes, object_of
from everstep.report.tally import Tally
from everstep.report.told_facts import Mark
from everstep.report.usage import Usage
from everstep.report.wall_time import goodput
from everstep.report.words import Event, as_dict, known, number, one_line, whole_number
from everstep.runtime.files.host_directory import checkpoints_in
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import DATASET_FILE, EVENTS_FILE, JOB_FILE, LOCK_FILE, METRICS_FOLDER

PORTION_BYTES = 4 << 20
_MOST_DEEP = 30
_NOT_AGAIN = ("chaos", "resume_from", "network.address", "cell.shards")  # a job keeps its shards


class History:
    """Facts of one job.

    facts: from its events; tally: their sums; usage: from its metrics; `foreign`: lines that could not be read.
    `resets` grows when the directory was begun again (`--fresh`), which makes all earlier facts void. heard: called
    with each event, in order, after the others have taken it in.
    """

    def __init__(self, run_dir: Path, heard: Callable[[Event], None] | None = None) -> None:
        self.run_dir = run_dir
        self._heard = heard
        self.facts, self.tally, self.usage = Facts(), Tally(), Usage()
        self.foreign = self.resets = 0
        self.loaded = False
        self._events = Tail(run_dir / EVENTS_FILE)
        self._metrics = Folder(run_dir / METRICS_FOLDER, "*.jsonl")
        self._stored: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}

    def poll(self, most_bytes: int = PORTION_BYTES) -> bool:
        """Read a portion of new data at most; returns whether there was any. `loaded` once all was read."""
        changed = False
        for lines in self._events.read(most_bytes):
            if self._events.replaced > self.resets:
                self._reset()
            for event in self._known(lines, self._events.objects(lines)):
                self._event(event)
            changed = True
        for lines in self._metrics.read(most_bytes):
            for sample in self._known(lines, map(object_of, lines)):
                self.usage.take(sample)
            changed = True
        if not changed or not (self._events.unread_bytes() or self._metrics.unread_bytes()):
            self.loaded = self.loaded or not self.trouble
        return changed

    def load(self) -> History:
        while self.poll():
            pass
        return self

    @property
    def trouble(self) -> str:
        """Reason why events.jsonl cannot be read; "" if it can, or is not there."""
        return self._events.trouble

    @property
    def absurd(self) -> str:
        """The line of events.jsonl with impossible numbers; "" if no line read has any."""
        return self._events.absurd

    @property
    def name(self) -> str:
        """Name of the run for people: the last part of its path."""
        return self.run_dir.resolve().name or str(self.run_dir)

    @property
    def job(self) -> dict[str, Any]:
        """job.json, {} where it cannot be read."""
        return self._json(JOB_FILE)

    @property
    def digest(self) -> dict[str, Any]:
        """Content of final/digest.json, {} if the job has not finished."""
        return self._json(os.path.join("final", "digest.json"))

    @property
    def final(self) -> dict[str, Any]:
        """Digests of the final state: `digest`, unless it is of an earlier step."""
        digest, step = self.digest, self.facts.course.step
        return digest if whole_number(digest.get("step", step)) >= step else {}

    @property
    def total_steps(self) -> int | None:
        """Number of the last step: of a completed job the step that it reached, else what steps and epochs ask for.
        None where nobody knows: a script's dataset is counted when its workers have joined, and of a global batch that
        follows the number of workers only `steps` can tell."""
        if self.facts.condition.ended_ns is not None and self.facts.condition.state == "completed":
            return self.facts.course.step
        more = self._json(DATASET_FILE)
        given = {**as_dict(self.job.get("config")), **more}
        size = _least_one(self.job.get("dataset_size")) or _least_one(more.get("size"))
        size = None if given.get("batch") == "per_worker" else size
        lanes, batch = (_least_one(given.get(name)) or 1 for name in ("lanes", "micro_batch"))
        return last_step(size, lanes * batch, *(_least_one(given.get(name)) for name in ("steps", "epochs")))

    def running(self) -> bool:
        return is_locked(self.run_dir)

    def begins(self, running: bool) -> bool:
        """Whether a job has taken the directory without an event so far: all facts are of the one before. If it was
        taken in the future, the clock was set back since, and nobody knows."""
        return running and self.facts.told_ns < self._taken_ns() <= time.time_ns() + SET_BACK_NS

    def _taken_ns(self) -> int:
        """Time at which the directory was last taken: each holder writes its name into the lock."""
        try:
            return (self.run_dir / LOCK_FILE).stat().st_mtime_ns
        except OSError:
            return 0

    def state(self, running: bool) -> str:
        """State of the job, in INTERFACE's words, as far as files tell."""
        state = self.facts.condition.state
        if running:
            return "starting" if self.begins(running) else state
        if self.finished or state in ENDED or self.maybe_trains(running):
            return "completed" if self.finished else state
        return "interrupted"

    @property
    def finished(self) -> bool:
        """Whether the final state is there, is not that of an earlier step, and no other end was told."""
        told = self.facts.condition
        return bool(self.final) and (told.ended_ns is None or told.state == "completed")

    def maybe_trains(self, running: bool) -> bool:
        """Whether a script by itself, which holds no directory, has told something lately, and no end."""
        facts = self.facts
        return not running and by_itself(facts) and not self.finished and heard_lately(facts, time.time_ns())

    def told_state(self, running: bool, live: Mapping[str, Any] | None) -> str:
        """State of the job as the coordinator's answer has it, if there is one. A coordinator that was started again
        begins as if there were no job yet, until the members have told it of theirs."""
        state = self.state(running)
        found = str(live["state"]) if live else state
        return state if found == "starting" and self.facts.course.last_step_ns else found

    def lost_launcher(self, running: bool) -> Incident | None:
        """The loss of the launcher, since about its last word, if it is gone and has told no end."""
        facts = self.facts
        told_end = facts.condition.ended_ns is not None or self.finished
        if running or told_end or not facts.began_ns or by_itself(facts):
            return None
        return lost_launcher(
            facts.incidents.count + 1, max(facts.course.last_step_ns, facts.account.end_ns), facts.course.step
        )

    def incidents(self, running: bool) -> list[Incident]:
        """The newest incidents, the loss of the launcher among them."""
        lost = self.lost_launcher(running)
        return [*self.facts.incidents.all, *([lost] if lost is not None else [])]

    def marks(self, running: bool) -> list[Mark]:
        """The newest marks, the loss of the launcher among them."""
        lost = self.lost_launcher(running)
        return [*self.facts.marks, *([lost_mark(lost)] if lost is not None else [])]

    def faults(self, running: bool) -> int:
        """Number of faults, the loss of the launcher among them."""
        return self.facts.faults + (self.lost_launcher(running) is not None)

    def seconds(self, running: bool, goes_on: bool = False) -> dict[str, float]:
        """The account of the wall time, by cause; it includes a running job's time up to now. goes_on: as of
        `under_way`."""
        facts, account = self.facts, self.facts.account
        if running and facts.condition.ended_ns is None and account.begin_ns is not None and not self.begins(running):
            account.reach(time.time_ns())
        return account.seconds(facts.under_way(account.end_ns, goes_on))

    def goodput(self, running: bool) -> float | None:
        """Share of the running time that was training."""
        return goodput(self.seconds(running))

    def goodput_by_capacity(self, running: bool, goes_on: bool = False) -> float | None:
        """Training's share of the running time, each moment weighted by the share of the wanted workers in it."""
        facts = self.facts
        seconds = self.seconds(running, goes_on)
        whole = sum(value for use, value in seconds.items() if use != "not running")
        done_s = facts.account.by_capacity_s(facts.under_way(facts.account.end_ns, goes_on))
        return done_s / whole if whole > 0 else None

    @property
    def resume(self) -> str:
        """The command that goes on with the job, with the keys of secrets, to be given again, in a comment; "" if
        job.json does not name the task."""
        job, config = self.job, as_dict(self.job.get("config"))
        task, argv, explicit = job.get("task"), job.get("argv"), job.get("explicit")
        if not isinstance(task, str) or not task:
            return ""
        words = ["everstep", "run", task, "--run-dir", str(self.run_dir), *_doors(job, config)]
        missing = []
        for key in explicit if isinstance(explicit, list) else []:
            if isinstance(key, str) and key not in _NOT_AGAIN and (value := _value(config, key)) is not None:
                if is_secret(key, value):
                    missing.append(key)
                else:
                    words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        own = ["--", *map(str, argv)] if isinstance(argv, list) and argv else []
        again = f" # and give {one_line(', '.join(missing))} again" if missing else ""
        return one_line(shlex.join([*words, *own]), 2000) + again

    def disk_step(self) -> int | None:
        """The newest step with a checkpoint on disk, 0 if none, None if this user may not look; nothing is verified."""
        given = as_dict(as_dict(as_dict(self.job.get("config")).get("checkpoint")).get("disk")).get("path")
        try:
            return step_seen(Path(given) if isinstance(given, str) else checkpoints_in(self.run_dir))
        except ConfigError:
            return 0

    def now(self, running: bool, live: Mapping[str, Any] | None = None, asked: bool = False) -> Now:
        """Facts for the sentence beside the events, at this moment. live: the coordinator's answer; asked: it was
        asked, so a None means that it is silent."""
        over = not running
        return Now(
            time.time_ns(),
            running,
            live,
            asked,
            {i: one_line(newest.row.get("phase"), 20) for i, newest in self.usage.workers.items()},
            self.total_steps,
            self.disk_step() if over else None,
            self.finished,
            whole_number(self.final.get("step")),
            self.final.get("left") is True,
            self.resume if over else "",
            number(as_dict(self.job.get("config")).get("quorum_wait_s")) or None,
            free_bytes(self.run_dir),
            self._taken_ns() if self.begins(running) else None,
            self.trouble,
        )

    def headline(self, running: bool, live: Mapping[str, Any] | None = None, asked: bool = False) -> Headline:
        """The job's condition in one sentence; arguments as of `now`."""
        return headline(self.facts, self.now(running, live, asked))

    def _reset(self) -> None:
        self.resets = self._events.replaced
        self.facts, self.tally, self.usage = Facts(), Tally(), Usage()
        self._metrics = Folder(self.run_dir / METRICS_FOLDER, "*.jsonl")

    def _known(self, lines: Iterable[bytes], objects: Iterable[Event | None]) -> Iterator[Event]:
        for line, found in zip(lines, objects, strict=True):
            if found is not None:
                yield found
            else:
                self.foreign += bool(line.strip())

    def _event(self, event: Event) -> None:
        kind = event.get("kind")
        if not isinstance(kind, str):
            self.foreign += 1
            return
        if kind not in KINDS and len(self.facts.counts) > 200:
            return  # in a file that is not ours, kinds would pile up
        self.facts.take(event)
        self.tally.take(event)
        if self._heard is not None:
            self._heard(event)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.run_dir / name
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            stored = self._stored.get(name)
            if stored is None or stored[0] != stamp:
                content = as_dict(read_json(path, folders=name.count("/")))
                stored = self._stored[name] = (stamp, {} if _is_deeper_than(content, _MOST_DEEP) else content)
            return stored[1]
        except (OSError, ValueError):
            return {}


def names_of(histories: Sequence[History]) -> list[str]:
    """Names of runs that stand beside each other: those that have the same name have their paths."""
    names = [one.name for one in histories]
    return [name if names.count(name) == 1 else str(one.run_dir) for name, one in zip(names, histories, strict=True)]


def newest_step(folder: Path) -> int:
    """The newest step with a manifest; 0 if none. Nothing is verified. Raises: OSError if it cannot be looked at."""
    try:
        steps = [step for step in map(step_of, os.listdir(folder)) if step is not None]
    except FileNotFoundError:
        return 0
    return max((step for step in steps if (folder / manifest_name(step)).is_file()), default=0)


def step_seen(folder: Path) -> int | None:
    """The newest step with a manifest, for people: None if this user may not look."""
    try:
        return newest_step(folder)
    except (OSError, ValueError):  # or no path at all
        return None


def _is_deeper_than(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [one for values in inner for one in values]
    return bool(level)


def _doors(job: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The options by which hosts find a job at its old place, and by which this host takes its old part in it."""
    doors, address = as_dict(job.get("doors")), _value(config, "network.address")
    port = whole_number(doors.get("port"))
    if not isinstance(address, str) or doors.get("port") == 0 or (is_loopback(address) and not port):
        return []  # no other host could join
    words = ["--listen", at_port(address, port)]
    if "slots" in doors and doors["slots"] is None:
        return [*words, "--no-local-workers"]
    slots = whole_number(doors.get("slots"))
    return [*words, "--slots", str(slots)] if slots > 0 else words


def _least_one(value: Any) -> int | None:
    """A whole number from 1 on from what a file says, else None."""
    found = known(value)
    return found if found is not None and 0 < found < 1 << 63 else None


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key."""
    found: Any = config
    for part in key.split("."):
        found = as_dict(found).get(part)
    return found
