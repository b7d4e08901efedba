"""How plans go over a control connection: each as what has changed since the last that went over the same one. Pure.

A plan for 8,000 workers has 1.2 MB, or 64 kB by columns and deflated (`columns`). Sent whole to each of them that is
0.5 GB, which is too much for each generation; sent once to each of 1,000 hosts it would be 64 MB, and agents would have
to pass it on, and somebody to notice where they do not. So it goes whole only to who has none yet. Two plans that
follow each other differ in few members and seats: what has changed has some hundred bytes, whatever the size of the
job. A connection keeps the order of what is said, and its end forgets all of it. So nobody has to acknowledge a plan;
and whoever connects again names the one that it has (`following`), and hears of the next as a change of that.

What says a plan is `PlanTold`; the message after it bears a stand-in, the same plan without members, so that it is
small and alike for all who are told it.
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
    """What a message bears in the place of a plan that was told before it."""
    nothing: dict[str, Any] = {"reason": "", "cause": Cause.UNKNOWN, "members": (), "seats": (), "lanes": 0}
    return Plan(generation=plan.generation, term=plan.term, **nothing)


def parts_of(message: AnyMessage, before: Plan | None) -> tuple[list[AnyMessage], Plan | None]:
    """What goes over a connection, over which `before` was told last, to say this message; and the plan that is the
    last one from then on."""
    if not isinstance(message, WithPlan):
        return [message], before
    short: AnyMessage = msgspec.structs.replace(message, plan=stand_in(message.plan))
    return [short] if message.plan is before else [told(message.plan, before), short], message.plan


def told(plan: Plan, before: Plan | None) -> PlanTold:
    """How to say a plan over a connection over which `before` went last; None: it is the first one."""
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
    """The plan that is told, to whoever was told `before` last. Raises: ProtocolError if it cannot be."""
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
    """The end of a connection that is told plans: makes of what comes what was meant.

    plan: that was named in the hello, so that what is told first may be what has changed since.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan

    def take(self, message: AnyMessage) -> AnyMessage | None:
        """The message with its plan; None if it only tells of which plan the next ones speak.

        Raises: ProtocolError if a message speaks of a plan that was not told.
        """
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
