"""How a journal restores a coordinator's parts. Pure.

Entries are JSON-able dicts with a `kind`: lanes, target, plan, entered, settled, evict, ticket, slot_lost, let_go,
cell, grants, drained, struck, strike_asked, stop, term, ended. Entries of an unknown kind are skipped, so that an older
program can read the common part of a newer journal. Entries that make no sense are skipped, and the rest counts: the
workers supply the missing facts, since their hellos name their plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan, WorkerKey
from everstep.base.strikes import Strike
from everstep.protocol.converter import converter
from everstep.protocol.coordinator.adopting import SENSELESS, check_plan
from everstep.protocol.coordinator.agreement import NO_PLAN
from everstep.protocol.coordinator.asked_checkpoints import Stop
from everstep.protocol.coordinator.grants import Grant
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.types import CoordinatorConfig
from everstep.protocol.messages import JobEnded

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Code = Annotated[int, msgspec.Meta(ge=0, le=255)]


class _Entry(msgspec.Struct, frozen=True, tag_field="kind"):
    cause: str | None = None

    @property
    def because(self) -> Cause:
        return Cause.read(self.cause)


class _Lanes(_Entry, frozen=True, kw_only=True, tag="lanes"):
    lanes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Target(_Entry, frozen=True, kw_only=True, tag="target"):
    target: _Id
    slots: list[_Id]


class _Planned(_Entry, frozen=True, kw_only=True, tag="plan"):
    plan: Plan
    agents: dict[str, str] = {}
    adopted: bool = False


class _Entered(_Entry, frozen=True, kw_only=True, tag="entered"):
    generation: _Count


class _Settled(_Entry, frozen=True, kw_only=True, tag="settled"):
    generation: _Count


class _Evicted(_Entry, frozen=True, kw_only=True, tag="evict"):
    worker_id: _Id
    incarnation: _Count
    again: bool = False


class _Ticket(_Entry, frozen=True, kw_only=True, tag="ticket"):
    ticket: _Count


class _SlotLost(_Entry, frozen=True, kw_only=True, tag="slot_lost"):
    worker_id: _Id
    reason: str


class _LetGo(_Entry, frozen=True, kw_only=True, tag="let_go"):
    worker_id: _Id
    agent_id: str
    process: str
    reason: str


class _Cell(_Entry, frozen=True, kw_only=True, tag="cell"):
    worker_id: _Id
    ranks: _Count
    wide: _Count = 0


class _Grants(_Entry, frozen=True, kw_only=True, tag="grants"):
    agent_id: str
    host: str
    process: str
    slots: list[_Id]
    first: list[_Count]


class _Drained(_Entry, frozen=True, kw_only=True, tag="drained"):
    agent_id: str
    process: str


class _StruckBefore(_Entry, frozen=True, kw_only=True, tag="struck"):
    index: _Count


class _StrikeAsked(_Entry, frozen=True, kw_only=True, tag="strike_asked"):
    strike: Strike


class _Stop(_Entry, frozen=True, kw_only=True, tag="stop"):
    reason: str
    exit_code: _Code
    grace_ns: _Count


class _Term(_Entry, frozen=True, kw_only=True, tag="term"):
    """The job was taken over by hand."""


class _Ended(_Entry, frozen=True, kw_only=True, tag="ended"):
    state: Literal["completed", "failed", "interrupted"]
    reason: str
    exit_code: _Code

    @property
    def told(self) -> JobEnded:
        return JobEnded(state=self.state, cause=self.because, reason=self.reason, exit_code=self.exit_code)


class _Damaged(_Entry, frozen=True, kw_only=True, tag="damaged"):
    """In place of a line of a file that cannot be read."""

    def __post_init__(self) -> None:
        raise ValueError("its line is damaged")


DAMAGED: Final = {"kind": _Damaged.__struct_config__.tag}
"""Entry that stands for one that cannot be read: it makes no sense, and the rest counts."""
_READ = {kind.__struct_config__.tag: converter(kind) for kind in _Entry.__subclasses__()}


def restore(config: CoordinatorConfig, journal: Iterable[dict[str, Any]]) -> tuple[JobState, bool, list[str]]:
    """The job that the journal describes, whether the journal had any entry, and what is wrong with the skipped
    ones."""
    entries, aside = _read(journal)
    found = bool(entries or aside)
    while True:
        job = JobState(config)
        wrong = _apply(job, entries)
        if wrong is None:
            break
        number, text = wrong  # it may have taken effect in part: start over without it
        del entries[number]
        aside[number] = text
    if job.agreement.plan is not NO_PLAN:
        _look_for_members(job)
    return job, found, [f"entry {number}: {text}" for number, text in sorted(aside.items())]


def sensible(journal: Iterable[dict[str, Any]]) -> bool:
    """Whether each entry is well-formed, as far as one entry can show."""
    return not _read(journal)[1]


def end_in(journal: Iterable[dict[str, Any]]) -> JobEnded | None:
    """How the job ended, None if the journal does not say so."""
    said = [entry for entry in _read(journal)[0].values() if isinstance(entry, _Ended)]
    return said[0].told if said else None


def _read(journal: Iterable[dict[str, Any]]) -> tuple[dict[int, _Entry | None], dict[int, str]]:
    """Entries by number from 1 on, None for an unknown kind; and the faults of the others."""
    entries: dict[int, _Entry | None] = {}
    aside: dict[int, str] = {}
    for number, found in enumerate(journal, 1):
        try:
            read = _READ.get(found.get("kind"))
            entries[number] = None if read is None else read(found)
        except SENSELESS as error:
            aside[number] = _words(error)
    return entries, aside


def _apply(job: JobState, entries: dict[int, _Entry | None]) -> tuple[int, str] | None:
    """Returns the first entry that contradicts the entries before it, and why; None if none does."""
    for number, entry in entries.items():
        try:
            _take(job, entry)
        except SENSELESS as error:
            return number, _words(error)
    return None


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _take(job: JobState, entry: _Entry | None) -> None:
    match entry:
        case _Lanes():
            job.env.takes_lanes(entry.lanes)
        case _Target():
            job.slots.take_wish(entry.target, set(entry.slots), entry.because)
        case _Planned():
            _take_plan(job, entry)
        case _Entered() | _Settled():
            _take_entered(job, entry)
        case _Evicted():
            key = WorkerKey(entry.worker_id, entry.incarnation)
            job.membership.replay_evict(key, entry.because, again=entry.again)
        case _Ticket():
            job.healing.replay_ticket(entry.ticket)
        case _SlotLost() | _LetGo() | _Cell():
            _take_fate(job, entry)
        case _Grants():
            for worker_id, first in zip(entry.slots, entry.first, strict=True):
                job.slots.grants.replay(
                    worker_id, Grant(entry.agent_id, entry.host, entry.process, first, restored=True)
                )
        case _Drained():
            job.agents.replay_drained(entry.agent_id, entry.process)
        case _StruckBefore():
            job.earlier_targets.replay(entry.index)
        case _StrikeAsked():
            job.earlier_targets.replay_asked(entry.strike)
        case _Stop() | _Term() | _Ended():
            _take_end(job, entry)


def _take_fate(job: JobState, entry: _SlotLost | _LetGo | _Cell) -> None:
    slots = job.slots
    match entry:
        case _SlotLost():
            slots.replay_lost(entry.worker_id, entry.reason)
        case _LetGo():
            why = Why(entry.because, entry.reason)
            slots.owners.give_up(entry.worker_id, entry.agent_id, entry.process, why)
        case _:
            slots.cells.replay(entry.worker_id, entry.ranks, entry.wide)


def _take_entered(job: JobState, entry: _Entered | _Settled) -> None:
    if isinstance(entry, _Entered):
        job.progress.closed(job.agreement.replay_entered(entry.generation), journaled=True)
    else:
        job.progress.replay_settled(entry.generation)


def _take_end(job: JobState, entry: _Stop | _Term | _Ended) -> None:
    match entry:
        case _Stop():
            job.saving.replay_stop(Stop(Why(entry.because, entry.reason), entry.exit_code, entry.grace_ns))
        case _Term():  # who takes a job over wants it to go on
            job.saving.replay_stop(None)
        case _:
            job.progress.replay_ended(entry.told)


def _take_plan(job: JobState, entry: _Planned) -> None:
    plan = entry.plan
    check_plan(plan, job.env.config)
    if job.agreement.replay_plan(plan, adopted=entry.adopted):
        job.speeds.replay_plan(plan)
        job.progress.take_up(plan)
        for member in plan.members:
            job.membership.restore(member, entry.agents.get(str(member.worker_id)))


def _look_for_members(job: JobState) -> None:
    agreement, membership = job.agreement, job.membership
    wanted = {m.key for plan in (agreement.plan, agreement.prepared) if plan is not None for m in plan.members}
    membership.keep_only(wanted)
    job.slots.restore(key.worker_id for key in wanted)
    lost = sorted(key for key in wanted if membership.alive(key) is None)
    if lost:
        names = ", ".join(str(key) for key in lost)
        why = f"members evicted before the coordinator restarted: {names}"
        agreement.break_off(Why(membership.fenced_for(lost[0].worker_id), why))
