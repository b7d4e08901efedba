"""Checkpoints and snapshots: which are taken, given up and dropped, and how they are reported. Pure.

The job's leader decides which are due and says so in its agree record, so that all workers begin the same one right
after that update. At a boundary that all have reached (an evaluation, the end, a plan that says so) they begin a
checkpoint without that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.config_keys import CheckpointConfig
from everstep.base.plan import Plan
from everstep.placement.domain_spread import farthest
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.ending import EndAlone
from everstep.protocol.driver.operations import AbandonSave, PartsThere, Save, SaveAsked, SaveEnded
from everstep.protocol.driver.outbox import Gathers, Outbox
from everstep.protocol.driver.policy import COMPARE, END, Due, SaveSchedule, Tier, evaluates_after
from everstep.protocol.driver.records import StepOutcome, gathered
from everstep.protocol.settling import from_shares
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Key, Record, Snapshots, SnapshotsKept

_why = msgspec.json.Decoder(Why)

GIVE_UP_S = 300.0
"""Time that the next checkpoint waits for an earlier one that lacks parts."""


MEMORY_EVERY = 10
"""Steps between snapshots in memory of a split job whose config says nothing: five steps are done again on average, and
copying a stage to one other worker takes a small part of ten steps."""


@dataclass(frozen=True)
class SavingRules:
    """Settings of a saver.

    on: there is a place for checkpoints. memory_every: steps between snapshots in memory if the config has no rule
    for them; 0: none. eval_every, eval_every_epochs: steps, and epochs, between evaluations; 0: none. epoch_ends:
    epochs that are over after a step, if it is the last one of an epoch but not of the job; else 0.
    """

    rule: CheckpointConfig = field(default_factory=CheckpointConfig)
    on: bool = False
    memory_every: int = 0
    eval_every: int = 0
    epoch_ends: Callable[[int], int] = lambda number: 0
    eval_every_epochs: int = 0

    @property
    def judges(self) -> bool:
        """Whether evaluations rank checkpoints."""
        rule = self.rule
        return rule.best_metric is not None and bool(rule.disk.keep_best or rule.object.keep_best)

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations before the last step."""
        return bool(self.eval_every or self.eval_every_epochs)

    def evaluated(self, number: int) -> bool:
        """Whether an evaluation follows this step, if it is not the last one."""
        return evaluates_after(number, self.epoch_ends(number), self.eval_every, self.eval_every_epochs)


