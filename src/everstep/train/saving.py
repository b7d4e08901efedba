"""Checkpoints, as a worker takes them and goes on from them: what goes into one, the way of its parts to the job's
leader, the last one, and what can be read of them.

Which are taken and given up is the driver's to say.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import nn

from everstep.base.cause import UNSAID, Cause, Why
from everstep.base.config import inexact, numerics
from everstep.base.errors import CheckpointCorrupt, CollectiveAborted, ConfigError, EverstepError, PartsAway, StoreError
from everstep.base.extents import NONE
from everstep.base.plan import Member
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.interchange import NAMES, names_record
from everstep.checkpoint.manifest import JobIdentity, Manifest, TensorRow
from everstep.checkpoint.manifest_writer import Extent, WriteOutcome
from everstep.checkpoint.names import BEST, manifest_name, step_name
from everstep.checkpoint.part import decode_report
from everstep.checkpoint.pointers import read_pointer_value
from everstep.checkpoint.reader import manifests_of
from everstep.exact.extra_state import is_extra
from everstep.exact.state import ModelState
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.operations import AbandonSave, PartsThere, Save, SaveAsked, SaveEnded
from everstep.protocol.driver.policy import TIERS
from everstep.protocol.driver.records import decode_records, encode
from everstep.protocol.driver.saver import MEMORY_EVERY, SavingRules
from everstep.protocol.step_types import Record
from everstep.runtime.files.host_directory import checkpoints_in
from everstep.runtime.link.peer import PeerConnection
from everstep.train.elastic import AnyOrder
from everstep.train.executor import Unusable
from everstep.train.job_data import POSITION
from everstep.train.loop_state import LoopState
from everstep.train.loop_survey import LoopSurvey
from everstep.train.view import WorkerView
from everstep.train.worker_link import WorkerLink

log = logging.getLogger(__name__)

LOOP, PAST = "loop", "past"
"""Parts of a checkpoint. loop: state of the user's loop, for a loop that enters its body again for this step. past:
the loop was done with the step; state as it was when the body was entered for the next one.
"""
_MODEL = "model/"
_MOST_REPORT_BYTES = 1 << 30
_STATED, _MOST_STATED, _TRIES = 2, 64, 6
_SAY_EVERY_S, _LOOK_S = 10.0, 0.2


@dataclass(frozen=True)
class Whole:
    """Facts of the whole model before it is cut. tensors: its parameters and buffers."""

    tensors: tuple[TensorRow, ...]
    names: bytes

    @staticmethod
    def of(model: nn.Module) -> Whole:
        """Facts of a model that has all its modules."""
        entries = ModelState(model).live_tensors()[0]
        named = [(e.name.removeprefix(_MODEL), e) for e in entries if e.name.startswith(_MODEL)]
        tensors = tuple((name, e.dtype, e.shape) for name, e in named if not is_extra(name))
        return Whole(tensors, names_record(model))


def saving_of(link: WorkerLink, split: bool, order: AnyOrder) -> SavingRules:
    """Rules for this worker's driver. Without a run directory, or with `checkpoint.enabled` false, nothing is taken
    but snapshots in memory."""
    config = link.config
    epochs_over: Callable[[int], int] | None = getattr(order, "epochs_over", None)
    tiers = {f"checkpoint.{name}.every_epochs": getattr(config.checkpoint, name).every_epochs for name in TIERS}
    for name, every in {**tiers, "eval_every_epochs": config.eval_every_epochs}.items():
        if every and epochs_over is None:
            raise ConfigError(f"{name}: expected none, since the order of this job's samples has no epochs: use steps")

    def epoch_ends(number: int) -> int:
        if epochs_over is None or not link.regular_saves or number == order.total_steps:
            return 0  # after the last step another rule saves
        return epochs_over(number)

    on = link.run_dir is not None and bool(link.task) and config.checkpoint.enabled
    every = MEMORY_EVERY if split else 0
    return SavingRules(config.checkpoint, on, every, config.eval_every, epoch_ends, config.eval_every_epochs)


class PartSaver:
    """One worker's checkpoints. checkpointer: None if the job takes none."""

    def __init__(self, view: WorkerView, whole: Whole, loop: LoopState, note: Callable[[object], None]) -> None:
        """note: has the driver know something; from any thread."""
        self.checkpointer: Checkpointer | None = None
        self._view = view
        self._whole = whole
        self._loop = loop
        self._note = note
        self._saving = view.driver.config.saving
        self._leaders: dict[int, Member] = {}
        self._prepared = False
        self._begun = 0
        link = view.link
        if self._saving.on and link.run_dir is not None:
            created = link.job.get("created_unix_ns")  # names this job, and no other one of the same kind
            job = "" if created is None else f"{int(created):x}"
            self.checkpointer = Checkpointer(
                checkpoints_in(link.top or link.run_dir),
                self._saving.rule,
                JobIdentity(link.task, numerics(view.config), whole.tensors, job, view.kernels),
                view.me,
                send=self._send,
                events=self._told,
                collected=lambda number: note(PartsThere(number)),
                ended=self._ended,
                proven=view.driver.proven,
                opened=link.checkpoints_at,
                inexact=inexact(view.config),
            )

    @property
    def on(self) -> bool:
        """Whether checkpoints are taken."""
        return self.checkpointer is not None

    def watch(self, survey: LoopSurvey) -> None:
        """Look, with each checkpoint, at what the loop has changed."""
        self._loop.watch(survey)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            Save: self.save,
            AbandonSave: self.abandon,
            do.Invalidate: self.invalidate,
            do.Skipped: self.skip,
        }

    # ---- taking one

    def prepare(self) -> None:
        """Find out once what the state consists of, now that the optimizer has its part."""
        if self.checkpointer is not None and not self._prepared:
            self._prepared = True
            for replica in self._view.stages.values():
                replica.state.live_tensors()

    def save(self, effect: Save) -> None:
        """Begin one of the state as it is."""
        view, checkpointer, plan, number = self._view, self.checkpointer, effect.plan, effect.step
        if checkpointer is None:
            return
        if effect.boundary and self.has(number):
            if view.is_main:
                self._note(SaveEnded(number, True, effect.due.reason, self.where(number)))
            return
        if effect.boundary and not effect.past and (moved := self._loop.moves.midway()):
            text = f"the loop has changed {moved} before this; a worker that is resumed would do so twice"
            self._note(SaveEnded(number, False, text))
            return
        self._begun = 0 if effect.past else number
        said = view.position.encoded(number)
        parts = {**self._loop_part(effect), NAMES: self._whole.names, **({POSITION: said} if said else {})}
        if effect.boundary:
            for replica in view.stages.values():
                replica.lanes.settle_buffers()
        states = {stage: view.stages[stage].state for stage in plan.stages_of(view.me)}
        self._leaders = {**dict(list(self._leaders.items())[-3:]), number: plan.member(plan.leader(0))}
        survey = self._loop.survey
        if survey is not None:
            survey.begin(sys._getframe())
        late = survey.record if survey is not None else dict
        extent = Extent(number, effect.due, encode(effect.records), parts, effect.metrics, late)
        held = view.driver.machine.held
        checkpointer.start(extent, states, plan, {stage: held.get(stage, NONE) for stage in states})

    def _loop_part(self, effect: Save) -> dict[str, bytes]:
        if effect.past:
            return {PAST: self._loop.entered(effect.step + 1)}
        told = self._loop.told(effect.step) if effect.boundary or self._loop.entered(effect.step) else b""
        return {LOOP: told} if told else {}

    def before_update(self, tick: Callable[[], None] | None = None) -> None:
        """Before anything changes the state. tick: as for `Checkpointer.before_update`."""
        if self.checkpointer is not None:
            self.checkpointer.before_update(tick)

    def distrust(self, number: int) -> None:
        """Discard the checkpoint of this step if it was begun here, in its round: it may mix two states."""
        if self.checkpointer is not None and self._begun == number:
            self.checkpointer.invalidate(number - 1, with_objects=self._view.is_main)

    def abandon(self, effect: AbandonSave) -> None:
        """The one that is incomplete will never be complete."""
        if self.checkpointer is not None:
            if effect.plan is not None:
                self.before_update()
            self.checkpointer.abandon(effect.why, effect.plan)

    def invalidate(self, effect: do.Invalidate) -> None:
        """Checkpoints of later steps hold a state that counts for nothing: none is read, or completed, any more."""
        if self.checkpointer is not None:
            self.before_update()
            self.checkpointer.invalidate(effect.sound, with_objects=effect.first)

    def skip(self, effect: do.Skipped) -> None:
        """A tier takes nothing of a step."""
        if self.checkpointer is not None:
            self.checkpointer.skip(effect.tier, effect.step, effect.why, effect.tell)

    def close(self) -> None:
        """The worker ends."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    # ---- reports of parts, events, ends

    def _send(self, data: bytes) -> None:
        """In a part's thread: send to the worker that was the job's leader when the checkpoint began."""
        main = self._leaders.get(decode_report(data).step)
        if main is None:
            return
        with closing(self._view.link.call_peer(main.address, {"kind": "part"})) as connection:
            connection.send_bytes([data])
            connection.recv_json()

    def take_report(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a handler thread: a part of another worker."""
        data = bytes(connection.recv_bytes(_MOST_REPORT_BYTES))
        if self.checkpointer is not None:
            self.checkpointer.report(data)
        connection.send_json({"kind": "taken"})

    def _told(self, kind: str, fields: dict[str, Any]) -> None:
        """In one of several threads: something that happened to a checkpoint."""
        self._view.publisher.emit(kind, **{"generation": self._view.driver.machine.generation, **fields})

    def _ended(self, outcome: WriteOutcome) -> None:
        """In the job's leader's thread for manifests."""
        number = outcome.step
        if outcome.manifest is None:
            self._note(SaveEnded(number, False, (outcome.failed or UNSAID).reason, differs=outcome.differs))
        else:
            self._note(SaveEnded(number, True, outcome.why.reason, self.where(number), outcome.cost_s))

    def where(self, number: int) -> str:
        """Path of the checkpoint of a step."""
        store = self.checkpointer.store if self.checkpointer is not None else None
        return f"{store.path}/{step_name(number)}" if store is not None else ""

    def has(self, number: int) -> bool:
        """Whether the checkpoint of a step is on disk. Hosts that do not answer are asked only if it is not here."""
        try:
            return self.checkpointer is not None and self.checkpointer.store.size(manifest_name(number)) > 0
        except StoreError:
            return False

    # ---- evaluations

    def question(self, metrics: Mapping[str, float]) -> SaveAsked | None:
        """Ask for the driver after an evaluation, by all workers. Raises: ConfigError if it lacks the metric."""
        name = self._saving.rule.best_metric
        if self.checkpointer is None or not self._saving.judges or name is None:
            return None
        if name not in metrics and not self._saving.evaluates:
            return None  # a script may evaluate several things
        if name not in metrics:
            raise ConfigError(
                f"checkpoint.best_metric: expected one of the task's metrics ({', '.join(metrics)}), got {name!r}"
            )
        stored = None
        if self._view.is_main:
            with suppress(EverstepError):
                stored = read_pointer_value(self.checkpointer.store, BEST)
        return SaveAsked(metrics, stored)


