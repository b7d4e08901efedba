"""How plans go over a control connection: each as the change from the plan before it on the same connection. Pure.

A plan for 8,000 workers has 1.2 MB, or 64 kB by columns and deflated (`columns`). Sent whole to each worker that is
0.5 GB, too much for every generation. Sent once to each of 1,000 hosts it would be 64 MB, but agents would have to
pass it on, and failures of that would have to be noticed. So a plan goes whole only to a receiver that has none.
Consecutive plans differ in few members and seats: the change has some hundred bytes, whatever the size of the job.

A connection keeps the order of messages, and its end forgets all of them. So plans need no acknowledgement; a
receiver that reconnects names the plan that it has (`following`), and gets the next as a change from it.

The message `PlanTold` carries the plan. The message after it carries a stand-in, the same plan without members, so
that it is small and equal for all receivers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from everstep.base.cause import Cause
from everstep.base.errors import ProtocolError
from everstep.base.plan import Member, Plan, Seat, Shard
from everstep.protocol.columns import columns_of, filled
from everstep.protocol.messages import AnyMessage, Heal, PlanNow, PlanPrepared, PlanTold

WithPlan = PlanNow | PlanPrepared | Heal


def stand_in(plan: Plan) -> Plan:
    """The plan that a message carries in place of one that was sent before it."""
    nothing: dict[str, Any] = {"reason": "", "cause": Cause.UNKNOWN, "members": (), "seats": (), "lanes": 0}
    return Plan(generation=plan.generation, term=plan.term, **nothing)


def parts_of(message: AnyMessage, before: Plan | None) -> tuple[list[AnyMessage], Plan | None]:
    """The frames that say this message over a connection on which `before` was sent last, and the plan that is the
    last one after them."""
    if not isinstance(message, WithPlan):
        return [message], before
    short: AnyMessage = msgspec.structs.replace(message, plan=stand_in(message.plan))
    return [short] if message.plan is before else [told(message.plan, before), short], message.plan


def told(plan: Plan, before: Plan | None) -> PlanTold:
    """How to send a plan over a connection on which `before` was sent last; None: none was."""
    if before is None:
        return _whole(plan)
    members, seats = {m.worker_id: m for m in before.members}, {_place(s): s for s in before.seats}
    shards = {_place(s): s for s in before.shards}
    gone = members.keys() - set(plan.worker_ids)
    vacated = seats.keys() - {_place(s) for s in plan.seats}
    same_speeds = plan.speeds == before.speeds
    news = replace(
        plan,
        members=tuple(m for m in plan.members if members.get(m.worker_id) != m),
        seats=tuple(s for s in plan.seats if seats.get(_place(s)) != s),
        speeds=() if same_speeds else plan.speeds,
        shards=tuple(s for s in plan.shards if shards.get(_place(s)) != s),
    )
    saying = PlanTold(
        plan=news,
        before=before.generation,
        gone=sorted(gone),
        vacated=sorted(vacated),
        same_speeds=same_speeds,
        whole=sorted(shards.keys() - {_place(s) for s in plan.shards}),
    )
    return saying if heard(saying, before) == plan else _whole(plan)


def _whole(plan: Plan) -> PlanTold:
    return PlanTold(plan=replace(plan, members=(), seats=()), columns=columns_of(plan))


def heard(saying: PlanTold, before: Plan | None) -> Plan:
    """The plan that a receiver reads from this, after `before`. Raises: ProtocolError if the two do not fit."""
    if not saying.before:
        return saying.plan if saying.columns is None else filled(saying.plan, saying.columns)
    if before is None or before.generation != saying.before:
        known = "none" if before is None else f"generation {before.generation}"
        raise ProtocolError(f"expected what has changed since the plan told last ({known}), got {saying.before}")
    gone, vacated, whole = set(saying.gone), set(saying.vacated), set(saying.whole)
    members: dict[int, Member] = {m.worker_id: m for m in before.members if m.worker_id not in gone}
    seats: dict[tuple[int, int], Seat] = {_place(s): s for s in before.seats if _place(s) not in vacated}
    shards: dict[tuple[int, int], Shard] = {_place(s): s for s in before.shards if _place(s) not in whole}
    members |= {m.worker_id: m for m in saying.plan.members}
    seats |= {_place(s): s for s in saying.plan.seats}
    shards |= {_place(s): s for s in saying.plan.shards}
    return replace(
        saying.plan,
        members=tuple(members[i] for i in sorted(members)),
        seats=tuple(seats[place] for place in sorted(seats)),
        speeds=before.speeds if saying.same_speeds else saying.plan.speeds,
        shards=tuple(shards[place] for place in sorted(shards)),
    )


def _place(seat: Seat | Shard) -> tuple[int, int]:
    return seat.stage, seat.worker_id


class Listener:
    """The receiving end of a connection that carries plans: turns what comes into complete messages. plan: the one
    named in the hello, so that the first plan may come as a change from it."""

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan

    def take(self, message: AnyMessage) -> AnyMessage | None:
        """The message with its plan; None if it only carries the plan of the next messages. Raises: ProtocolError if
        a message needs a plan that was not sent."""
        if isinstance(message, PlanTold):
            self._plan = heard(message, self._plan)
            return None
        if not isinstance(message, WithPlan) or message.plan.members:
            return message
        plan = self._plan
        if plan is None or (plan.generation, plan.term) != (message.plan.generation, message.plan.term):
            raise ProtocolError(
                f"expected a plan that was told before, got word of generation {message.plan.generation}"
            )
        return msgspec.structs.replace(message, plan=plan)
