"""Output of a driver: effects in order, at most one operation, and messages that may have to be repeated. Pure.

Also what the driver's parts share: durations of a recovery's phases, and the gathers of the present step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from everstep.base.errors import InvariantViolation
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import ends
from everstep.protocol.step_types import Key, Record


class Situation(msgspec.Struct, frozen=True):
    """Facts for a coordinator that has missed messages: messages to repeat, and facts for the hello.

    step, stages: the state that this worker has completely. plan: the newest plan that it follows. prepared:
        generation of the newest plan that it may switch to, 0 if none. settled: in the plan that it follows.
    """

    step: int = 0
    stages: tuple[int, ...] = ()
    plan: Plan | None = None
    prepared: int = 0
    settled: bool = False
    messages: tuple[wire.AnyMessage, ...] = ()


class Outbox:
    """Collects effects while an event is handled. operation: the outstanding one."""

    def __init__(self, me: WorkerKey) -> None:
        self.me = me
        self.operation: do.Operation | None = None
        self.lasting: tuple[wire.AnyMessage, ...] = ()
        self.times = Times()
        self._effects: list[do.Effect] = []
        self._count = 0

    def put(self, effect: do.Effect) -> None:
        """Add an effect, which is carried out at once."""
        self._effects.append(effect)

    def start(self, make: type[do.Operation], generation: int, *args: Any) -> None:
        self._count += 1
        self.operation = make(self._count, generation, *args)
        self.times.begin()
        self._effects.append(self.operation)

    def answered(self, number: int) -> do.Operation:
        """The outstanding operation has ended. Raises: InvariantViolation for any other."""
        operation, self.operation = self.operation, None
        if operation is None or operation.op != number:
            raise InvariantViolation(f"operation {number} was answered, outstanding is {operation}")
        return operation

    def tell(self, kind: Callable[..., wire.AnyMessage], *, lasting: bool = True, **fields: Any) -> None:
        """Send a message to the coordinator in this worker's name. lasting: it is repeated to a coordinator that
        missed it."""
        self.send(self.signed(kind, **fields), lasting=lasting)

    def signed(self, kind: Callable[..., wire.AnyMessage], **fields: Any) -> wire.AnyMessage:
        """A message with this worker's key."""
        return kind(worker_id=self.me.worker_id, incarnation=self.me.incarnation, **fields)

    def send(self, message: wire.AnyMessage, *, lasting: bool = True) -> None:
        """Send a message as it is to the coordinator."""
        if lasting:
            self.lasting = (*(m for m in self.lasting if type(m) is not type(message)), message)
        self._effects.append(do.Tell(message))

    def forget_lasting(self) -> None:
        """Forget the messages that were to be repeated."""
        self.lasting = ()

    def withdraw(self, kind: type[wire.AnyMessage]) -> None:
        """Forget messages of this kind that were to be repeated."""
        self.lasting = tuple(m for m in self.lasting if type(m) is not kind)

    def drain(self) -> list[do.Effect]:
        effects, self._effects = self._effects, []
        return effects


class Times:
    """Durations of the phases of a recovery. Times are monotonic, in ns."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._arrived = (0, 0)
        self._began_ns = 0
        self._phases_ms: dict[str, float] = {}

    def tick(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def plan_arrived(self, generation: int, arrived_ns: int) -> None:
        """Note when the plan of a generation came to this process; a plan that is not taken does not count."""
        self._arrived = (generation, arrived_ns)

    def begin(self) -> None:
        self._began_ns = self.now_ns

    def freed(self, generation: int) -> None:
        """The work for the generation before this one has been cut."""
        arrived_in, arrived_ns = self._arrived
        if arrived_in == generation:
            self._phases_ms["unblock"] = (self.now_ns - arrived_ns) / 1e6

    def note(self, phase: str) -> None:
        """Count the time of the operation that has just ended under this phase."""
        self._phases_ms[phase] = (self.now_ns - self._began_ns) / 1e6

    def taken(self) -> dict[str, float]:
        """Durations since the last generation, in ms by phase."""
        taken, self._phases_ms = self._phases_ms, {}
        return taken


class Gathers:
    """Records of the decisions of the present step, by key. They answer the application's gathers."""

    def __init__(self) -> None:
        self.known: dict[Key, Mapping[int, Record]] = {}

    def applied(self, number: int, records: Mapping[int, Record]) -> None:
        """A step was applied, decided by these records (empty if they are not known)."""
        self.known = {Key(number, 0): records} if records else {}

    def decided(self, key: Key, records: Mapping[int, Record]) -> None:
        self.known = {k: v for k, v in self.known.items() if k.step == key.step}
        self.known[key] = records

    def copied(self, gathers: do.GatheredRecords) -> None:
        """The state was copied, together with these records."""
        self.known = dict(gathers)

    def up_to(self, position: Key, records: Mapping[int, Record]) -> do.GatheredRecords:
        """Records up to a position, for a worker that copies the state: they include that position's own, even if
        the application here has not asked for it yet."""
        return {**self.known, position: records} if records else dict(self.known)

    def digests(self, position: Key, records: Mapping[int, Record]) -> tuple[str, str]:
        """Digests of all that was gathered since the step, up to a position with these records, and up to the gather
        before that one; "" if that is nothing."""
        said, digests = blake2b(digest_size=8), ["", ""]
        for key, of in sorted(self.up_to(position, records).items()):
            if (position.step, 0) < key <= position:
                said.update(msgspec.msgpack.encode((key, sorted(of.items()))))
                digests = [said.hexdigest(), digests[0]]
        return digests[0], digests[1]

    def disagrees(self, key: Key) -> bool:
        """Whether, at this decision, the loops of some members were over and those of others were not."""
        return len(ends(self.known.get(key, {}))) > 1

    def of_update(self, number: int) -> Mapping[int, Record]:
        """Records of the decision of the step itself; empty if they are not known."""
        return self.known.get(Key(number, 0), {})
