"""The control plane's machine: who takes part, in which generation, and why. Pure.

`handle` takes one event with the time at which it happened and returns what is to be done about it. Events change what
is known (`job`), as the tables in `table` say; then the decisions run until nothing more follows from it: plans for
at once (`regroup`), joins and leaves (`joins`), slots (`slots`). So every decision depends on what is known alone, not
on the order in which it became known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.base.errors import check
from everstep.protocol.coordinator import joins, liveness, regroup, status, table
from everstep.protocol.coordinator.desk import MILLISECOND_NS
from everstep.protocol.coordinator.job import new_job
from everstep.protocol.coordinator.journal import replay
from everstep.protocol.coordinator.speeds import Place
from everstep.protocol.coordinator.types import CoordinatorConfig, CoordinatorEffect, CoordinatorEvent

LATE_NS = 500 * MILLISECOND_NS
_MOST_ROUNDS = 20


class Coordinator:
    """The only arbiter of membership and generations.

    place: `placement.lanes.place`. journal: the entries persisted by earlier lives of this coordinator, oldest first.
    Raises: ProtocolError if the journal holds a plan that is none.
    """

    def __init__(self, config: CoordinatorConfig, place: Place, journal: Iterable[dict[str, Any]] = ()) -> None:
        self.job = new_job(config, place)
        self._restored = replay(self.job, journal)
        self._begun = False
        self._decided: tuple[int, ...] = ()  # the job's version when decisions were last made

    @property
    def next_deadline_ns(self) -> int | None:
        """When to call with `Tick` at the latest, if nothing happens before; None: nothing is timed."""
        return None if self.job.progress.ended is not None else self.job.desk.alarms.next_ns

    def status(self) -> dict[str, Any]:
        """The shape of `status --json`, without the coordinator's own pid."""
        return status.status(self.job)

    def handle(self, now_ns: int, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        """Take one event. What is to be persisted comes first in the answer. Time never runs backwards."""
        job = self.job
        self._advance_clock(now_ns)
        table.EVENTS[type(event)](job, event)
        for alarm in job.desk.alarms.due(job.desk.now):
            table.ALARMS[type(alarm)](job, alarm)
        self._decide()
        job.saving.give_up()
        return job.desk.take_effects()

    # ---- time

    def _advance_clock(self, now_ns: int) -> None:
        desk = self.job.desk
        deadline = desk.alarms.next_ns
        desk.advance(now_ns)
        if not self._begun:
            self._begun = True
            self._begin()
        elif deadline is not None and desk.now - deadline > LATE_NS:
            # It was this process that was away (stopped, starved): the silence is its own.
            liveness.pardon(self.job, desk.now - deadline)

    def _begin(self) -> None:
        job = self.job
        if job.agreement.plan is None or job.agreement.broken:
            job.quorum.begin()
        if self._restored:
            job.membership.begin_grace()
            liveness.expect_agents(job)

    def _decide(self) -> None:
        """Decisions look at what the parts know; if that has not changed, neither have they."""
        job = self.job
        for _ in range(_MOST_ROUNDS):
            if job.version == self._decided or job.progress.ended is not None:
                return
            self._decided = job.version
            generation = job.agreement.in_force
            regroup.reconcile(job)
            if job.agreement.in_force != generation:
                job.healing.stop_all()
                job.links.forget_old()
            joins.reconcile(job)
            ending = job.saving.ending
            job.slots.share_out("" if ending is None else ending.state)
            job.store.advance(job.agreement.in_force)
        check(job.version == self._decided, "the coordinator's decisions must come to rest")
