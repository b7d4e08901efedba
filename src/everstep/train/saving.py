"""Checkpoints, as a worker takes and uses them: when all begin one, what goes into it, how a job goes on from it.

The main decides what is due and says so in its agree record, so that all workers begin the same one right after that
step. At a boundary that all have come to (an evaluation, the end, a plan that says so) they begin one without that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import nn

from everstep.base.cause import Cause, Why
from everstep.base.config import numerics
from everstep.base.errors import CheckpointCorrupt, ConfigError, EverstepError, StoreError
from everstep.base.plan import Member, Plan
from everstep.checkpoint.checkpointer import Checkpointer, Extent, Restored
from everstep.checkpoint.interchange import NAMES, names_record
from everstep.checkpoint.manifest import Identity, TensorRow
from everstep.checkpoint.names import BEST, step_name
from everstep.checkpoint.part import decode_report
from everstep.checkpoint.pointers import read_pointer_value
from everstep.checkpoint.reader import steps_in
from everstep.exact.state import ModelState
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.policy import Due, Tier
from everstep.protocol.driver.records import Outcome, decode_records, encode_records
from everstep.protocol.step_types import Key, Record
from everstep.runtime.address import CHECKPOINTS_DIR
from everstep.runtime.peer import PeerConnection, peer_connect
from everstep.train.executor import Unusable
from everstep.train.heal import pack_state, unpack_state
from everstep.train.stages import Stages
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)

_AUTOMATIC_EVERY = 10
"""Steps between snapshots in memory of a split job whose config says nothing: five steps are done again on average, and
copying a stage to one other worker takes a small part of ten steps."""
LOOP, PAST = "loop", "past"
"""Parts of a checkpoint: the state of the user's loop as it was right after the update, where the checkpoint was taken
later; and that the loop was through with the step."""
_MODEL = "model/"
_MOST_REPORT_BYTES = 1 << 30
_STATED = 2


@dataclass(frozen=True)
class Whole:
    """What is to be known of the whole model before it is cut. tensors: its parameters and buffers."""

    tensors: tuple[TensorRow, ...]
    names: bytes

    @staticmethod
    def of(model: nn.Module) -> Whole:
        """Of a model that has all its modules."""
        entries = ModelState(model).live_tensors()[0]
        tensors = tuple((e.name.removeprefix(_MODEL), e.dtype, e.shape) for e in entries if e.name.startswith(_MODEL))
        return Whole(tensors, names_record(model))


class LoopState:
    """The small state of the user's loop, as it was at moments to which somebody may have to go back."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._initial = b"" if stages.split else pack_state(stages.only.application)
        self._after = (-1, b"")

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """What it does for the driver."""
        return {do.RememberLoop: self.remember}

    def remember(self, effect: do.RememberLoop) -> None:
        """The loop is about to learn something: whoever goes back to this step must not know it yet."""
        if self._after[0] != effect.step:
            self._after = (effect.step, pack_state(self._stages.any.application))

    def after(self, number: int) -> bytes:
        """As it was right after this step's update, if it may have gone on since; else empty."""
        return self._after[1] if self._after[0] == number else b""

    def went_back(self, number: int) -> None:
        """The state is that of this step: the loop goes on from there."""
        state = self.after(number) if number else self._initial
        if state:
            unpack_state(self._stages.any.application, state)
        self._after = (-1, b"")


