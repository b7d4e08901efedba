"""The control plane's machine: who takes part, in which generation, and why. Pure.

`handle` takes one event with the time at which it happened and returns what is to be done about it. Events change what
is known (`state`), as the tables in `table` say; then the decisions run until nothing more follows from it: plans for
at once (`regroup`), joins and leaves (`joins`), slots (`commands`). So every decision depends on the present state
alone, not on the order in which its parts became known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.base.errors import check
from everstep.protocol.coordinator import commands, health, joins, links, regroup, saving, table
from everstep.protocol.coordinator.alarms import GraceDue
from everstep.protocol.coordinator.journal import replay
from everstep.protocol.coordinator.state import MILLISECOND_NS, Place, State
from everstep.protocol.coordinator.types import CoordinatorConfig, CoordinatorEffect, CoordinatorEvent

LATE_NS = 500 * MILLISECOND_NS
_MOST_ROUNDS = 20


class Coordinator:
    """The only arbiter of membership and generations.

    place: `placement.lanes.place`. journal: the entries persisted by earlier lives of this coordinator, oldest first.
    Raises: ProtocolError if the journal holds a plan that is none.
    """

    def __init__(self, config: CoordinatorConfig, place: Place, journal: Iterable[dict[str, Any]] = ()) -> None:
        self._state = State(config, place)
        self._restored = replay(self._state, journal)
        self._begun = False

    @property
    def next_deadline_ns(self) -> int | None:
        """When to call with `Tick` at the latest, if nothing happens before; None: nothing is timed."""
        return None if self._state.ended is not None else self._state.alarms.next_ns

    def status(self) -> dict[str, Any]:
        """The shape of `status --json`, without the coordinator's own pid."""
        return commands.status(self._state)

    def handle(self, now_ns: int, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        """Take one event. What is to be persisted comes first in the answer. Time never runs backwards."""
        state = self._state
        self._advance_clock(now_ns)
        table.EVENTS[type(event)](state, event)
        for alarm in state.alarms.due(state.now):
            table.ALARMS[type(alarm)](state, alarm)
        self._decide()
        if state.ended is not None and state.save_requests:
            saving.job_ended(state)
        return state.take_effects()

    # ---- time

    def _advance_clock(self, now_ns: int) -> None:
        state = self._state
        deadline = state.alarms.next_ns
        state.now = max(state.now, now_ns)
        if not self._begun:
            self._begun = True
            self._begin()
        elif deadline is not None and state.now - deadline > LATE_NS:
            # It was this process that was away (stopped, starved): the silence is its own.
            health.pardon(state, state.now - deadline)

    def _begin(self) -> None:
        state = self._state
        state.quorum_since_ns = state.now if state.plan is None or state.broken else None
        if not self._restored:
            return
        state.grace_until_ns = state.now + state.config.grace_ns
        state.alarms.set(GraceDue(), state.grace_until_ns)
        if state.plan is None:
            return
        state.store.advance(state.plan.generation)
        for worker_id, worker in sorted(state.workers.items()):
            if worker.agent_id is not None:
                state.slot_owner.setdefault(worker_id, worker.agent_id)
            if worker.agent_id is not None and worker.agent_id not in state.agents:
                state.agents[worker.agent_id] = health.watch_agent(state, worker.agent_id, worker.host)
                state.agents[worker.agent_id].lives.add(worker.key)
            if worker.agent_id is not None:
                state.agents[worker.agent_id].restored.add(worker.key)

    def _decide(self) -> None:
        state = self._state
        for _ in range(_MOST_ROUNDS):
            if not state.dirty or state.ended is not None:
                return
            state.dirty = False
            generation = state.plan.generation if state.plan is not None else 0
            regroup.reconcile(state)
            if state.plan is not None and state.plan.generation != generation:
                if not state.plan.prepared:
                    joins.restart(state)
                links.forget_old(state)
            joins.reconcile(state)
            commands.sync_slots(state)
            if state.plan is not None:
                state.store.advance(state.plan.generation)
        check(not state.dirty, "the coordinator's decisions must come to rest")
