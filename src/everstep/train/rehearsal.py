"""The rehearsal of a script: does its loop keep state beside the state that `join` carries, so that it would be lost
after a fault?

Life a does the first steps. Life b, a new process, gets the carried state of a step in between, like a worker that is
resumed, and does the steps after it. Everything that can be reached from the loop (`reachable`) must then be the same.
If it is not, life c repeats life a, so that values that always differ (times, addresses) accuse nobody. Each life is a
job of one worker by itself, with checkpoints in a folder that is thrown away. Lives a and b overlap where the memory is
enough for both.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from everstep.base.below import kept_descriptors, write_atomically
from everstep.base.config import Config, device_of
from everstep.base.errors import BuffersDiffer, EverstepError
from everstep.base.given import read_given, read_json
from everstep.base.plan import Plan
from everstep.base.readable import readable
from everstep.exact.image import digested
from everstep.protocol import messages as wire
from everstep.protocol.step_types import LaneSaid
from everstep.runtime.host.fork_server import redirect_output
from everstep.runtime.link.address import CHECKPOINTS_DIR
from everstep.runtime.process import (
    MemoryKills,
    available_bytes,
    close_descriptors,
    die_with_parent,
    resident_bytes,
    why_ended,
)
from everstep.script.carried_names import Read, Trained, is_run, read_loop
from everstep.script.importing import import_from_script
from everstep.script.loop_values import held, shared
from everstep.script.name_origins import Places
from everstep.script.reachable import Carried, Fact, Survey, loop_frames, of_user, variables
from everstep.script.restarts import (
    TRAINING,
    Finding,
    differing,
    findings,
    left_early,
    read_in_code,
    unpassed,
    with_code,
)
from everstep.script.watched_life import IN_REHEARSAL, LifeNotes, LifeWatch, Noted, epoch_end, noted_of, numbers_in
from everstep.train.task import place_of, where
from everstep.train.view import WorkerView
from everstep.train.worker_link import Deliver, Hello, LoneLink

STEPS, LIMIT_S = 3, 120.0
DIED, LATE, LEFT = "died", "late", "left"
_SIZE = "a.bytes"
"""File with the size of life a, when it has done a step."""
_NEVER = 1 << 40
_WAIT_S = 0.01
_MOST_TEXT = 400
_MOST_OUTPUT = 8_000


@dataclass(frozen=True)
class Rehearsed:
    """The script to rehearse with its arguments (or a task), the folder, and the last step.

    config: of the job, None if the script's own is the only one; said: the job's facts, as in job.json. watch: what is
    noted beside the state.
    """

    script: str
    argv: tuple[str, ...]
    folder: str
    steps: int = STEPS
    config: Config | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    watch: LifeWatch = field(default_factory=LifeWatch)

    def path(self, name: str) -> Path:
        """Path of a file or folder of the rehearsal's own."""
        return Path(self.folder) / name


@dataclass(frozen=True)
class Sighting:
    """Facts that a life has seen at its end. step: its last step. error: why it ended otherwise, "" if it did not;
    known: Everstep itself has refused something, such as this buffer; kind: of the error at this place, `DIED`,
    `LATE` or `LEFT`. total: the job's last step; ends: steps with which something ends, 0 if there is none. numbers:
    values in the loop. unpassed: name and type of a scheduler that `join` was not given. read: facts from the loop's
    code, which was read before the first step.
    """

    step: int = 0
    facts: Mapping[str, Fact] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()
    error: str = ""
    known: bool = False
    buffer: str = ""
    kind: str = ""
    place: tuple[str, int] = ("", 0)
    unpassed: tuple[str, str] | None = None
    read: Read = field(default_factory=Read)
    noted: Noted = field(default_factory=Noted)
    total: int = 0
    ends: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def died(self) -> bool:
        """Its process ended by itself."""
        return self.kind == DIED

    @property
    def late(self) -> bool:
        """It was not through in time."""
        return self.kind == LATE