class Saver:
    """One worker's checkpoints. Without a run directory, or with `checkpoint.enabled` false, it does nothing."""

    def __init__(self, view: WorkerView, whole: Whole | None, loop: LoopState, job: str) -> None:
        """job: names this job, and no other one of the same kind."""
        self._view = view
        self._whole = whole
        self._loop = loop
        self._checkpointer: Checkpointer | None = None
        self._config = view.config.checkpoint
        self._due: tuple[int, Due] = (0, Due())
        self._asked: list[Why] = []
        self._answering = 0
        self._mains: dict[int, Member] = {}
        self._plan: Plan | None = None
        self._begun = 0
        self._refused: set[int] = set()
        self._best: float | None = None
        self._deferred: Why | None = None
        self._prepared = False
        link = view.link
        if link.run_dir is not None and link.task and self._config.enabled and whole is not None:
            self._checkpointer = Checkpointer(
                link.run_dir / CHECKPOINTS_DIR,
                self._config,
                Identity(link.task, numerics(view.config), whole.tensors, job),
                view.me,
                send=self._send,
                events=self._told,
                memory_every=_AUTOMATIC_EVERY if view.stages.split else 0,
                proven=view.driver.proven,
            )

    @property
    def on(self) -> bool:
        """Whether checkpoints are taken."""
        return self._checkpointer is not None

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """What it does for the driver."""
        return {
            do.SaveLast: self.last,
            do.Linger: self.linger,
            do.Condemn: self.condemn,
            do.Skipped: self.not_kept,
        }

    # ---- when

    def request(self, why: Why) -> None:
        """From any thread: one more, after the present step; its end is told to the coordinator."""
        if self._checkpointer is None:
            self._answer(0, False, reason="checkpoint.enabled is false: this job takes none")
            return
        self._asked.append(why)
        self._checkpointer.request(why)

    def wanted(self, number: int) -> Due:
        """For the agree record of a step: what is due after it, if this is the main."""
        view, checkpointer = self._view, self._checkpointer
        if not view.is_main:
            return Due()
        if checkpointer is None:  # snapshots in memory are what makes up for a pool that is lost
            every = self._config.memory.every_steps or _AUTOMATIC_EVERY
            return Due(("memory",), f"every {every} steps") if view.stages.split and number % every == 0 else Due()
        if self._due[0] != number:
            asked = bool(self._asked)
            ended = number < view.order.total_steps and self._epoch_ends(number)
            now_s = time.monotonic()
            due = checkpointer.due(number, now_s, epoch_end=ended and checkpointer.affordable(now_s))
            if asked and not checkpointer.schedule.wanted:
                self._asked, self._answering = [], number
            if due and self._judges(number):
                self._deferred = Why(due.cause, due.reason)
                due = replace(due, tiers=tuple(t for t in due.tiers if t == "memory"))
            self._due = (number, due)
        return self._due[1]

    def _judges(self, number: int) -> bool:
        """Whether there is an evaluation after this step that says how good it is: a checkpoint waits for that."""
        every, rule = self._view.config.eval_every, self._config
        named = rule.best_metric is not None and bool(rule.disk.keep_best or rule.object.keep_best)
        return named and bool(every) and number % every == 0

    def _epoch_ends(self, number: int) -> bool:
        epoch_of = getattr(self._view.order, "epoch_of", None)
        return epoch_of is not None and epoch_of(number + 1) != epoch_of(number)

    # ---- taking one

    def after_update(self, outcome: Outcome, records: Mapping[int, Record]) -> None:
        """The state is that of this step, and the user's loop has not gone on yet."""
        tiers = tuple(t for t in outcome.save[0] if t != "memory")
        if self._checkpointer is None:
            return
        if not self._prepared:
            self._prepared = True  # what the state consists of is found out once, now that the optimizer has its part
            for replica in self._view.stages.values():
                replica.state.live_tensors()
        if tiers and self._view.driver.machine.settled:
            due = Due(tiers, outcome.save[1], outcome.save_cause)  # type: ignore[arg-type]
            self._start(outcome.step, due, records, {})

    def here(self, why: Why, metrics: Mapping[str, float] | None = None) -> bool:
        """Take one of the state as it is, in which all members are; each of them calls this. False: not now."""
        view, number = self._view, self._view.step
        if self._checkpointer is None or not number or not view.driver.machine.settled or view.ended:
            return False
        if self._begun == number or number in self._steps():
            return True
        for replica in view.stages.values():
            replica.settle_buffers()
        application = {PAST: b""} if view.driver.asked > number else {}
        after = self._loop.after(number)
        if after and not application:
            application = {LOOP: after}
        tiers: tuple[Tier, ...] = ("disk", "object") if self._config.object.url else ("disk",)
        self._start(number, Due(tiers, why.reason, why.cause), self._records(number), application, metrics)
        return True

    def _records(self, number: int) -> Mapping[int, Record]:
        driver = self._view.driver
        return driver.gathered.get(Key(number, 0)) or (driver.machine.records if not driver.position.seq else {})

    def _steps(self) -> list[int]:
        try:
            return steps_in(self._checkpointer.store) if self._checkpointer is not None else []
        except StoreError:
            return []

    def _start(
        self,
        number: int,
        due: Due,
        records: Mapping[int, Record],
        application: Mapping[str, bytes],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        checkpointer, plan = self._checkpointer, self._view.plan
        if checkpointer is None or plan is None:
            return
        states = {stage: self._view.stages[stage].state for stage in plan.stages_of(self._view.me)}
        self._mains = {**dict(list(self._mains.items())[-3:]), number: plan.member(plan.leader(0))}
        self._plan, self._begun = plan, number
        parts = {**application, **({NAMES: self._whole.names} if self._whole is not None else {})}
        checkpointer.start(Extent(number, due, encode_records(records), parts, metrics), states, plan)

    def before_update(self) -> None:
        """Before anything changes the state."""
        if self._checkpointer is not None:
            self._checkpointer.before_update()

    def regroup(self, plan: Plan) -> None:
        """Another generation: one in progress can still be completed if its writers and its main are all there."""
        before, checkpointer = self._plan, self._checkpointer
        if checkpointer is None or before is None:
            return
        gone = [m.worker_id for m in before.members if not plan.has(m.key)]
        if not gone and plan.leader(0) == before.leader(0):
            return
        if gone:
            checkpointer.failure_seen()
        checkpointer.before_update()
        checkpointer.regroup(plan, f"worker {', '.join(map(str, gone))} left" if gone else "the leader changed")
        self._plan, self._begun = None, 0

    # ---- reports of parts, events, answers

    def _send(self, data: bytes) -> None:
        """In a part's thread: to whoever was the main when the checkpoint began."""
        main = self._mains.get(decode_report(data).step)
        if main is None:
            return
        connection = peer_connect(main.address, self._view.link.token, {"kind": "part"})
        try:
            connection.send_bytes([data])
            connection.recv_json()
        finally:
            connection.close()

    def take_report(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a handler thread: a part of another worker."""
        data = bytes(connection.recv_bytes(_MOST_REPORT_BYTES))
        if self._checkpointer is not None:
            self._checkpointer.report(data)
        connection.send_json({"kind": "taken"})

    def _told(self, kind: str, fields: dict[str, Any]) -> None:
        """In one of several threads: something that happened to a checkpoint."""
        generation = self._view.driver.generation
        self._view.publisher.emit(kind, **{"generation": generation, **fields})
        if fields.get("tier") == "disk" and fields.get("step") == self._answering != 0:
            self._answering = 0
            step, done = int(fields["step"]), kind == "checkpoint_completed"
            self._answer(step, done, self.where(step) if done else "", str(fields.get("reason") or ""))

    def where(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        store = self._checkpointer.store if self._checkpointer is not None else None
        return f"{store.path}/{step_name(step)}" if store is not None else ""

    def _answer(self, step: int, done: bool, where: str = "", reason: str = "") -> None:
        self._view.link.tell(self._saved(step, done, where, reason))

    def _saved(self, step: int, done: bool, where: str, reason: str) -> wire.Saved:
        me = self._view.link.me
        return wire.Saved(
            worker_id=me.worker_id, incarnation=me.incarnation, step=step, ok=done, where=where, reason=reason
        )

    def condemn(self, effect: do.Condemn) -> None:
        """Checkpoints of later steps hold a state that counts for nothing: none is read, or completed, any more."""
        if self._checkpointer is not None:
            self.before_update()
            self._checkpointer.condemn(effect.sound, with_objects=effect.first)
        self._plan, self._begun, self._best, self._deferred = None, 0, None, None

    # ---- evaluations

    def evaluated(self, metrics: Mapping[str, float], gather: Callable[[bytes], Mapping[int, bytes]]) -> None:
        """After an evaluation, by all: if it is the best so far, the main says so and all take a checkpoint."""
        name, rule = self._config.best_metric, self._config
        if self._checkpointer is None or name is None or not (rule.disk.keep_best or rule.object.keep_best):
            return
        if name not in metrics and not self._view.config.eval_every:
            return  # a script may evaluate several things
        if name not in metrics:
            raise ConfigError(
                f"checkpoint.best_metric: expected one of the task's metrics ({', '.join(metrics)}), got {name!r}"
            )
        value = metrics[name] if rule.best_mode == "max" else -metrics[name]
        why: Why | None = None
        if self._view.is_main:
            best = self._best if self._best is not None else self._stored_best()
            if best is None or value > best:
                why, self._best = Why(Cause.SCHEDULED, "the best so far"), value
            else:
                why = self._deferred
            self._deferred = None
        told = gather(b"" if why is None else msgspec.json.encode(why))
        said = next((data for _, data in sorted(told.items()) if data), b"")
        if said:
            self.here(msgspec.json.decode(said, type=Why), metrics)

    def _stored_best(self) -> float | None:
        if self._checkpointer is None:
            return None
        try:
            value = read_pointer_value(self._checkpointer.store, BEST)
        except EverstepError:
            return None
        return value if value is None or self._config.best_mode == "max" else -value

    # ---- the end

    def last(self, operation: do.SaveLast) -> wire.Saved | None:
        """This plan asks for a checkpoint before the job ends: take it, and say where it is."""
        view, number = self._view, operation.step
        if self._checkpointer is None:
            return None
        there = number in self._steps()
        plan = operation.plan
        taken = self._finally(operation.generation, Why(plan.cause, plan.save), uploads=True)
        if not view.is_main:
            return None
        done = taken and (there or number in self._steps())
        why = "" if done else "nothing was trained yet" if not number else "it could not be completed"
        return self._saved(number, done, self.where(number) if done else "", why)

    def linger(self, operation: do.Linger) -> None:
        """Until the generation is over, or for as long as the checkpoint before might have taken."""
        deadline = time.monotonic() + self._config.grace_s
        while not self._view.cutter.over(operation.generation) and time.monotonic() < deadline:
            self._view.tick()
            time.sleep(0.005)

    def at_end(self, generation: int) -> None:
        """After the last step, in all workers: leave a checkpoint of it, and wait for what is being written."""
        self._finally(generation, Why(Cause.COMPLETED, "the end of the job"), uploads=self._view.is_main)

    def _finally(self, generation: int, why: Why, *, uploads: bool) -> bool:
        """`here`, once those that began before are on disk, as nobody writes parts of two at a time; returns when it is
        durable, or its time is over."""
        now_s, grace_s = time.monotonic(), self._config.grace_s
        self._wait(generation, now_s + grace_s / 2, uploads=False)
        taken = self.here(why)
        if taken:
            self._wait(generation, now_s + grace_s, uploads=uploads)
        return taken

    def _wait(self, generation: int, deadline: float, *, uploads: bool) -> None:
        """Until what began is durable; not longer than the generation."""
        view, checkpointer = self._view, self._checkpointer
        while checkpointer is not None and time.monotonic() < deadline and not view.cutter.over(generation):
            if checkpointer.drain(0.005) and not (uploads and checkpointer.uploading):
                return
            view.tick()

    def not_kept(self, effect: do.Skipped) -> None:
        """The memory tier has skipped a step."""
        if self._checkpointer is not None:
            self._checkpointer.skip("memory", effect.step, effect.why, effect.tell)

    def close(self) -> None:
        """The worker ends."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    # ---- going on from one

    def restorable(self, limit: int | None) -> tuple[int, ...]:
        """The newest steps, up to the limit if there is one, that can be read from disk here.

        Raises: ConfigError if the checkpoints are of another job.
        """
        if self._checkpointer is None:
            return ()
        found = self._checkpointer.restorable(verify=False, most=_STATED, limit=limit)
        return tuple(s for s in found if s not in self._refused)

    def restore(self, number: int, stages: Sequence[int]) -> Restored:
        """Give these stages what the checkpoint of a step says. If it cannot be read, nothing has changed.

        Raises: Unusable then, or, torn, if an unsplit model has been overwritten in part.
        """
        view, checkpointer = self._view, self._checkpointer
        trained = view.step > 0
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
            restored = checkpointer.load(number, states, ready=ready, twice=trained)
        except (CheckpointCorrupt, StoreError) as error:
            self._refused.add(number)
            torn = bool(written) and not view.stages.split
            if not torn:
                for stage in written:
                    view.stages.rebuild(stage)
            why = Why(error.cause, f"the checkpoint of step {number} cannot be used: {error}")
            raise Unusable(why, torn) from error
        self._begun = number
        return restored

    @staticmethod
    def records_of(restored: Restored) -> dict[int, Record]:
        """The records of the step's decision; plans that they were prepared for are long gone."""
        if not restored.records:
            return {}
        return {w: Record(0, r.payload) for w, r in decode_records(restored.records).items()}
