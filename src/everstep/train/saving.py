"""Checkpoints, as the session takes and uses them: when all begin one, what goes into it, how a job goes on from it.

The main decides what is due and says so in its agree record, so that all workers begin the same one right after that
step. At a boundary that all have come to (an evaluation, the end, a plan that says so) they begin one without that.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from everstep.base.config import numerics
from everstep.base.errors import CheckpointCorrupt, CollectiveAborted, ConfigError, EverstepError, Evicted, StoreError
from everstep.base.plan import Member, Plan
from everstep.checkpoint.checkpointer import Checkpointer, Extent, Restored
from everstep.checkpoint.interchange import NAMES, names_record
from everstep.checkpoint.manifest import Identity, TensorRow
from everstep.checkpoint.names import BEST, step_name
from everstep.checkpoint.part import decode_report
from everstep.checkpoint.pointers import read_pointer_value
from everstep.checkpoint.policy import Due, Tier
from everstep.checkpoint.reader import steps_in
from everstep.exact.state import ModelState
from everstep.protocol import messages as wire
from everstep.protocol.driver.records import Outcome, decode_records, encode_records
from everstep.protocol.step_machine import Phase
from everstep.protocol.step_types import Key, Record
from everstep.runtime.address import CHECKPOINTS_DIR, JOB_FILE
from everstep.runtime.peer import PeerConnection, peer_connect

if TYPE_CHECKING:
    from everstep.train.session import Session

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


class Saver:
    """One worker's checkpoints. Without a run directory, or with `checkpoint.enabled` false, it does nothing."""

    def __init__(self, session: Session, whole: Whole | None) -> None:
        self._session = session
        self._whole = whole
        self._checkpointer: Checkpointer | None = None
        self._config = session.config.checkpoint
        self._due: tuple[int, Due] = (0, Due())
        self._asked: list[str] = []
        self._answering = 0
        self._mains: dict[int, Member] = {}
        self._plan: Plan | None = None
        self._begun = 0
        self._refused: set[int] = set()
        self._best: float | None = None
        self._deferred = ""
        self._prepared = False
        link, job = session.link, self._job()
        self.begins_after = int(job.get("begins_after", 0))
        if link.run_dir is not None and link.task and self._config.enabled and whole is not None:
            name = f"{int(job['created_unix_ns']):x}" if "created_unix_ns" in job else ""
            self._checkpointer = Checkpointer(
                link.run_dir / CHECKPOINTS_DIR,
                self._config,
                Identity(link.task, numerics(session.config), whole.tensors, name),
                link.me.worker_id,
                send=self._send,
                events=self._told,
                memory_every=_AUTOMATIC_EVERY if session.stages.split else 0,
                proven=self.proven,
            )

    def _job(self) -> dict[str, Any]:
        """What job.json says; nothing where there is none."""
        run_dir = self._session.link.run_dir
        if run_dir is None or not (run_dir / JOB_FILE).exists():
            return {}
        try:
            return dict(json.loads((run_dir / JOB_FILE).read_text()))
        except (OSError, ValueError):
            log.warning("%s cannot be read: checkpoints do not say which job they are of", JOB_FILE)
            return {}

    def proven(self, number: int) -> int:
        """After so many steps: the newest one whose state has been compared among the workers, and was alike."""
        every = self._session.config.verify_every
        return max(0, number // every * every - 1 if every else 0, self.begins_after)

    @property
    def on(self) -> bool:
        """Whether checkpoints are taken."""
        return self._checkpointer is not None

    # ---- when

    def request(self, reason: str) -> None:
        """From any thread: one more, after the present step; its end is told to the coordinator."""
        if self._checkpointer is None:
            self._answer(0, False, reason="checkpoint.enabled is false: this job takes none")
            return
        self._asked.append(reason)
        self._checkpointer.request(reason)

    def wanted(self, number: int) -> tuple[tuple[str, ...], str]:
        """For the agree record of a step: what is due after it, if this is the main."""
        session, checkpointer = self._session, self._checkpointer
        if not session.is_main:
            return (), ""
        if checkpointer is None:  # snapshots in memory are what makes up for a pool that is lost
            every = self._config.memory.every_steps or _AUTOMATIC_EVERY
            return (("memory",), f"every {every} steps") if session.stages.split and number % every == 0 else ((), "")
        if self._due[0] != number:
            asked = bool(self._asked)
            order = session.order
            ended = number < order.total_steps and self._epoch_ends(number)
            now_s = time.monotonic()
            due = checkpointer.due(number, now_s, epoch_end=ended and checkpointer.affordable(now_s))
            if asked and not checkpointer.schedule.wanted:
                self._asked, self._answering = [], number
            if due and self._judges(number):
                self._deferred = due.reason
                due = Due(tuple(t for t in due.tiers if t == "memory"), due.reason)
            self._due = (number, due)
        return tuple(self._due[1].tiers), self._due[1].reason

    def _judges(self, number: int) -> bool:
        """Whether there is an evaluation after this step that says how good it is: a checkpoint waits for that."""
        every, rule = self._session.config.eval_every, self._config
        named = rule.best_metric is not None and bool(rule.disk.keep_best or rule.object.keep_best)
        return named and bool(every) and number % every == 0

    def _epoch_ends(self, number: int) -> bool:
        epoch_of = getattr(self._session.order, "epoch_of", None)
        return epoch_of is not None and epoch_of(number + 1) != epoch_of(number)

    # ---- taking one

    def after_update(self, outcome: Outcome, records: Mapping[int, Record]) -> None:
        """The state is that of this step, and the user's loop has not gone on yet."""
        tiers = tuple(t for t in outcome.save[0] if t != "memory")
        if self._checkpointer is None:
            return
        if not self._prepared:
            self._prepared = True  # what the state consists of is found out once, now that the optimizer has its part
            for replica in self._session.stages.values():
                replica.state.live_tensors()
        if tiers and self._session.engine.machine.settled:
            self._start(outcome.step, Due(tiers, outcome.save[1]), records, {})  # type: ignore[arg-type]

    def here(self, reason: str, metrics: Mapping[str, float] | None = None) -> bool:
        """Take one of the state as it is, in which all members are; each of them calls this. False: not now."""
        session, checkpointer = self._session, self._checkpointer
        machine = session.engine.machine
        number = session.engine.position.step
        if checkpointer is None or not number or not machine.settled or session.engine.ended is not None:
            return False
        if self._begun == number or number in self._steps():
            return True
        for replica in session.stages.values():
            replica.settle_buffers()
        application = {PAST: b""} if session.asked > number else {}
        after = session.transfers.after_update_state(number)
        if after and not application:
            application = {LOOP: after}
        tiers: tuple[Tier, ...] = ("disk", "object") if self._config.object.url else ("disk",)
        self._start(number, Due(tiers, reason), self._records(number), application, metrics)
        return True

    def _records(self, number: int) -> Mapping[int, Record]:
        engine = self._session.engine
        return engine.gathered.get(Key(number, 0)) or (engine.machine.records if not engine.position.seq else {})

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
        session, checkpointer = self._session, self._checkpointer
        plan = session.engine.plan
        if checkpointer is None or plan is None:
            return
        me = session.link.me.worker_id
        states = {stage: session.stages[stage].state for stage in plan.stages_of(me)}
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
        connection = peer_connect(main.address, self._session.link.token, {"kind": "part"})
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
        generation = self._session.engine.machine.generation
        self._session.publisher.emit(kind, **{"generation": generation, **fields})
        if fields.get("tier") == "disk" and fields.get("step") == self._answering != 0:
            self._answering = 0
            step, done = int(fields["step"]), kind == "checkpoint_completed"
            self._answer(step, done, self.where(step) if done else "", str(fields.get("reason") or ""))

    def where(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        store = self._checkpointer.store if self._checkpointer is not None else None
        return f"{store.path}/{step_name(step)}" if store is not None else ""

    def _answer(self, step: int, done: bool, where: str = "", reason: str = "") -> None:
        me = self._session.link.me
        self._session.link.tell(
            wire.Saved(
                worker_id=me.worker_id, incarnation=me.incarnation, step=step, ok=done, where=where, reason=reason
            )
        )

    def condemn(self, sound: int, *, first: bool) -> None:
        """Checkpoints of later steps hold a state that counts for nothing: none is read, or completed, any more.

        first: whether this is the worker that sees to the object store, of all that do this.
        """
        if self._checkpointer is not None:
            self.before_update()
            self._checkpointer.condemn(sound, with_objects=first)
        self._plan, self._begun, self._best, self._deferred = None, 0, None, ""

    # ---- evaluations

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """After an evaluation, by all: if it is the best so far, the main says so and all take a checkpoint."""
        name, rule = self._config.best_metric, self._config
        if self._checkpointer is None or name is None or not (rule.disk.keep_best or rule.object.keep_best):
            return
        if name not in metrics and not self._session.config.eval_every:
            return  # a script may evaluate several things
        if name not in metrics:
            raise ConfigError(
                f"checkpoint.best_metric: expected one of the task's metrics ({', '.join(metrics)}), got {name!r}"
            )
        value = metrics[name] if rule.best_mode == "max" else -metrics[name]
        session = self._session
        why = b""
        if session.is_main:
            best = self._best if self._best is not None else self._stored_best()
            if best is None or value > best:
                why, self._best = b"the best so far", value
            else:
                why = self._deferred.encode()
            self._deferred = ""
        reason = next((r for _, r in sorted(session.gather(why).items()) if r), b"")
        if reason:
            self.here(reason.decode(), metrics)

    def _stored_best(self) -> float | None:
        if self._checkpointer is None:
            return None
        try:
            value = read_pointer_value(self._checkpointer.store, BEST)
        except EverstepError:
            return None
        return value if value is None or self._config.best_mode == "max" else -value

    # ---- the end

    def last(self, plan: Plan) -> None:
        """This plan asks for a checkpoint before the job ends: take it, tell, and wait for the end."""
        session, checkpointer = self._session, self._checkpointer
        if checkpointer is None:
            return
        number = session.engine.position.step
        there = number in self._steps()
        taken = self._finally(plan.save, uploads=True)
        if plan.leader(0) == session.link.me.worker_id:
            done = taken and (there or number in self._steps())
            why = "" if done else "nothing was trained yet" if not number else "it could not be completed"
            self._answer(number, done, self.where(number) if done else "", why)
        deadline = time.monotonic() + self._config.grace_s
        while not session.superseded() and time.monotonic() < deadline:  # the end comes as an exception
            session.tick()
            time.sleep(0.005)

    def hold(self, words: wire.WorkerFailed) -> None:
        """The loop has raised, but the state is whole: say so, and stay a member, who computes nothing, until the
        coordinator lets this worker go; others may need the state, or a checkpoint be wanted of it first.

        Raises: what ends a member, such as Evicted.
        """
        session, engine = self._session, self._session.engine
        whole = engine.machine.settled and engine.machine.phase is not Phase.UPDATING
        if self._checkpointer is None or not whole or not engine.position.step:
            return
        self.before_update()
        for replica in session.stages.values():
            replica.drop_lanes()
            replica.settle_buffers()
        session.tell(words)
        deadline = time.monotonic() + self._config.grace_s
        while time.monotonic() < deadline:
            engine.turn()

    def at_end(self) -> None:
        """After the last step, in all workers: leave a checkpoint of it, and wait for what is being written."""
        self._finally("the end of the job", uploads=self._session.is_main)

    def _finally(self, reason: str, *, uploads: bool) -> bool:
        """`here`, once those that began before are on disk, as nobody writes parts of two at a time; returns when it is
        durable, or its time is over."""
        generation = self._session.engine.machine.generation
        now_s, grace_s = time.monotonic(), self._config.grace_s
        self._wait(generation, now_s + grace_s / 2, uploads=False)
        taken = self.here(reason)
        if taken:
            self._wait(generation, now_s + grace_s, uploads=uploads)
        return taken

    def _wait(self, generation: int, deadline: float, *, uploads: bool) -> None:
        """Until what began is durable; not longer than the generation."""
        session, checkpointer = self._session, self._checkpointer
        while checkpointer is not None and time.monotonic() < deadline:
            if checkpointer.drain(0.005) and not (uploads and checkpointer.uploading):
                return
            session.tick()
            if session.engine.ended is None and session.engine.superseded(generation):
                return

    def not_kept(self, step: int, reason: str, tell: bool) -> None:
        """The memory tier has skipped a step. tell: it has not been told yet."""
        if self._checkpointer is not None:
            self._checkpointer.skip("memory", step, reason, tell)

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

    def restore(self, plan: Plan, number: int, stages: Sequence[int]) -> Restored:
        """Give these stages what the checkpoint of a step says. If it cannot be read, nothing has changed.

        Raises: CollectiveAborted then: the members settle anew, with what is left. Evicted if an unsplit model has
        been overwritten in part: this worker starts anew.
        """
        session, checkpointer = self._session, self._checkpointer
        trained = session.engine.position.step > 0
        written: list[int] = []
        try:
            if checkpointer is None:
                raise StoreError("checkpoint.enabled is false")
            replicas = [session.stages[stage] for stage in stages]

            def ready() -> None:
                written.extend(() if trained else stages)
                for replica in replicas:  # before, for it puts the buffers of the step under way back
                    replica.abandon()
                    replica.update_proven = True

            states = {stage: replica.state for stage, replica in zip(stages, replicas, strict=True)}
            restored = checkpointer.load(number, states, ready=ready, twice=trained)
        except (CheckpointCorrupt, StoreError) as error:
            self._refused.add(number)
            if written and not session.stages.split:
                reason = f"the checkpoint of step {number} cannot be used: {error}; this worker starts anew"
                raise Evicted(reason) from error
            for stage in written:
                session.stages.rebuild(stage)
            me = session.link.me
            session.link.tell(
                wire.SettleAgain(
                    worker_id=me.worker_id,
                    incarnation=me.incarnation,
                    generation=plan.generation,
                    reason=f"the checkpoint of step {number} cannot be used: {error}",
                )
            )
            raise CollectiveAborted(f"the checkpoint of step {number} cannot be used: {error}") from error
        self._begun = number
        return restored

    @staticmethod
    def records_of(restored: Restored) -> dict[int, Record]:
        """The records of the step's decision; plans that they were prepared for are long gone."""
        if not restored.records:
            return {}
        return {w: Record(0, r.payload) for w, r in decode_records(restored.records).items()}