@dataclass(frozen=True)
class Judgement:
    """Verdict. findings: those that refuse the job first. note: why there was no rehearsal, "" if there was one.
    refused: Everstep's own objection to the script. output: the last printed text, if a life failed. seen: by life
    a."""

    findings: tuple[Finding, ...] = ()
    note: str = ""
    refused: str = ""
    output: str = ""
    seen: Sighting = field(default_factory=Sighting)


@dataclass(frozen=True)
class WatchedLoop:
    """Things to look at in a life. ignored: as in join; roots: names to look at instead of the loop's; unpassed: name
    and type of a scheduler known to be missing; data: dataset and collate; given: the data as join has got them."""

    ignored: tuple[Any, ...] = ()
    roots: Mapping[str, Any] | None = None
    unpassed: tuple[str, str] | None = None
    data: tuple[Any, Any] = (None, None)
    given: Any = None


class LifeLink(LoneLink):
    """Link of a rehearsed life, which has no peers. job, fill_up: as in a launched worker's. launched: there is a
    job's config, which the script's own fills up. joined: the script has called `join`."""

    def __init__(self, what: Rehearsed, life: str) -> None:
        super().__init__(_life_config(what.config or Config()), what.path(life), regular_saves=False)
        self.job = dict(what.said)
        self.launched = what.config is not None
        self.task = "rehearsal"
        self.joined = False
        self.faults = self._at
        self._what = what
        self._life = life
        self._last = _NEVER
        self._asked = False
        self._hand: Deliver | None = None
        self._current: Plan | None = None
        self._followed = WatchedLoop()
        self.read: Read | None = None
        self.watcher = LifeNotes(what.watch, what.path(f"{life}.lines"))

    def fill_up(self, config: Config) -> None:
        """The script has joined. A life that goes on waits for its checkpoint."""
        self.config, self.joined = _life_config(config), True
        if not config.rehearse:
            report(self._what, self._life, Sighting(error="rehearse is false"))
        while self._life == "b" and not self._may_go_on():
            time.sleep(_WAIT_S)
        if self.run_dir is not None:
            self.run_dir.mkdir(exist_ok=True)
            if self._what.watch.origin and self._life != "b":
                shutil.copytree(self._what.watch.origin, self.run_dir / CHECKPOINTS_DIR, copy_function=os.link)

    @property
    def watches(self) -> bool:
        return self.watcher.works

    def computes(self, part: str) -> None:
        self.watcher.computes(part)

    def computed(self, step: int, lane: int, said: LaneSaid) -> None:
        self.watcher.computed(step, lane, said)

    def _may_go_on(self) -> bool:
        """Life b has its checkpoint, and there is room for a life beside life a, or that has ended."""
        if not self._what.path("b").exists():
            return False
        return self._what.path("a.json").exists() or available_bytes() > int(read_given(self._what.path(_SIZE)))

    def follow(self, followed: WatchedLoop) -> None:
        """Set the things to look at: in the code before the first step, and in memory at the end of the last one."""
        self._followed = followed

    def connect(self, hello: Hello, deliver: Deliver, connected: Callable[[], None]) -> None:
        def first(message: wire.AnyMessage) -> None:
            if isinstance(message, wire.PlanNow):
                self._current = message.plan
            deliver(message)

        self._hand = deliver
        super().connect(hello, first, connected)

    def tell(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Saved):
            self._pass_on()
            self._regroup("")
        super().tell(message)

    def turn(self, view: WorkerView, over: bool) -> None:
        """End the rehearsal here if there is no more to do."""
        self._last = min(self._what.steps, view.order.total_steps)
        if self.read is None:
            model = view.stages.only.parts.model
            self.watcher.watch(list(model.parameters()), dict(model.named_buffers()))
        self.watcher.turn(view.step)
        if self.read is None:
            self.read = (
                self._read(view, sys._getframe(1)) if self._life == "a" and self._followed.roots is None else Read()
            )
        if view.step >= self._last or over:
            found = replace(self._look(view, sys._getframe(1)), total=view.order.total_steps)
            if self.watcher.works:
                numbers = numbers_in(loop_frames(sys._getframe(1)))
                every, epochs = view.config.eval_every, view.config.eval_every_epochs
                ends = {"the end of an epoch": epoch_end(view.order), "an evaluation": every}
                ends["the evaluation after an epoch"] = epoch_end(view.order, epochs)
                found = replace(found, numbers=numbers, ends=ends)
            report(self._what, self._life, replace(found, noted=self.watcher.noted()))

    def _at(self, step: int, phase: str, plan: Plan) -> None:
        """Save the step before, which the loop has finished, and from which all later lives go on."""
        if not self._asked and self._life != "b" and phase == "load" and step == max(1, self._last - 2) + 1:
            self._asked = True
            self._regroup("the rehearsal goes on from here")

    def _regroup(self, save: str) -> None:
        if self._hand is not None and self._current is not None:
            self._current = replace(self._current, generation=self._current.generation + 1, save=save)
            self._hand(wire.PlanNow(plan=self._current))

    def _pass_on(self) -> None:
        """Pass the saved checkpoint, and nothing else, to life b."""
        if self._life == "a" and self.run_dir is not None and not self._what.path("b").exists():  # traced: there is one
            write_atomically(self._what.path(_SIZE), str(resident_bytes()))
            whole = self._what.path("b.part")
            shutil.copytree(self.run_dir / CHECKPOINTS_DIR, whole / CHECKPOINTS_DIR, copy_function=os.link)
            whole.rename(self._what.path("b"))

    def _read(self, view: WorkerView, frame: FrameType) -> Read:
        """Read the code of the loop that is about to begin."""
        parts = view.stages.only.parts
        state, (dataset, collate) = held(parts.extras), self._followed.data
        own, data = (parts.model, parts.optimizer, parts.scheduler, state), (dataset, collate)
        trained = Trained(*own, *data, is_run, self._followed.ignored, self._followed.given)
        try:
            return read_loop(loop_frames(frame), trained)
        except Exception as error:  # the user's objects may raise at any look
            return Read(notes=(f"the loop ({type(error).__name__}: {error})",))

    def _look(self, view: WorkerView, frame: FrameType) -> Sighting:
        replica = view.stages.only
        parts = replica.parts
        if view.step < 2:
            return Sighting(view.step, error="it does fewer than two steps")
        if text := shared(parts.extras.values(), parts.model, parts.optimizer):
            return Sighting(view.step, error=text, known=True)
        carried = Carried.of(parts.model, parts.optimizer, parts.scheduler, *held(parts.extras))
        frames = loop_frames(frame)
        scopes = [f.f_locals["self"] for f in frames if "self" in f.f_locals]
        survey = Survey(carried, self._followed.ignored, scopes, [f.f_globals for f in frames])
        survey.look(variables(frames) if self._followed.roots is None else self._followed.roots.items())
        replica.lanes.settle_buffers()
        manifest = replica.state.manifest()
        rows = {f"{TRAINING}: {e[0]}": d for e, d in zip(manifest["entries"], manifest["digests"], strict=True)}
        settings = {k: v for k, v in manifest.get("settings", {}).items() if k != "hyperparameters"}
        values = {**digested(manifest["values"]), "settings": settings}
        rows |= {f"{TRAINING}: {name}": json.dumps(value) for name, value in values.items()}
        facts = {name: Fact(digest, "training", TRAINING, "state", hard=True) for name, digest in rows.items()}
        whole = {**survey.facts, **facts}
        return Sighting(
            view.step,
            whole,
            survey.unseen,
            tuple(carried.shapes),
            unpassed=self._followed.unpassed,
            read=self.read or Read(),
        )


