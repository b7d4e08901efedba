"""Members and seats of a plan by columns, the form in which a plan first goes over a control connection. Pure.

The values of one column are similar, so they deflate to a third: a plan for 8,000 workers has 64 kB by columns and
190 kB by rows. Ascending numbers are stored as differences; repeated words as indices.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from operator import sub
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from everstep.base.domains import Domains
from everstep.base.errors import EverstepError, InvariantViolation, ProtocolError
from everstep.base.plan import Member, Plan, Rank, Seat
from everstep.protocol.messages_base import AnyMessage

_T = TypeVar("_T", bound=Hashable)
_ROLES: tuple[Literal["active"], Literal["standby"]] = ("active", "standby")


class PlanColumns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One element for each member, and for each seat. `ports` holds the part of each address after its last colon,
    -1 for none; segments are one string, cut by `segment_chars`; `lanes` holds those of all seats, `lane_counts`
    their numbers."""

    worker_ids: list[int]
    incarnations: list[int]
    pids: list[int]
    host_names: list[str]
    hosts: list[int]
    address_names: list[str]
    addresses: list[int]
    ports: list[int]
    segments: str
    segment_chars: list[int]
    domain_names: list[Domains]
    domains: list[int]
    cells: list[tuple[Rank, ...]]
    limbs: list[int]
    seat_workers: list[int]
    seat_stages: list[int]
    seat_roles: list[int]
    lane_counts: list[int]
    lanes: list[int]


class PlanTold(AnyMessage, frozen=True, kw_only=True):
    """The plan that the messages after this one refer to (`protocol/telling`).

    before: generation of the last plan on this connection; 0: `plan` is whole, except for members and seats if they
    come in `columns`; else `plan` holds the new and changed parts. gone: worker ids of removed members; vacated:
    removed seats, as (stage, worker id). same_speeds: the speeds are unchanged. whole: seats that now hold all of
    their stage, as (stage, worker id).
    """

    plan: Plan
    columns: PlanColumns | None = None
    before: Annotated[int, msgspec.Meta(ge=0)] = 0
    gone: list[int] = msgspec.field(default_factory=list)
    vacated: list[tuple[int, int]] = msgspec.field(default_factory=list)
    same_speeds: bool = False
    whole: list[tuple[int, int]] = msgspec.field(default_factory=list)


def columns_of(plan: Plan) -> PlanColumns:
    """Members and seats of a plan as columns; `filled` is the inverse."""
    members, seats = plan.members, plan.seats
    places = [_split(member.address) for member in members]
    host_names, hosts = _words(member.host for member in members)
    address_names, addresses = _words(name for name, _ in places)
    domain_names, domains = _words(member.domains for member in members)
    cells, limbs = _words(member.limbs for member in members)
    return PlanColumns(
        worker_ids=_steps(member.worker_id for member in members),
        incarnations=[member.incarnation for member in members],
        pids=_steps(member.pid for member in members),
        host_names=host_names,
        hosts=hosts,
        address_names=address_names,
        addresses=addresses,
        ports=[port for _, port in places],
        segments="".join(member.segment for member in members),
        segment_chars=[len(member.segment) for member in members],
        domain_names=domain_names,
        domains=domains,
        cells=cells,
        limbs=limbs,
        seat_workers=_steps(seat.worker_id for seat in seats),
        seat_stages=[seat.stage for seat in seats],
        seat_roles=[_ROLES.index(seat.role) for seat in seats],
        lane_counts=[len(seat.lanes) for seat in seats],
        lanes=_steps(lane for seat in seats for lane in seat.lanes),
    )


def filled(plan: Plan, columns: PlanColumns) -> Plan:
    """The plan with these members and seats. Raises: ProtocolError if the columns do not fit together."""
    try:
        return replace(plan, members=_members(columns), seats=_seats(columns))
    except (ValueError, IndexError, EverstepError, InvariantViolation) as error:
        text = " ".join(str(error).split())[:200]
        raise ProtocolError(f"expected columns of a plan that fit together: {text}") from None


def _members(columns: PlanColumns) -> tuple[Member, ...]:
    ends = list(accumulate(columns.segment_chars, initial=0))
    if ends[-1] != len(columns.segments) or min(columns.segment_chars, default=0) < 0:
        raise ProtocolError(f"segments of {ends[-1]} characters, got {len(columns.segments)}")
    names = _read(columns.address_names, columns.addresses)
    rows = zip(
        accumulate(columns.worker_ids),
        columns.incarnations,
        _read(columns.host_names, columns.hosts),
        accumulate(columns.pids),
        (_joined(name, port) for name, port in zip(names, columns.ports, strict=True)),
        (columns.segments[a:b] for a, b in pairwise(ends)),
        _read(columns.cells, columns.limbs),
        _read(columns.domain_names, columns.domains),
        strict=True,
    )
    return tuple(Member(*row) for row in rows)


def _seats(columns: PlanColumns) -> tuple[Seat, ...]:
    if sum(columns.lane_counts) != len(columns.lanes) or min(columns.lane_counts, default=0) < 0:
        raise ProtocolError(f"{sum(columns.lane_counts)} lanes, got {len(columns.lanes)}")
    lanes = accumulate(columns.lanes)
    roles = _read(_ROLES, _steps(columns.seat_roles))
    rows = zip(accumulate(columns.seat_workers), columns.seat_stages, roles, columns.lane_counts, strict=True)
    return tuple(Seat(worker_id, stage, role, tuple(islice(lanes, n))) for worker_id, stage, role, n in rows)


def _split(address: str) -> tuple[str, int]:
    """An address up to its last colon, and the number behind it; the whole address and -1 if no canonical number
    follows."""
    name, colon, port = address.rpartition(":")
    written = colon and port.isascii() and port.isdigit() and len(port) < 6 and (port[0] != "0" or port == "0")
    return (name, int(port)) if written else (address, -1)


def _joined(name: str, port: int) -> str:
    return name if port < 0 else f"{name}:{port}"


def _steps(numbers: Iterable[int]) -> list[int]:
    """Differences between neighbours, starting from 0."""
    them = list(numbers)
    return list(map(sub, them, [0, *them]))  # the last one has none after it


def _words(found: Iterable[_T]) -> tuple[list[_T], list[int]]:
    """The distinct words, and the index of each found word as differences."""
    numbers: dict[_T, int] = {}
    which = [numbers.setdefault(word, len(numbers)) for word in found]
    return list(numbers), _steps(which)


def _read(words: Sequence[Any], steps: Iterable[int]) -> list[Any]:
    numbers = list(accumulate(steps))
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(words):
        raise ProtocolError(f"numbers of {len(words)} words, got {max(numbers)}")
    return [words[number] for number in numbers]