class Saver:
    """One worker's part in the job's checkpoints. ending: whether the job ends with the next one. newest: the newest
    step whose checkpoint was completed here, from parts of one state; 0 once that step has to be repeated."""

    def __init__(self, machine: StepMachine, out: Outbox, gathers: Gathers, config: SavingRules) -> None:
        self.ending = EndAlone()
        self._machine = machine
        self._out = out
        self._gathers = gathers
        self._config = config
        self._schedule = SaveSchedule(config.rule, config.memory_every)
        self._said = (0, Due())
        self._answering = 0
        self._incomplete: tuple[int, int, Why | None] | None = None  # step, since when, why if it was due after a step
        self._plan: Plan | None = None
        self._begun, self._begun_at = 0, Key(0, 0)
        self._best: float | None = None
        self._deferred: Why | None = None
        self.newest = 0

    @property
    def on(self) -> bool:
        """Whether checkpoints are taken."""
        return self._config.on

    @property
    def _is_main(self) -> bool:
        plan = self._machine.plan
        return plan is not None and plan.leader(0) == self._machine.me.worker_id

    # ---- the job's leader: due checkpoints

    def request(self, why: Why) -> None:
        """Request a checkpoint after the present step; its outcome is reported to the coordinator."""
        if self.on:
            self._schedule.request(why)
        else:
            self._tell(0, False, "", "checkpoint.enabled is false: this job takes none")

    def due(self, number: int) -> Due:
        """For the agree record of a step: the tiers that are due after it, if this is the job's leader, or this
        worker knows that the job will end. Repeated calls give the same, apart from that."""
        if self.ending.asked is not None:
            return self._schedule.last(self.ending.asked)
        if not self._is_main:
            return Due()
        if not self.on:
            return _memory_alone(self._config, number)
        if self._said[0] != number:
            self._said = (number, self._decide(number))
        return self._schedule.with_comparison(self._said[1])

    def _decide(self, number: int) -> Due:
        schedule, now_s = self._schedule, self._out.times.now_ns / 1e9
        asked = list(schedule.wanted)
        epochs = self._config.epoch_ends(number)
        affordable = bool(epochs) and schedule.affordable(now_s)
        due = schedule.due(number, now_s, epoch_end=affordable, epochs=epochs)
        if "disk" in due.tiers and self._incomplete is not None and not self._give_up_slow(number):
            schedule.ask_again(asked)  # who asked for one gets it afterwards
            due = _memory_of(due)
        if asked and not schedule.wanted:
            self._answering = number
        if due and self._config.judges and self._config.evaluated(number):  # it waits for the evaluation
            self._deferred = Why(due.cause, due.reason)
            due = _memory_of(due)
        return due

    def _give_up_slow(self, number: int) -> bool:
        """Whether the earlier checkpoint is no longer waited for."""
        step, since_ns, _ = self._incomplete or (0, 0, None)
        waited_s = (self._out.times.now_ns - since_ns) / 1e9
        if waited_s > GIVE_UP_S:
            self._give_up(Why(Cause.SLOW, f"it took longer than {GIVE_UP_S:.0f} s"))
            return True
        text = f"that of step {step} is still being written, since {waited_s:.1f} s"
        self._out.put(do.Skipped(number, Why(Cause.BUSY, text), tell=True, tier="disk"))
        return False

    # ---- all: taking one

    def updated(self, outcome: StepOutcome, records: Mapping[int, Record], *, whole: bool = True) -> None:
        """The step has been applied, and the application has not gone on yet. whole: all members have their share of
        it; if not, the checkpoint that was due follows the next step."""
        self.ending.decided(outcome)
        if outcome.compares:
            self._schedule.compared()
        tiers: tuple[Tier, ...] = tuple(t for t in outcome.save[0] if t not in ("memory", COMPARE))  # type: ignore[misc]
        if not tiers or END in tiers or not self.on or not self._machine.settled:
            return
        due = Due(tiers, outcome.save[1], outcome.save_cause)
        if whole:
            self._out.put(self._begin(Key(outcome.step, 0), due, records, Why(due.cause, due.reason)))
        elif self._is_main:
            self._schedule.request(Why(due.cause, due.reason))

    def boundary(self, why: Why, *, past: bool, metrics: Mapping[str, float] | None = None) -> Save | None:
        """A checkpoint of the present state, in which all members are; each of them calls this. None: not now, or it
        has begun already. past: the application is done with the step."""
        number = self._machine.position.step
        if not self.on or not number or not self._machine.settled or self._begun == number:
            return None
        tiers: tuple[Tier, ...] = ("disk", "object") if self._config.rule.object.url else ("disk",)
        records = self._gathers.of_update(number) or ({} if self._machine.position.seq else self._machine.records)
        save = self._begin(self._machine.position, Due(tiers, why.reason, why.cause), records)
        return msgspec.structs.replace(save, boundary=True, past=past, metrics=metrics or {})

    def _begin(self, at: Key, due: Due, records: Mapping[int, Record], why: Why | None = None) -> Save:
        self._plan, self._begun, self._begun_at = self._machine.current_plan(), at.step, at
        self._incomplete = (at.step, self._out.times.now_ns, why)
        return Save(self._plan, at.step, due, records)

    # ---- giving one up

    def regroup(self, plan: Plan) -> None:
        """A new generation: a checkpoint in progress can still be completed if its writers and its leader are all
        members, and all have begun it."""
        if plan.cause.is_fault:
            self._schedule.failed()
        if plan.save:  # from here on it is the last one of which the coordinator is told
            self._answering = 0
        before = self._plan
        if before is None:
            return
        gone = [m.worker_id for m in before.members if not plan.has(m.key)]
        if gone:
            self._give_up(Why(Cause.REGROUPED, f"worker {', '.join(map(str, gone))} left"), plan)
        elif plan.leader(0) != before.leader(0):
            self._give_up(Why(Cause.REGROUPED, "the leader changed"), plan)
        elif before.divided_stages and self._begun_at == self._machine.position:  # a member may not have got its share
            step, _, why = self._incomplete or (0, 0, None)
            if why is not None and self._is_main and not plan.save:  # who asked hears of the one that follows
                self._schedule.request(why)
                self._answering = 0 if self._answering == step else self._answering
            self._give_up(Why(Cause.REGROUPED, "not all may have begun it"), plan)

    def entered(self, positions: Mapping[int, Key]) -> None:
        """All have settled. positions: where each had been. A member that was behind a checkpoint's step reached it
        while all settled, and has not begun the checkpoint."""
        if self.newest > self._machine.position.step:
            self.newest = 0
        writers = () if self._plan is None else self._plan.worker_ids
        if any(positions.get(worker_id, self._begun_at) < self._begun_at for worker_id in writers):
            self._plan, self._begun = None, 0
            self._give_up(Why(Cause.REGROUPED, "not all had begun it"))

    def _give_up(self, why: Why, plan: Plan | None = None) -> None:
        self._incomplete = None
        if plan is not None:
            self._plan, self._begun = None, 0
        self._out.put(AbandonSave(why, plan))

    def invalidated(self) -> None:
        """States of later steps are void, and so are their checkpoints."""
        self._plan, self._begun, self._incomplete = None, 0, None
        self._best = self._deferred = None
        self.newest = 0

    # ---- what became of it

    def parts_there(self, event: PartsThere) -> None:
        """All parts of the checkpoint are here, or it was given up."""
        if self._incomplete is not None and self._incomplete[0] == event.step:
            self._incomplete = None

    def ended(self, event: SaveEnded) -> None:
        """A checkpoint is on disk, or will never be."""
        self.parts_there(PartsThere(event.step))
        if event.ok and event.step <= self._machine.position.step:  # else all are at an earlier step by now
            self.newest = max(self.newest, event.step)
        if event.differs:
            self._schedule.suspect()
        if event.cost_s is not None:
            self._schedule.cost(event.cost_s)
        if event.step == self._answering != 0:
            self._answering = 0
            self._tell(event.step, event.ok, event.where, event.reason)

    def last(self, operation: do.SaveLast, where: str) -> None:
        """The checkpoint that a plan asked for has ended. where: its place; "" if it was not completed."""
        if operation.plan.leader(0) != self._machine.me.worker_id:
            return
        number = operation.step
        done = bool(where) and self._begun == number
        reason = "" if done else "it could not be completed" if number else "nothing was trained yet"
        self._tell(number, done, where if done else "", reason, last=True)

    def _tell(self, number: int, ok: bool, where: str, reason: str, *, last: bool = False) -> None:
        """Tell the coordinator. It asks again for one that it has not heard of, but not for the last one."""
        me = self._machine.me
        told = wire.Saved(
            worker_id=me.worker_id, incarnation=me.incarnation, step=number, ok=ok, where=where, reason=reason
        )
        self._out.send(told, lasting=last)

    # ---- evaluations

    def verdict(self, event: SaveAsked) -> bytes:
        """After an evaluation: the job's leader's verdict for all members; empty if no checkpoint follows."""
        rule = self._config.rule
        if not self._is_main or rule.best_metric is None:
            return b""
        sign = 1.0 if rule.best_mode == "max" else -1.0
        best = self._best if event.stored is None or self._best is not None else sign * event.stored
        value, why = sign * event.metrics[rule.best_metric], self._deferred
        if best is None or value > best:
            why, self._best = Why(Cause.SCHEDULED, "the best so far"), value
        self._deferred = None
        return b"" if why is None else msgspec.json.encode(why)

    def judged(self, event: SaveAsked, records: Mapping[int, Record], *, past: bool) -> None:
        """All members know the leader's verdict."""
        said = next((data for _, data in sorted(gathered(records).items()) if data), b"")
        save = self.boundary(_why.decode(said), past=past, metrics=event.metrics) if said else None
        if save is not None:
            self._out.put(save)