def _life_config(config: Config) -> Config:
    """Config of a life: a worker by itself, which saves on request and reports to nobody."""
    checkpoint = config.checkpoint
    disk = replace(checkpoint.disk, every_steps=_NEVER, every_epochs=None, every_minutes=None, path=None)
    memory = replace(checkpoint.memory, every_steps=None, every_epochs=None, every_minutes=None)
    nowhere = replace(checkpoint.object, every_steps=None, every_epochs=None, every_minutes=None, url=None)
    checkpoint = replace(checkpoint, enabled=True, disk=disk, memory=memory, object=nowhere, best_metric=None)
    device = device_of(config, 0)
    one = replace(config, workers=1, spares=0, min_workers=1, map=None, device=device, sinks=(), checkpoint=checkpoint)
    return replace(one, chaos="", verify_every=0, resume_from=None)


# ---- one life


def report(what: Rehearsed, life: str, found: Sighting) -> None:
    """Write down the facts that this life has seen, and end it: the rest of the script is not done."""
    write_atomically(what.path(f"{life}.json"), json.dumps(asdict(found)), 1)
    os._exit(0)


def live(what: Rehearsed, life: str, body: Callable[[LifeLink], None]) -> None:
    """Live one life in this process, which ends with it. body: loads and runs the script or task."""
    os.environ[IN_REHEARSAL] = life
    os.environ.setdefault("WANDB_MODE", "disabled")
    link = LifeLink(what, life)
    error, known, kind, place, buffer = "", False, "", ("", 0), ""
    faulthandler.enable(2)
    try:
        body(link)
        error, kind = "it ended without calling everstep.join", ""
        if link.joined:
            error, kind = "its loop ended before its last step", LEFT
    except EverstepError as refusal:
        error, known, kind, place = str(refusal), True, type(refusal).__name__, place_of(refusal)
        buffer = refusal.name if isinstance(refusal, BuffersDiffer) else ""
    except SystemExit as leaving:
        error, kind = f"it left with exit code {leaving.code}", DIED
    except BaseException as fault:  # any error of the user's code ends this life, and nothing else
        error, kind, place = f"{type(fault).__name__}: {fault}{where(fault)}", type(fault).__name__, place_of(fault)
    said = " ".join(error.split())[:_MOST_TEXT]
    noted, read = link.watcher.noted(), link.read or Read()
    found = Sighting(error=said, known=known, buffer=buffer, kind=kind, place=place, read=read, noted=noted)
    report(what, life, found)


