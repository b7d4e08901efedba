"""How a driver regroups and settles: what it states, serves, copies, and goes back to. Pure.

Apart from steps because nothing here happens in an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol import step_types as step
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.comparing import Comparing
from everstep.protocol.driver.first_states import FirstStates
from everstep.protocol.driver.outbox import Gathers, Outbox
from everstep.protocol.driver.probing import ProbeVerdict, Probing
from everstep.protocol.driver.records import decode_holding, encode_holding
from everstep.protocol.driver.saver import Keeper
from everstep.protocol.settling import Sources, from_shares, settle
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_types import Piecewise, Record

SETTLE = Tag("settle", 0, 0)


class Settler:
    """Takes a worker from a new plan to the moment at which all members go on in it."""

    def __init__(
        self,
        machine: StepMachine,
        out: Outbox,
        gathers: Gathers,
        keeper: Keeper,
        rewindable: bool,
        comparing: Comparing,
        probing: Probing,
    ) -> None:
        self._machine = machine
        self._keeper = keeper
        self._out = out
        self._gathers = gathers
        self._rewindable = rewindable
        self._comparing = comparing
        self._probing = probing
        self._stated: Mapping[int, step.Holding] = {}
        self._disk: tuple[int, ...] = ()
        self._first = FirstStates()
        self._shelved = False

    def in_memory(self, number: int) -> bool:
        """Whether a member stated, when this generation settled, that it has state of this step in memory."""
        holdings = self._stated.values()
        kept = (s for h in holdings for _, s in h.snapshots)
        return number in (*(h.position.step for h in holdings), *kept)

    @property
    def positions(self) -> Mapping[int, step.Key]:
        """Where each member was when this generation settled."""
        return {worker_id: holding.position for worker_id, holding in self._stated.items()}

    @property
    def goes_on(self) -> bool:
        """Whether all loops come to where they ask for the next step: one has heard of the step where all are, and none
        stays before it is done with that."""
        at, stated = self._machine.step, self._stated.values()
        stays = any(one.stays_at >= 0 and (one.stays_at <= at or one.position.step > at) for one in stated)
        return not stays and any(one.heard >= at for one in stated)

    # ---- regroup

    def leave(self, generation: int) -> None:
        """Cut the transfers of a generation that is over."""
        self._out.put(do.Cut(generation))
        self.unshelve()

    def open(self, plan: Plan) -> None:
        """Start the operation in which the members of the plan meet."""
        machine = self._machine
        self._out.times.freed(plan.generation)
        self._comparing.learn(plan)
        doubt = machine.sound >= 0
        disk = (
            not machine.step or doubt or plan.stages > 1 or bool(plan.divided_stages)
        )  # else the state in memory will do
        limit = machine.sound if doubt else None
        if doubt:  # this worker may have heard of it from others only
            self._out.put(do.Invalidate(machine.sound, first=machine.me.worker_id == plan.worker_ids[0]))
        self._out.start(do.Open, machine.generation, plan, machine.step + 1, disk, limit)

    def opened(self, operation: do.Open, result: do.Opened) -> Iterable[step.StepEvent]:
        self._out.times.note("regroup")
        self._disk = result.disk
        self._first.begin(result.built)
        return [step.LanesLost(operation.step, result.lost)]

    def state_holding(self, heard: int, stays_at: int) -> None:
        """Start the exchange in which every member states what it holds. heard, stays_at: as in `Holding`."""
        first = self._first
        holding = replace(self._machine.holding(), disk=self._disk, first=first.agreed, built=first.built)
        probing = self._probing
        holding = replace(holding, fresh=self._comparing.fresh, proven=probing.seen, doubt=probing.doubt)
        gathered = self._gathers.digests(holding.position, holding.records)
        holding = replace(holding, heard=heard, stays_at=stays_at, gathered=gathered)
        self._out.start(do.Exchange, self._machine.generation, SETTLE, encode_holding(holding))

    def all_stated(self, operation: do.Exchange, payloads: Mapping[int, bytes]) -> Iterable[step.StepEvent]:
        """All members have stated what they hold: work out where everyone goes on."""
        self._out.times.note("settle")
        self._stated = {worker_id: decode_holding(payloads[worker_id]) for worker_id in sorted(payloads)}
        plan = self._machine.current_plan()
        settled = settle(plan, self._stated)
        self._first.settled(settled.target.step, self._stated)
        self._comparing.entered(self._stated, settled.wants, settled.target.step, back=settled.back)
        self._probing.entered(plan, self._stated, settled.target.step)
        forgotten = self._keeper.went_back(settled.target.step) if settled.back else ()
        return [*forgotten, *(step.HoldingArrived(operation.generation, w, h) for w, h in self._stated.items())]

    def settle_again(
        self,
        why: Why,
        tainted: int = 0,
        decided_in: int = 0,
        *,
        odd: Collection[int] = (),
        drift: bool = False,
        probe: ProbeVerdict | None = None,
    ) -> None:
        """Tell the coordinator that what was stated is wrong, and which states are still sound. tainted, decided_in,
        odd, drift: as in `SettleAgain`."""
        told: dict[str, Any] = {}
        if probe is not None:
            told = {"lane": probe.lane, "workers": list(probe.workers), "ends": probe.ends}
        machine, generation = self._machine, self._machine.generation
        if machine.plan is not None and machine.plan.prepared:
            # The coordinator may not have heard yet that the members have switched to it.
            at = {"generation": generation, "step": machine.step, "step_ms": 0.0}
            self._out.tell(wire.Progress, lasting=False, **at)
        self._out.tell(
            wire.SettleAgain,
            generation=generation,
            cause=why.cause,
            reason=why.reason,
            tainted=tainted,
            decided_in=decided_in,
            sound=self._machine.sound if probe is None else probe.sound,
            odd=sorted(odd),
            drift=drift,
            **told,
        )

    def lacks(self, event: step.BlocksLost) -> None:
        """Blocks of the state are gone: all members settle again, which repairs them."""
        self.settle_again(Why(Cause.CORRUPT, f"it has lost blocks of stage {event.stage} ({event.extents})"))

    @property
    def refused(self) -> str:
        """Why this worker cannot go on with the initial state that it built; "" if it can."""
        return self._first.wrong

    def entered(self, effect: step.Entered, loop: str) -> None:
        """The settle is done, and all members go on. loop: as in `GenerationEntered`."""
        plan = self._machine.current_plan()
        self._out.put(do.EnteredPlan(plan, effect.step))
        top = max((h.position.step for h in self._stated.values()), default=0)
        if top > effect.step:  # so that it is known how many steps are done again
            self._out.tell(wire.Progress, lasting=False, generation=plan.generation - 1, step=top, step_ms=0.0)
        self._out.forget_lasting()
        phases_ms = self._out.times.taken()
        number = effect.step + 1
        self._out.tell(wire.GenerationEntered, generation=plan.generation, step=number, phases_ms=phases_ms, loop=loop)

    # ---- state for others

    def serve(self, effect: step.ServeState, *, stands: bool) -> None:
        """Put the state of a position on the shelf, for members that lack it. stands: as in `Shelve`."""
        machine, position = self._machine, effect.position
        live = position.step == machine.step
        records: Mapping[int, Record] = self._keeper.records_of(position.step)
        gathers: do.GatheredRecords = {}
        if live:
            records, gathers = machine.records, self._gathers.up_to(machine.position, machine.records)
        if (
            live and position.seq == 0 and machine.position.seq > 0
        ):  # a member that goes back to it has gathered nothing yet
            records = self._gathers.of_update(position.step)
            gathers = {position: records} if records else {}
        self._shelved = True
        self._out.put(do.Shelve(effect.generation, position, records, gathers, machine.held if live else {}, stands))

    def bring_together(self) -> tuple[Sources, Piecewise]:
        """Sources of the stages that the job's leader lacks at the end of the job; other workers put theirs on the
        shelf."""
        machine, plan, me = self._machine, self._machine.current_plan(), self._machine.me.worker_id
        if plan.leader(0) == me:
            held = machine.held
            lacking = [k for k in range(plan.stages) if k not in held or not held[k].whole]
            return from_shares(plan, lacking, me, {k: blocks.of for k, blocks in held.items()})
        if plan.stages > 1 or plan.divided_stages:
            self.serve(step.ServeState(machine.generation, machine.position, (plan.leader(0),)), stands=True)
        return {}, {}

    def unshelve(self) -> None:
        """Take the state off the shelf: everyone who needed it has copied it."""
        if self._shelved:
            self._shelved = False
            self._out.put(do.Unshelve())

    # ---- state from others

    def fetch(self, effect: step.FetchState) -> None:
        """Start to copy the stages that this worker lacks."""
        generation = self._machine.generation
        self._out.start(
            do.Fetch, generation, self._machine.current_plan(), effect.position, effect.donors, effect.pieces
        )

    def go_back(self, effect: step.GoBack) -> do.Exit | None:
        """Start to restore the state of another step. Returns an exit if the application cannot go on from that
        step."""
        machine, at = self._machine, self._machine.position
        rebuilt = not effect.step and not all(effect.sources.values())
        unable = not effect.step and self._machine.current_plan().stages == 1  # an unsplit model is built once
        if (at.step and not self._rewindable) or ((at.step or rebuilt) and unable):
            return do.Exit(f"the job goes back to step {effect.step}, from where this worker restarts", returns=True)
        stands = at.step == effect.step
        own = self._gathers.of_update(at.step) if stands else {}
        own = own or self._keeper.records_of(effect.step)
        held = machine.stages if stands else ()
        where = effect.step, effect.sources, own, held, effect.pieces
        self._out.start(do.Restore, machine.generation, self._machine.current_plan(), *where)
        return None

    def fetched(self, operation: do.Fetch, result: do.Copied) -> Iterable[step.StepEvent]:
        """The stages that this worker lacked are here."""
        self._comparing.copied()
        self._out.times.note("heal")
        moves = operation.position != self._machine.position
        if moves:
            self._out.put(do.CutFeeds())
        if moves or not self._machine.records:  # without records, what this worker has gathered may not count, either
            self._gathers.copied(result.gathers)
        return [step.StateCopied(operation.generation, operation.position, result.records, result.sizes)]

    def restored(self, operation: do.Restore, result: do.Copied) -> Iterable[step.StepEvent]:
        """The state of the step to go back to is here."""
        self._comparing.copied()
        if operation.step and not all(operation.sources.values()):
            self._comparing.saved(operation.step)  # a checkpoint counts only if all who wrote it were alike
        self._out.times.note("heal")
        self._out.put(do.CutFeeds())
        self._gathers.applied(operation.step, result.records)
        self._first.rebuilt(result.built)
        return [step.StateCopied(operation.generation, operation.position, result.records, result.sizes)]
