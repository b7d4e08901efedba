"""One worker's ties to the rest of the job: how it says hello, hears, repeats, meets the members, and leaves.

Apart from what it trains: nothing here touches a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from everstep.base.errors import DeterminismError
from everstep.base.plan import Member
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import gathered
from everstep.runtime.peer import PeerConnection
from everstep.train.executor import Executor
from everstep.train.rendezvous import Rendezvous
from everstep.train.view import WorkerView

_LATE = 4
Serve = Callable[[PeerConnection, dict[str, Any]], None]


class GenerationTies:
    """Between the control connection and the driver."""

    def __init__(
        self,
        view: WorkerView,
        executor: Executor,
        rendezvous: Rendezvous,
        serve: Serve,
    ) -> None:
        """serve: answers a peer's request, in a thread of its own."""
        link = view.link
        self._view = view
        self._executor = executor
        self._rendezvous = rendezvous
        self._serve = serve
        self._member = Member(link.me.worker_id, link.me.incarnation, link.host)
        self._late: tuple[wire.AnyMessage, ...] = ()
        self._aside: dict[type, Callable[[Any], None]] = {}

    def on(self, kind: type[wire.AnyMessage], act: Callable[[Any], None]) -> None:
        """Messages of this kind are for somebody beside the driver, too; called in the control thread."""
        self._aside[kind] = act

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """What it does for the driver."""
        link, cutter = self._view.link, self._view.cutter
        return {
            do.Exchange: self._exchange,
            do.EnteredPlan: self._entered,
            do.Cut: lambda effect: cutter.cut(effect.generation),
            do.Tell: lambda effect: link.tell(effect.message),
        }

    def connect(self) -> None:
        """Say hello; from here on the coordinator knows this worker."""
        link, me = self._view.link, self._view.link.me
        address = link.serve_peers(self._serve_peer)
        link.on_flip(lambda: self._view.stages.any.flip_bit())
        segment = self._view.transport.segment
        head = me.worker_id, me.incarnation, link.host, os.getpid(), address, segment
        self._member = Member(*head, limbs=link.limbs())
        link.row.set(phase="idle")
        link.connect(self._hello, self._deliver, self._reconnected)

    def gather(self, data: bytes) -> Mapping[int, bytes]:
        """All members' data, the same at every member. Once the job has ended everybody is alone."""
        alone = {self._view.me: data}
        if self._view.ended:
            return alone
        answer = self._executor.ask(do.GatherAsked(data))
        records = answer.records if isinstance(answer, do.GatherDone) else {}
        return gathered(records) if records else alone

    def members(self) -> tuple[int, tuple[int, ...]]:
        """Own worker id, and everybody's as of now."""
        plan, me = self._view.plan, self._view.me
        return me, plan.worker_ids if plan is not None and not self._view.ended else (me,)

    # ---- from any thread

    def tell(self, message: wire.AnyMessage) -> None:
        """Something that is no part of the driver's conversation; it is repeated likewise."""
        self._late = (*self._late[1 - _LATE :], message)
        self._view.link.tell(message)

    def _serve_peer(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """In a thread of its own."""
        try:
            self._serve(connection, request)
        finally:
            self._view.link.row.sent("heal", connection.sent_bytes)

    def _hello(self) -> wire.AnyMessage:
        standing = self._view.driver.standing
        expected = self._view.stages.expected_bytes
        return wire.WorkerHello(member=self._member, step=standing.step, plan=standing.plan, state_bytes=expected)

    def _reconnected(self) -> None:
        """What was handed to a connection that then broke may be lost: say it again."""
        self._rendezvous.repeat()
        for message in (*self._view.driver.standing.messages, *self._late):
            self._view.link.tell(message)

    def _deliver(self, message: wire.AnyMessage) -> None:
        """In the control thread."""
        link = self._view.link
        if isinstance(message, wire.InjectFault):
            pulse = link.row.read()
            plan = self._view.driver.standing.plan
            link.fault_now(message.fault, message.number, pulse.step + 1, pulse.phase, plan)
        elif type(message) in self._aside:
            self._aside[type(message)](message)
        self._rendezvous.observe(message)
        self._executor.deliver(message)

    # ---- what the driver asks

    def _exchange(self, operation: do.Exchange) -> Mapping[int, bytes]:
        tag, plan = operation.tag, self._view.plan
        if tag.kind == "settle":
            self._view.phase("settle", self._view.step, plan)
        elif tag.seq == 0:
            self._view.phase("agree", tag.step, plan)
        return self._view.transport.exchange(tag, operation.payload)

    def _entered(self, effect: do.EnteredPlan) -> None:
        """All have settled. Raises: DeterminismError if the job would begin with something else than it was to."""
        plan, number, link = effect.plan, effect.step, self._view.link
        stages, role = plan.stages_of(self._view.me), plan.role_of(self._view.me)
        stage = stages[0] if stages else None
        link.row.set(generation=plan.generation, step=number)
        link.row.seat(stage, role)
        link.log.entered(plan.generation, number, stage, role)
        begins_after = self._view.driver.config.begins_after
        if number < begins_after:
            raise DeterminismError(
                f"nothing is left of the checkpoint of step {begins_after} that this job began with, or of "
                "later ones: start it anew with --resume-from, in another directory"
            )