def run_script(what: Rehearsed) -> None:
    """Run the script as a worker does."""
    sys.argv = [what.script, *what.argv]
    import_from_script(Path(what.script))
    runpy.run_path(what.script, run_name="__main__")


def fork_life(what: Rehearsed, life: str, body: Callable[[LifeLink], None]) -> int:
    """Fork a life from this process, in which no code of the user's has run. Returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            redirect_output(what.path(f"{life}.log"))
            close_descriptors(kept_descriptors())
            with open(1, "w", 1, closefd=False) as out, redirect_stdout(out), redirect_stderr(out):
                live(what, life, body)
        finally:
            os._exit(1)
    return pid


# ---- the rehearsal

Fork = Callable[[Rehearsed, str], int]


class Rehearsal:
    """The rehearsal of a script or task, in this process, which forks one life after the other: no code of the user's
    may have run in it.

    body: loads and runs the script or task. in_turn: one life at a time, if there is room for only one (a GPU). fork:
    begins a life, and returns its pid. deaths: gets each life that has died of itself, whether anybody asks for its
    result or not.
    """

    def __init__(
        self,
        what: Rehearsed,
        body: Callable[[LifeLink], None],
        limit_s: float = LIMIT_S,
        in_turn: bool = False,
        fork: Fork | None = None,
        deaths: list[Sighting] | None = None,
    ) -> None:
        self._what = what
        self._deaths = [] if deaths is None else deaths
        self._fork: Fork = fork or (lambda piece, life: fork_life(piece, life, body))
        self._limit_s = limit_s
        self._in_turn = in_turn
        self._until_s = time.monotonic() + limit_s
        self._kills = MemoryKills()
        self._pids: dict[str, int] = {}
        self.seen: dict[str, Sighting] = {}

    def verdict(self, listed: bool = False) -> Judgement:
        """Run the whole rehearsal. listed: also look into things for which no job is refused."""
        try:
            self.begin("a")
            if not self._in_turn:
                self.begin("b")
            return self._judge(listed)
        finally:
            self.close()

    def begin(self, life: str) -> None:
        """Begin a life, unless it has begun."""
        if life not in self._pids:
            self._pids[life] = self._fork(self._what, life)

    def close(self) -> None:
        for life, pid in self._pids.items():
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:  # it was over
                self._seen(life, status)
        self._pids = {}

    def _judge(self, listed: bool) -> Judgement:
        first = self.result("a")
        places = Places(self._what.script)
        read = [read_in_code(*row) for row in first.read.carried]
        if first.known:
            return Judgement(refused=first.error, seen=first)
        if not first.error and not self._what.path("b").exists():
            return Judgement(note="nothing was saved that a life could go on from", seen=first)
        resumed = first if first.error else self.result("b")
        if read and resumed.error:
            return Judgement(tuple(map(places.of, read)), seen=first)
        if resumed.kind == LEFT and not first.error:
            return Judgement((places.of(left_early(os.path.basename(self._what.script))),), seen=first)
        if resumed.error:
            note = resumed.error if first.error else f"a life that went on from step 1 ended early: {resumed.error}"
            return Judgement(note=note, output=self._output("a" if first.error else "b"), seen=first)
        names = differing(first.facts, resumed.facts)
        harmless = first.read.harmless
        found = findings(first.facts, resumed.facts, names, first.shapes, harmless)
        if any(f.refused or listed for f in with_code(found, read, harmless)):
            again = self.result("c")
            if again.error:
                return Judgement(note=again.error, output=self._output("c"), seen=first)
            names -= differing(first.facts, again.facts)
            found = findings(first.facts, resumed.facts, names, first.shapes, harmless)
        if first.unpassed is not None and first.unpassed[0] not in [f.object for f in found]:
            found = [unpassed(*first.unpassed), *found]
        found = with_code(found, read, harmless)
        return Judgement(tuple(places.of(f) for f in found if f.refused or listed), seen=first)

    def result(self, life: str) -> Sighting:
        """The findings of a life; waits for its end."""
        self.seen[life] = found = self._found(life)
        return found

    def _found(self, life: str) -> Sighting:
        self.begin(life)
        pid = self._pids[life]
        fd = os.pidfd_open(pid)
        try:
            if not readable([fd], max(0.0, self._until_s - time.monotonic())):
                late = f"it was not through with {self._what.steps} steps after {self._limit_s:.3g} s"
                return Sighting(error=late, kind=LATE)
        finally:
            os.close(fd)
        del self._pids[life]
        return self._seen(life, os.waitpid(pid, 0)[1])

    def _seen(self, life: str, status: int) -> Sighting:
        """What a life that is over has reported; otherwise that it has died."""
        try:
            found = _read(self._what.path(f"{life}.json"))
        except (OSError, ValueError, KeyError, TypeError):
            code = os.waitstatus_to_exitcode(status)
            error = f"its process ended ({why_ended(code).reason})"
            if code == -signal.SIGKILL and self._kills.lately(time.monotonic()):
                error = "there was not enough memory for it"
            found = Sighting(error=error, kind=DIED, place=stood_at(self._output(life)))
        if found.died:
            self._deaths.append(found)
        return found

    def _output(self, life: str) -> str:
        """The last text that this life has printed."""
        try:
            return read_given(self._what.path(f"{life}.log"), folders=1).decode(errors="replace")[-_MOST_OUTPUT:]
        except OSError:
            return ""


def stood_at(text: str) -> tuple[str, int]:
    """File and line of the user's code that a process was in when it died, as `faulthandler` has written them."""
    _, there, stack = text.rpartition("Fatal Python error: ")
    rows = re.findall(r'^  File "(.+)", line (\d+) in ', stack, re.MULTILINE) if there else []
    return next(((file, int(line)) for file, line in rows if of_user(file)), ("", 0))


def _read(path: Path) -> Sighting:
    data = read_json(path, folders=1)
    facts = {name: Fact(**fact) for name, fact in data.pop("facts").items()}
    facts = {n: replace(f, shape=None if f.shape is None else tuple(f.shape)) for n, f in facts.items()}
    read = data.pop("read")
    read = Read(tuple(map(tuple, read["carried"])), tuple(read["harmless"]), tuple(read["notes"]))
    noted, place = noted_of(data.pop("noted")), tuple(data.pop("place"))
    shapes = tuple(tuple(s) for s in data.pop("shapes"))
    return Sighting(**{**data, "facts": facts, "shapes": shapes, "read": read, "noted": noted, "place": place})