@dataclass
class LastCheckpoint:
    """The checkpoint before the end of a worker's part in a job, because a plan asks for it or all steps are done:
    no worker goes on before it is durable, or its time is over."""

    _view: WorkerView
    _saver: PartSaver

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {do.SaveLast: self.save, do.Linger: self.linger}

    def save(self, operation: do.SaveLast) -> str:
        """A plan asks for one; returns where that of the step is, empty if there is none.

        Raises: CollectiveAborted if there is none because its generation is over.
        """
        saver, number = self._saver, operation.step
        there = saver.has(number)
        self._take(operation, uploads=True)
        self._await_manifest(operation)
        if there or saver.has(number):
            return saver.where(number)
        self._refuse_if_over(operation)
        return ""

    def linger(self, operation: do.Linger) -> None:
        """For as long as the checkpoint before might have taken; or until this worker's host ends the job.

        Raises: CollectiveAborted once the generation is over.
        """
        view, deadline = self._view, time.monotonic() + self._view.config.checkpoint.grace_s
        while not (view.cutter.over(operation.generation) or view.link.row.end_asked) and time.monotonic() < deadline:
            view.tick()
            time.sleep(0.005)
        self._refuse_if_over(operation)

    def _refuse_if_over(self, operation: do.Operation) -> None:
        if self._view.cutter.over(operation.generation):
            raise CollectiveAborted(f"generation {operation.generation} is over")

    def _await_manifest(self, operation: do.SaveLast) -> None:
        """Wait for the manifest: a worker that leaves before would make the others doubt that it can be completed."""
        view, deadline = self._view, time.monotonic() + self._view.config.checkpoint.grace_s
        while not (view.is_main or view.cutter.over(operation.generation) or self._saver.has(operation.step)):
            if operation.save is None or time.monotonic() >= deadline:
                return
            view.tick()
            time.sleep(0.02)

    def at_end(self, operation: do.Finish) -> None:
        """After the last step, in all workers: save it, and wait for checkpoints that are being written."""
        self._take(operation, uploads=self._view.is_main)

    def _take(self, operation: do.SaveLast | do.Finish, *, uploads: bool) -> None:
        """Begin when earlier checkpoints are on disk: a worker writes parts of one checkpoint at a time."""
        generation, now_s = operation.generation, time.monotonic()
        grace_s = self._view.config.checkpoint.grace_s
        self._wait(generation, now_s + grace_s / 2, uploads=False)
        if operation.save is not None:
            self._saver.save(operation.save)
        self._wait(generation, now_s + grace_s, uploads=uploads)

    def _wait(self, generation: int, deadline: float, *, uploads: bool) -> None:
        """Until what began is durable; not longer than the generation."""
        view, checkpointer = self._view, self._saver.checkpointer
        while checkpointer is not None and time.monotonic() < deadline and not view.cutter.over(generation):
            if checkpointer.drain(0.005) and not (uploads and checkpointer.uploading):
                return
            view.tick()