def _memory_alone(config: SavingRules, number: int) -> Due:
    """The memory tier's snapshot alone: it replaces a lost pool's state that is not on disk."""
    every = config.memory_every and (config.rule.memory.every_steps or config.memory_every)
    return Due(("memory",), f"every {every} steps") if every and number % every == 0 else Due()


def _memory_of(due: Due) -> Due:
    return replace(due, tiers=tuple(t for t in due.tiers if t == "memory"))


class Keeper:
    """One worker's snapshots in memory, for pools that die as a whole.

    All members alike take one right after an update, if the job's leader's record of the step says so; a member of
    another pool copies that of each stage. A snapshot is stated only once its step has been released, so that going
    to it skips no effect. The newest snapshot that is complete in all stages stays until a newer one is. proven:
    gives the newest step, up to a step, whose state is known to be right.
    """

    def __init__(self, machine: StepMachine, out: Outbox, proven: Callable[[int], int]) -> None:
        self._machine = machine
        self._out = out
        self._proven = proven
        self._there: Snapshots = {}
        self._records: dict[int, Mapping[int, Record]] = {}
        self._begun = self._copied = 0
        self._busy = False
        self._skipping = False
        self._released = 0
        self._stated = SnapshotsKept()

    @property
    def complete(self) -> int:
        """The newest step whose snapshots this worker has kept and copied completely; 0 while some are missing."""
        return self._begun if self._copied == self._begun else 0

    def records_of(self, number: int) -> Mapping[int, Record]:
        """Records of the decision of a step that has a snapshot; empty if unknown."""
        return self._records.get(number, {})

    # ---- around an update

    def updated(self, outcome: StepOutcome, records: Mapping[int, Record], *, whole: bool = True) -> None:
        if outcome.kept:
            self._out.put(do.RetireKept(outcome.kept, self._proven(outcome.kept)))
            there = {number for _, number in self._there}
            self._records = {n: r for n, r in self._records.items() if n >= outcome.kept or n in there}
        plan = self._machine.plan
        if whole and "memory" in outcome.save[0] and plan is not None:
            self._take(plan, outcome.step, records)

    def _take(self, plan: Plan, number: int, records: Mapping[int, Record]) -> None:
        if self._copied != self._begun or self._busy:
            self._skip(number, Why(Cause.BUSY, f"that of step {self._begun} is still on its way to another worker"))
            return
        me = self._machine.me.worker_id
        mine = [stage for stage in range(plan.stages) if keeps_for(plan, stage) == me]
        self._begun, self._copied = number, 0 if mine else number
        self._records[number] = records
        sizes = {k: blocks.of for k, blocks in self._machine.held.items()}
        self._out.put(do.Keep(plan, number, *from_shares(plan, mine, me, sizes)))

    def refused(self, event: do.NotKept) -> None:
        """There is no room for a snapshot, of own stages or of another pool's."""
        if event.step == self._begun:
            self._begun = self._copied = 0
            self._skip(event.step, event.why)

    def _skip(self, number: int, why: Why) -> None:
        self._out.put(do.Skipped(number, why, tell=not self._skipping))
        self._skipping = True

    # ---- what there is

    def others_kept(self, event: do.OthersKept) -> None:
        """The snapshots of other pools are here; or copying failed, and the next one may succeed."""
        if event.step == self._begun:
            self._begun = self._copied = event.step if event.done else 0
            self._skipping &= not event.done

    def there(self, event: do.InMemory) -> Iterable[SnapshotsKept]:
        """The snapshots held here have changed."""
        self._there, self._busy = event.snapshots, event.busy
        if self.complete:
            self._skipping &= not any(n == self.complete and there.whole for (_, n), there in event.snapshots.items())
        return self._state()

    def released(self, number: int) -> Iterable[SnapshotsKept]:
        """All members have decided a step beyond this one."""
        self._released = max(self._released, number)
        return self._state()

    def went_back(self, number: int) -> Iterable[SnapshotsKept]:
        """The job went back: steps after this one are repeated."""
        self._out.put(do.ForgetKept(number))
        self._there = {key: part for key, part in self._there.items() if key[1] <= number}
        self._records = {n: r for n, r in self._records.items() if n <= number}
        self._begun = self._copied = min(self._begun, number) if self._copied == self._begun else 0
        return self._state()

    def _state(self) -> Iterable[SnapshotsKept]:
        stated = SnapshotsKept({key: part for key, part in self._there.items() if self._counts(key[1])})
        if stated == self._stated:
            return ()
        self._stated = stated
        return [stated]

    def _counts(self, number: int) -> bool:
        return number <= self._released and number in self._records


def keeps_for(plan: Plan, stage: int) -> int | None:
    """Worker id of the keeper of a stage for its pool, from the pools after it: the worker that would die with the
    fewest of the pool, the widest domains first; on a tie the first one; None if there is no other pool."""
    inside = {seat.worker_id for seat in plan.pool(stage)}
    following = [seat.worker_id for k in range(1, plan.stages) for seat in plan.pool((stage + k) % plan.stages)]
    domains = {member.worker_id: member.all_domains for member in plan.members}
    return farthest([worker_id for worker_id in following if worker_id not in inside], inside, domains)
