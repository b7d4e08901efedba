"""Plans go over a connection as what has changed, and arrive as they were sent."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import msgspec
import pytest

from everstep.base.cause import Cause
from everstep.base.errors import ProtocolError
from everstep.base.extents import Extents
from everstep.base.plan import Member, Plan, Rank, Seat, Shard
from everstep.placement.lanes import place
from everstep.protocol.messages import AnyMessage, Heal, PlanNow, PlanPrepared, PlanTold, Pong, decode, encode
from everstep.protocol.messages_base import FilePiece, FilePieces, FilesHeld
from everstep.protocol.telling import Listener, heard, stand_in, told
from everstep.runtime.link.wire import Frames, inflate


def _member(i: int, life: int = 0, host: str = "") -> Member:
    return Member(i, life, host or f"host-{i // 8}", 1000 + i, f"10.0.0.1:{10000 + i}", f"seg-{i}-{life}")


def _plan(generation: int, members: list[Member], seats: tuple[Seat, ...] = (), **more: object) -> Plan:
    seats = seats or place([m.worker_id for m in members], 2 * len(members))
    lanes = sum(len(s.lanes) for s in seats if s.stage == 0)
    return Plan(generation, f"plan {generation}", tuple(members), seats, lanes, **more)  # type: ignore[arg-type]


def _over_the_wire(frames: list[tuple[bytes, bytes]], end: Listener) -> list[AnyMessage]:
    found = []
    for data, _ in frames:
        body = inflate(data[4:]) if data[0] & 0x80 else data[4:]
        message = end.take(decode(body))
        if message is not None:
            found.append(message)
    return found


def _changed(plan: Plan, draw: random.Random) -> Plan:
    """Any next plan: members lost, replaced, new or elsewhere, in one stage or several, lanes anew or repaired."""
    members = [m for m in plan.members if draw.random() < 0.8] or list(plan.members[:1])
    members = [_member(m.worker_id, m.incarnation + 1) if draw.random() < 0.2 else m for m in members]
    members = [replace(m, domains=(("rack", "r1"),)) if draw.random() < 0.1 else m for m in members]
    members = [replace(m, limbs=(Rank(7, "a", "b"),)) if draw.random() < 0.1 else m for m in members]
    for i in range(40, 40 + draw.randrange(4)):
        members.append(_member(i))
    members = sorted({m.worker_id: m for m in members}.values(), key=lambda m: m.worker_id)
    ids, stages = [m.worker_id for m in members], draw.choice([1, 1, min(2, len(members))])
    seats = place(ids, 64, stages=stages, previous=plan.seats if stages == plan.stages and draw.random() < 0.7 else ())
    return Plan(
        generation=plan.generation + draw.randrange(1, 3),
        reason=f"reason {draw.random()}",
        members=tuple(members),
        seats=seats,
        lanes=64,
        stages=stages,
        speeds=draw.choice([(), plan.speeds, tuple((i, draw.random()) for i in ids)]),
        previous=plan.generation,
        prepared=draw.random() < 0.5,
        joining=tuple(i for i in ids if draw.random() < 0.2),
        leaders=draw.choice([(), (ids[0],) + (None,) * (stages - 1)]),
        save=draw.choice(["", "before the end"]),
        cause=draw.choice(list(Cause)),
        sound=draw.choice([-1, 5]),
        term=plan.term,
        shards=tuple(
            draw.choice(
                [_share(s, draw), *(old for old in plan.shards if (old.worker_id, old.stage) == (s.worker_id, s.stage))]
            )
            for s in sorted(seats, key=lambda s: (s.stage, s.worker_id))
            if draw.random() < 0.4
        ),
    )


def _share(seat: Seat, draw: random.Random) -> Shard:
    of = (("model", 3), ("optimizer/m", 4))
    blocks = [Extents.numbered(of, draw.sample(range(7), draw.randrange(8))) for _ in "ab"]
    return Shard(seat.worker_id, seat.stage, *blocks)


@pytest.mark.parametrize("seed", range(30))
def test_every_plan_arrives_as_it_was_sent(seed: int) -> None:
    draw = random.Random(seed)
    frames, plan = Frames(), _plan(1, [_member(i) for i in range(32)], term=9)
    ends = [(Listener(), None) for _ in range(4)]
    for _ in range(12):
        for k, (end, last) in enumerate(ends):
            if draw.random() < 0.3:  # this one is not told, or it has connected again
                ends[k] = (end, last) if draw.random() < 0.5 else (Listener(), None)
                continue
            message = draw.choice([PlanNow, PlanPrepared])(plan=plan)
            if draw.random() < 0.2:
                message = Heal(ticket=3, plan=plan, donors=[plan.members[0]])
            said, now = frames.of(message, last)
            assert now is plan
            assert _over_the_wire(said, end) == [message]
            ends[k] = (end, now)
        plan = _changed(plan, draw)


def test_one_death_among_thousands_is_said_in_few_bytes() -> None:
    members = [_member(i) for i in range(4000)]
    plan = _plan(1, members)
    left = [m for m in members if m.worker_id != 77]
    after = _plan(2, left, place([m.worker_id for m in left], plan.lanes, previous=plan.seats))
    frames = Frames()
    said, _ = frames.of(PlanNow(plan=after), plan)
    assert sum(len(data) for data, _ in said) < 1000
    again, _ = frames.of(PlanNow(plan=after), plan)
    assert all(one[0] is other[0] for one, other in zip(said, again, strict=True)), "made once for all"


@pytest.mark.parametrize(
    "address",
    ["", ":", "a", "a:", "a:0", "a:00", "a:080", "a:80", "[::1]:80", "a:-1", "a:+1", "a: 1", "a:\u0663", "a:65535"]
    + [f"a:{'9' * digits}" for digits in (5, 6, 19, 20, 100)],
)
def test_any_address_arrives_as_it_was(address: str) -> None:
    """A number of any length is no reason for a message that cannot be made."""
    plan = _plan(1, [replace(_member(i), address=address) for i in range(3)])
    said, _ = Frames().of(PlanNow(plan=plan), None)
    assert _over_the_wire(said, Listener()) == [PlanNow(plan=plan)]


def test_a_plan_that_was_told_is_not_told_again() -> None:
    plan, frames, end = _plan(4, [_member(0)]), Frames(), Listener()
    first, now = frames.of(PlanPrepared(plan=plan), None)
    second, _ = frames.of(Heal(ticket=1, plan=plan, donors=[]), now)
    assert (len(first), len(second)) == (2, 1)
    found = _over_the_wire(first + second, end)
    assert [message.plan for message in found] == [plan, plan]  # type: ignore[attr-defined]


def test_other_messages_pass() -> None:
    said, now = Frames().of(Pong(seq=3), None)
    assert now is None
    assert _over_the_wire(said, Listener()) == [Pong(seq=3)]


def test_a_plan_with_members_speaks_for_itself() -> None:
    message = PlanNow(plan=_plan(1, [_member(0)]))
    assert Listener().take(message) is message


def test_what_follows_no_plan_that_was_told_is_refused() -> None:
    plan, later = _plan(1, [_member(0), _member(1)]), _plan(2, [_member(1)])
    with pytest.raises(ProtocolError, match="expected a plan that was told before, got word of generation 1"):
        Listener().take(PlanNow(plan=stand_in(plan)))
    with pytest.raises(ProtocolError, match=r"since the plan told last \(none\), got 1"):
        Listener().take(told(later, plan))
    end = Listener()
    end.take(PlanTold(plan=plan))
    with pytest.raises(ProtocolError, match="got word of generation 2"):
        end.take(PlanNow(plan=stand_in(later)))
    with pytest.raises(ProtocolError, match="got word of generation 1"):
        end.take(PlanNow(plan=stand_in(replace(plan, term=5))))
    with pytest.raises(ProtocolError, match=r"\(generation 1\), got 7"):
        end.take(PlanTold(plan=later, before=7))


def test_members_out_of_order_are_refused() -> None:
    plan = _plan(1, [_member(0), _member(1)])
    for message in (PlanTold(plan=plan), PlanNow(plan=plan)):
        with pytest.raises(ProtocolError, match="members must be distinct and ascend"):
            decode(encode(message).replace(b"\xa9worker_id\x00", b"\xa9worker_id\x01"))


@pytest.mark.parametrize(
    "change",
    [
        {"speeds": ((0, 2.0), (1, 3.0))},
        {"speeds": ()},
        {"shards": ()},
        {"reason": "nothing else is new"},
    ],
)
def test_changes_of_speeds_and_shares_are_said_as_changes(change: dict[str, object]) -> None:
    """Each by itself: a plan that is said whole would arrive as well, and cost more."""
    share = Shard(1, 0, Extents.numbered((("model", 3),), [0]))
    plan = _plan(1, [_member(0), _member(1)], speeds=((0, 1.0), (1, 1.5)), shards=(share,))
    after = replace(plan, generation=2, **change)  # type: ignore[arg-type]
    saying = told(after, plan)
    assert saying.before == 1 and heard(saying, plan) == after


def test_what_cannot_be_said_as_changes_is_said_whole() -> None:
    plan = _plan(1, [_member(0), _member(1)])
    turned = replace(plan, generation=2, seats=tuple(reversed(plan.seats)))
    saying = told(turned, plan)
    assert saying.before == 0 and heard(saying, None) == turned
    assert heard(saying, plan) == turned


def _odd(n: int) -> Plan:
    """A plan with what a column might not hold as it is."""
    addresses = ["", ":", "h:", "h:07", "h:0", "h:00", "fd00::1:443", "[fd00::1]:443", "h:123456", "h:-3", "h:\u0663"]
    limbs = (Rank(7, "h:1", "a"), Rank(8, "h:2", ""))
    members = [
        Member(i * i, i % 3, f"host-{i % 2}", -i, addresses[i % len(addresses)], "x" * (i % 4), limbs[: i % 3])
        for i in range(n)
    ]
    members[0] = replace(members[0], domains=(("rack", "r1"), ("host", "h")))
    seats = [Seat(m.worker_id, 0, "active" if m.worker_id % 2 else "standby", (m.worker_id,)) for m in members]
    return replace(_plan(1, members), seats=tuple(seats))


@pytest.mark.parametrize("n", [1, 2, 9, 30])
def test_whatever_a_plan_has_comes_as_it_was(n: int) -> None:
    saying = told(_odd(n), None)
    heard_as = decode(encode(saying))
    assert isinstance(heard_as, PlanTold) and heard(heard_as, None) == _odd(n)


def test_a_plan_for_thousands_is_small() -> None:
    members = []
    for i in range(4000):
        address, segment = f"10.0.{i // 800}.{i // 8 % 100}", f"{i * 2654435761 % 2**32:08x}"
        members.append(Member(i, 0, f"host-{i // 8}", 1000 + 3 * i, f"{address}:{10000 + i * 7919 % 50000}", segment))
    seats = tuple(Seat(i, 0, "active", (i,)) for i in range(4000))
    plan = replace(_plan(1, members), seats=seats, lanes=4000)
    assert len(zlib.compress(encode(told(plan, None)), 1)) < len(zlib.compress(encode(PlanTold(plan=plan)), 1)) / 2.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker_ids": [1]},
        {"worker_ids": [1, 0]},
        {"hosts": [0, 5]},
        {"hosts": [0, -1]},
        {"ports": []},
        {"segment_chars": [1, 1]},
        {"segment_chars": [-1, 1]},
        {"segment_chars": [1, -1]},
        {"lane_counts": [-1, 5]},
        {"lane_counts": [9, 9]},
        {"seat_roles": [0, 2]},
        {"seat_roles": [-1, 0]},
        {"lanes": []},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(wrong: dict[str, list[int]]) -> None:
    saying = told(_plan(1, [_member(0), _member(1)]), None)
    assert saying.columns is not None
    columns = msgspec.structs.replace(saying.columns, **wrong)
    with pytest.raises(ProtocolError, match="fit together"):
        heard(msgspec.structs.replace(saying, columns=columns), None)


@pytest.mark.parametrize(
    ("held", "number", "rest", "all_there"),
    [
        ({"a": 7, "b": 2}, 3, False, True),
        ({"a": 7, "b": 2, "c": 1}, 3, False, True),
        ({"a": 7, "b": 2}, 3, True, False),
        ({"a": 7, "b": 2}, 2, False, False),
        ({"a": 6, "b": 2}, 3, False, False),
        ({"a": 8, "b": 2}, 3, False, False),
        ({"a": 7}, 3, False, False),
    ],
)
def test_a_directory_is_there_with_all_bytes_of_the_last_pieces(
    held: dict[str, int], number: int, rest: bool, all_there: bool
) -> None:
    pieces = [FilePiece(path="a", version="1", at=4, data=b"abc"), FilePiece(path="b", version="1", at=2)]
    sent = FilePieces(source="s", number=3, pieces=pieces, rest=rest)
    assert FilesHeld(number=number, held=held).has_all(sent) == all_there
