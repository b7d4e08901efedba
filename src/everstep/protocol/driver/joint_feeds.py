"""How a joiner follows donors of which none has all of a stage. Pure.

The joiner gets the part that it will probably hold (`Heal.shards`): of each segment of the optimizer's state one donor
gives the blocks and then feeds the gradients; one of them feeds what is not dealt out, too. All have to offer the state
of one step. So each says in the records of its steps which tickets it has been asked for, and they offer after the
first step whose records say that all of them have. A new generation ends what was not offered by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.base.errors import check
from everstep.base.extents import Runs
from everstep.base.plan import SEGMENTS, Plan, Seat
from everstep.placement.shards import numbers_of_runs, runs_of_numbers
from everstep.protocol.messages import Heal
from everstep.protocol.moving.giver import JointAsk

FeedGroups = tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...]
"""(donors, stages) of each feed."""


def groups(ticket: Heal) -> FeedGroups:
    """Groups of stages with their donors: one feed for each group. Of a ticket in parts every donor that is named
    feeds; otherwise the first one that can be reached."""
    donors = {m.worker_id: m for m in ticket.donors}
    holders = ticket.holders or [list(donors)] * len(ticket.stages)
    found: dict[tuple[int, ...], list[int]] = {}
    by_stage: Mapping[int, Sequence[int]] = dict(zip(ticket.stages, holders, strict=True))
    parts = segments_fed(ticket)
    for stage in sorted(by_stage):
        ids = tuple(i for i in by_stage[stage] if i in donors)
        if stage not in parts:
            found.setdefault(ids[:1] if parts else ids, []).append(stage)
    whole = [(ids, tuple(stages)) for ids, stages in found.items()]
    dealt = [(tuple(of), (stage,)) for stage, of in parts.items()]
    return tuple((tuple(donors[i] for i in ids), stages) for ids, stages in (*whole, *dealt))


def segments_fed(ticket: Heal) -> dict[int, dict[int, Runs]]:
    """By stage that the joiner gets in part, the segments that each donor feeds, by worker id: of as few donors as
    have them, the one that feeds the rest first."""
    donors = [m.worker_id for m in ticket.donors]
    holders = dict(zip(ticket.stages, ticket.holders, strict=False))
    found: dict[int, dict[int, Runs]] = {}
    for shard in sorted((s for s in ticket.shards if s.segments is not None), key=lambda s: s.stage):
        ids = [i for i in holders.get(shard.stage, donors) if i in donors]
        held = {i: ticket.plan.shard(i, shard.stage).segments for i in ids}
        has = {i: numbers_of_runs(((0, SEGMENTS),) if of is None else of) for i, of in held.items()}
        wanted, fed = numbers_of_runs(shard.segments or ()), dict[int, Runs]()
        while wanted and (most := max(ids, key=lambda i: len(has[i] & wanted), default=None)) is not None:
            check(bool(has[most] & wanted), f"segments {sorted(wanted)} of stage {shard.stage} have no donor")
            fed[most] = runs_of_numbers(sorted(has[most] & wanted))
            wanted -= has[most]
        found[shard.stage] = fed or dict.fromkeys(ids[:1], ())
    return found


def coming(ticket: Heal, me: int) -> Plan | None:
    """The plan of the ticket with the seats and parts that the joiner will probably have; None if it gets whole stages
    alone."""
    if not ticket.shards:
        return None
    plan, seats = ticket.plan, [Seat(me, stage, "standby", ()) for stage in ticket.stages]
    return replace(plan, seats=(*plan.seats, *seats), shards=(*plan.shards, *ticket.shards))


def joint_asks(ticket: Heal, me: int) -> tuple[Mapping[int, JointAsk], ...]:
    """What a joiner asks of each donor of each group, by worker id; nothing of a ticket that is not in parts."""
    found, parts = groups(ticket), segments_fed(ticket)
    if not parts:
        return ()
    asked = [member.worker_id for donors, _ in found for member in donors]
    everybody = tuple(sorted(set(asked)))
    return tuple(
        {
            member.worker_id: JointAsk(
                me,
                ticket.ticket,
                everybody,
                asked.count(member.worker_id),
                parts[stages[0]][member.worker_id] if stages[0] in parts else None,
                rest=member is donors[0],
            )
            for member in donors
        }
        for donors, stages in found
    )


class Followers:
    """Joiners that wait for the state of a step boundary. asked: one waits for the next one, whichever that is."""

    def __init__(self) -> None:
        self.asked = False
        self._joint: dict[int, tuple[JointAsk, int]] = {}  # by worker; with the number of its conversations

    @property
    def tickets(self) -> tuple[int, ...]:
        """Those for which this worker has been asked as often as it will be, for the next record."""
        return tuple(sorted(one.ticket for one, came in self._joint.values() if came == one.times))

    def come(self, joint: JointAsk | None) -> None:
        """A conversation has begun; one of a newer ticket makes those before it void."""
        if joint is None:
            self.asked = True
            return
        known, came = self._joint.get(joint.worker, (joint, 0))
        if known.ticket <= joint.ticket:
            self._joint[joint.worker] = joint, came + 1 if known.ticket == joint.ticket else 1

    def ready(self, heard: Mapping[int, frozenset[int]]) -> frozenset[int]:
        """Tickets for which all donors have been asked, by the records of the last step; they are not waited for any
        more. heard: by ticket, the workers that were asked."""
        found = {w: one for w, (one, _) in self._joint.items() if heard.get(one.ticket, frozenset()) >= {*one.donors}}
        self._joint = {w: of for w, of in self._joint.items() if w not in found}
        return frozenset(one.ticket for one in found.values())

    def regroup(self) -> None:
        """A generation begins: joiners that wait for several donors have to ask again."""
        self._joint = {}

    def served(self) -> None:
        """Who waited for any boundary has been given it."""
        self.asked = False
