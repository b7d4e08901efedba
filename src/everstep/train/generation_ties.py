"""One worker's ties to the rest of the job: hello, messages, repeats, meetings of the members, and the end.

Apart from training: nothing here touches a tensor.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.base.config import inexact
from everstep.base.errors import CollectiveAborted, DeterminismError
from everstep.base.foreign import WORKER_MARK
from everstep.base.plan import Divides, Member, Plan
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import gathered
from everstep.protocol.following import PlanAsked, PlanShown, name_of
from everstep.protocol.identity import SAMPLE, Code
from everstep.runtime.link.peer import PeerConnection
from everstep.script.imported import LateImports
from everstep.train.executor import Executor
from everstep.train.first_place import of_plan
from everstep.train.view import WorkerView

_LATE = 4
_FOREVER = 1 << 62


@dataclass(eq=False)
class GenerationTies:
    """Ties between the control connection and the driver.

    serve: answers a peer's request, in a thread of its own. profile: called in the control thread with requests to
    record.
    """

    _view: WorkerView
    _executor: Executor
    _rendezvous: Rendezvous
    _serve: Callable[[PeerConnection, dict[str, Any]], None]
    _profile: Callable[[wire.ProfileNow], None]
    _late: tuple[wire.AnyMessage, ...] = ()
    _placed: bool = False
    _imports: LateImports = field(default_factory=LateImports)
    _samples: Code = field(default_factory=Code)
    _divides: dict[int, Divides] = field(default_factory=dict)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
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
        member = Member(*head, limbs=link.limbs())
        link.row.set(phase="idle")
        self._divides = self._view.stages.divides()
        link.connect(lambda: self._hello(member), self._deliver, self._reconnected)

    def gather(self, data: bytes) -> Mapping[int, bytes]:
        """All members' data, equal at every member. Once the job has ended each worker is alone."""
        alone = {self._view.me: data}
        if self._view.ended:
            return alone
        answer = self._executor.ask(do.GatherAsked(data))
        records = answer.records if isinstance(answer, do.GatherDone) else {}
        return gathered(records) if records else alone

    def members(self) -> tuple[int, tuple[int, ...]]:
        """Own worker id, and the ids of all present members."""
        plan, me = self._view.plan, self._view.me
        return me, plan.worker_ids if plan is not None and not self._view.ended else (me,)

    # ---- from any thread

    def tell(self, message: wire.AnyMessage) -> None:
        """Send a message that is no part of the driver's conversation; it is repeated after a reconnect, too."""
        self._late = (*self._late[1 - _LATE :], message)
        self._view.link.tell(message)

    def _serve_peer(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """Answer a peer's request, in a thread of its own."""
        try:
            self._serve(connection, request)
        finally:
            self._view.link.row.sent("heal", connection.sent_bytes)

    def _hello(self, member: Member) -> tuple[wire.AnyMessage, Plan | None]:
        now = self._view.driver.situation
        hello = wire.WorkerHello(
            member=member,
            step=now.step,
            follows=name_of(now.plan),
            prepared=now.prepared,
            settled=now.settled,
            stages=now.stages,
            state_bytes=self._view.stages.expected_bytes,
            lanes=self._view.config.lanes,
            kernels=self._view.kernels,
            code=self._imports.all().joined(self._samples),
        )
        return hello, now.plan

    def _reconnected(self) -> None:
        """Send messages again: those given to a connection that then broke may be lost."""
        self._rendezvous.repeat()
        for message in (*self._view.driver.situation.messages, *self._late):
            self._view.link.tell(message)
        if self._divides:
            self._view.link.tell(self._divided())

    def _deliver(self, message: wire.AnyMessage) -> None:
        """Take a message, in the control thread."""
        link = self._view.link
        if isinstance(message, PlanAsked):
            me, plan = link.me, self._view.driver.situation.plan
            link.tell(PlanShown(worker_id=me.worker_id, incarnation=me.incarnation, plan=plan))
            return
        if isinstance(message, wire.InjectFault):
            pulse = link.row.read()
            plan = self._view.driver.situation.plan
            asked = (message.fault, message.number, pulse.step + 1, pulse.phase, plan)
            # Who strikes first is asked of the coordinator, whose answer comes to this thread.
            threading.Thread(target=link.fault_now, args=asked, name="everstep-fault", daemon=True).start()
        elif isinstance(message, wire.ProfileNow):
            self._profile(message)
        self._rendezvous.observe(message)
        self._executor.deliver(message)

    # ---- the driver's requests

    def _exchange(self, operation: do.Exchange) -> Mapping[int, bytes]:
        tag, plan = operation.tag, self._view.plan
        if tag.kind == "settle":
            self._view.phase("settle", self._view.step, plan)
        elif tag.seq == 0:
            self._view.phase("agree", tag.step, plan)
        return self._view.transport.exchange(tag, operation.payload)

    def telling_news(self, reduce: Callable[[do.Reduce], Any]) -> Callable[[do.Reduce], Any]:
        """The reduction, with new imports, and what new stages are like, reported before it."""

        def told(operation: do.Reduce) -> Any:
            self._tell_imports(operation.step, operation.plan)
            self._tell_divided()
            return reduce(operation)

        return told

    def _tell_imports(self, step: int, plan: Plan | None) -> None:
        """Report new imports, and samples of the data once they are read (not those of a stream, nor one that differs
        when it is read again): lanes may have been computed with them, so no member gets any of these lanes before the
        coordinator has compared them. Raises: CollectiveAborted if this worker is refused, or a newer plan comes."""
        more, link, seen = self._imports.more(), self._view.link, self._view.position.seen
        samples = Code({f"{SAMPLE}{index}": digest for index, digest in seen.items()})
        if samples != self._samples and not inexact(self._view.config):
            self._samples = samples
            more = (more or Code()).joined(samples)
        if more is None:
            return
        link.tell(wire.Imported(**vars(link.me), code=more))
        if plan is not None and len(plan.members) > 1:
            key = f"generation{plan.generation}/imported/{link.me.worker_id}/{step}"
            self._rendezvous.set_key(key, b"1")
            if self._rendezvous.get_keys([key]) is None:
                raise CollectiveAborted("this worker has other code or data than the others, or a newer plan has come")

    def _tell_divided(self) -> None:
        """Report how the optimizer's state of stages that are new here can be divided."""
        known = {**self._divides, **self._view.stages.divides()}
        if known != self._divides:
            self._divides = known
            self._view.link.tell(self._divided())

    def _divided(self) -> wire.Divided:
        return wire.Divided(**vars(self._view.link.me), stages=self._divides)

    def _entered(self, effect: do.EnteredPlan) -> None:
        """All have settled. Raises: DeterminismError if the job would begin from another state than it should."""
        plan, number, link = effect.plan, effect.step, self._view.link
        stages, role = plan.stages_of(self._view.me), plan.role_of(self._view.me)
        stage = stages[0] if stages else None
        if not self._placed and WORKER_MARK in os.environ:
            self._placed = True
            os.environ.update(of_plan(plan, self._view.me))
        link.row.set(generation=plan.generation, step=number)
        link.row.seat(stage, role)
        link.log.entered(plan.generation, number, stage, role)
        begins_after = self._view.driver.config.begins_after
        if number < begins_after:
            raise DeterminismError(
                f"the checkpoint of step {begins_after} that this job began with is gone, and so are later ones: start "
                "again with --resume-from, in another directory"
            )


class Rendezvous:
    """The store through which connections and NCCL groups meet: kept by the coordinator, per generation.

    Sets and gets keys through control messages; keys begin with "generation<g>/". Two threads meet here: the training
    thread waits for keys; the control thread brings them, or the news that the generation is over, which ends the wait.
    """

    def __init__(self, tell: Callable[[wire.AnyMessage], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._newest = 0
        self._requests = itertools.count(1)
        self._asked: dict[int, wire.StoreGet] = {}
        self._answers: dict[int, list[bytes] | None] = {}
        self._set: dict[str, wire.StoreSet] = {}

    # ---- training thread

    def set_key(self, key: str, value: bytes) -> None:
        """Set a key; returns at once."""
        message = wire.StoreSet(generation=_generation(key), key=key, value=value)
        with self._changed:
            self._set = {k: m for k, m in self._set.items() if m.generation >= message.generation}
            self._set[key] = message
        self._tell(message)

    def get_keys(self, keys: list[str]) -> list[bytes] | None:
        """Values of these keys. Blocks until all are set; None once a newer plan has come."""
        generation = _generation(keys[0])
        request = next(self._requests)
        message = wire.StoreGet(request=request, generation=generation, keys=keys)
        with self._changed:
            self._asked[request] = message
        self._tell(message)
        with self._changed:
            self._changed.wait_for(lambda: request in self._answers or self._newest > generation)
            self._asked.pop(request, None)
            return self._answers.pop(request, None)

    def over(self) -> bool:
        """Whether the job has ended for this worker; a superseded generation is noticed key by key."""
        return self._newest == _FOREVER

    # ---- control thread

    def observe(self, message: wire.AnyMessage) -> None:
        """Take note of each message of the coordinator."""
        with self._changed:
            if isinstance(message, wire.StoreValues):
                if message.request in self._asked:
                    self._answers[message.request] = message.values
            elif isinstance(message, wire.PlanNow):
                self._newest = max(self._newest, message.plan.generation)
            elif isinstance(message, wire.JobEnded | wire.Dismissed):
                self._newest = _FOREVER
            else:
                return
            self._changed.notify_all()

    def repeat(self) -> None:
        """Repeat all requests after a reconnect: a coordinator that was restarted has an empty store."""
        with self._changed:
            again: list[wire.AnyMessage] = [*self._set.values(), *self._asked.values()]
        for message in again:
            self._tell(message)


def _generation(key: str) -> int:
    return int(key.partition("/")[0].removeprefix("generation"))