@dataclass
class Restorer:
    """One worker's reading of checkpoints: those that it can resume from, and their contents.

    checkpointer: None if the job takes none.
    """

    _view: WorkerView
    _checkpointer: Checkpointer | None
    _steps: tuple[int, ...] = ()
    _most: int = 0
    _from: int = 0
    _tries: int = 0

    def restorable(self, limit: int | None) -> tuple[int, ...]:
        """The newest steps, up to the limit if there is one, that can be read from disk here; if some are on hosts that
        are not there, wait for these. Each look before it has trained from there names twice as many: members that
        cannot read the newest ones name older ones, and all need one in common.

        Raises: ConfigError if the checkpoints are of another job, or on hosts that do not come.
        """
        if self._checkpointer is None:
            return ()
        checkpointer = self._checkpointer
        view, began_s, said_s = self._view, time.monotonic(), -inf
        untrained = view.step == self._from
        self._most = min(2 * self._most, _MOST_STATED) if self._most and untrained else _STATED
        self._tries = self._tries if untrained else 0
        wait_s, expected = view.config.quorum_wait_s, int(view.link.job.get("resumes_at", 0))
        while True:
            try:
                self._steps = checkpointer.restorable(verify=False, most=self._most, limit=limit, expected=expected)
                return self._steps
            except PartsAway as away:
                now_s = time.monotonic()
                if now_s - began_s > wait_s:
                    raise ConfigError(
                        f"{away}, which has not joined for {wait_s:g} s: start an agent there, in its own directory"
                    ) from None
                if now_s - said_s > _SAY_EVERY_S and view.is_main:
                    said_s = now_s
                    reason = f"{away}: waiting for it to join"
                    generation = view.driver.machine.generation
                    view.publisher.emit("waiting", cause=away.cause, reason=reason, generation=generation)
            view.tick()
            time.sleep(_LOOK_S)

    def refuse_to_start_over(self) -> None:
        """Before step 0 is taken.

        Raises: ConfigError if checkpoints may be there, and could not be read here, or not by others. Unusable while a
        split model's members may still find one that all can read.
        """
        error = self._checkpointer.unreadable if self._checkpointer is not None else None
        newest, view = max(self._steps, default=0), self._view
        if error is None and newest:
            error = f"worker {view.me} can read the checkpoint of step {newest}, but not all others can read one"
            if view.stages.split and self._tries < _TRIES:  # a member that knows why says it meanwhile
                self._tries += 1
                raise Unusable(Why(Cause.DISK, error), torn=False)
        if error is not None:
            raise ConfigError(
                f"no worker holds the training state, and {error}: make it readable and run the job again, or start "
                "over with --fresh"
            )

    def data_position(self, limit: int) -> tuple[int, bytes] | None:
        """The newest step, up to the limit, whose checkpoint says which data it was trained on, and its words."""
        if self._checkpointer is None:
            return None
        with suppress(StoreError):
            for manifest in manifests_of(self._checkpointer.store):
                if manifest.step <= limit and POSITION in manifest.application:
                    return manifest.step, manifest.application[POSITION]
        return None

    def restore(self, number: int, stages: Sequence[int]) -> Manifest:
        """Give these stages what the checkpoint of a step says. If it cannot be read, nothing has changed.

        Raises: Unusable then, or, torn, if an unsplit model has been overwritten in part.
        """
        view, checkpointer = self._view, self._checkpointer
        trained = view.step > 0
        # The life before may have ended because an unsplit model was overwritten in part: this one looks before.
        twice = trained or (view.driver.machine.me.incarnation > 0 and not view.stages.split)
        written: list[int] = []
        replicas = [view.stages[stage] for stage in stages]

        def ready() -> None:
            written.extend(() if trained else stages)
            for replica in replicas:  # before, for it puts the buffers of the step under way back
                replica.abandon()
                replica.prove_update()

        states = {stage: replica.state for stage, replica in zip(stages, replicas, strict=True)}
        try:
            if checkpointer is None:
                raise StoreError("checkpoint.enabled is false")
            manifest = checkpointer.load(number, states, ready=ready, twice=twice, tick=view.tick)
        except (CheckpointCorrupt, StoreError) as error:
            torn = bool(written) and not view.stages.split
            if not torn:
                for stage in written:
                    view.stages.rebuild(stage)
            why = Why(error.cause, f"the checkpoint of step {number} cannot be used: {error}")
            raise Unusable(why, torn) from error
        self._from = number
        if view.is_main:
            self._say_kernels(manifest)
        return manifest

    def _say_kernels(self, manifest: Manifest) -> None:
        """Unless the checkpoint is known to be of the kernels that this job computes with."""
        there, view = manifest.numerics, self._view
        how = "does not say which kernels computed it, so the kernels here may give other bits"
        if there is not None:
            how = f"is of kernels that give {view.kernels.unlike(there, 'it')}: the result is no longer exact"
        if there is None or there.fingerprint != view.kernels.fingerprint:
            reason, step = f"the checkpoint of step {manifest.step} {how}", manifest.step
            view.publisher.emit("warning", step=step, cause=Cause.NONDETERMINISTIC, reason=reason)

    @staticmethod
    def records_of(restored: Manifest) -> dict[int, Record]:
        """The records of the step's decision; plans that they were prepared for are long gone."""
        if not restored.records:
            return {}
        return {w: Record(0, r.payload) for w, r in decode_records(restored.records).items()}
