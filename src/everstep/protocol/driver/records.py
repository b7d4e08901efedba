"""Contents of the records of decisions, and the conclusions from them. Pure.

Apart because all members must conclude the same to the bit: a conclusion is a function of the records alone, folded
in lane order. `comparing` draws conclusions from states that differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

from everstep.base.cause import Cause
from everstep.base.errors import InvariantViolation, ProtocolError, check
from everstep.base.extents import Coded, Extents, Runs
from everstep.placement.tree import fold, total_sumsq
from everstep.protocol.driver.nonfinite import APPLIED, FINITE, Nonfinite, NonfiniteRule, judged
from everstep.protocol.driver.policy import COMPARE, END, Due
from everstep.protocol.step_types import Doubt, Holding, Key, LaneSaid, Record

SETTINGS = (
    "modes",
    "requires_grad",
    "flags of torch",
    "hyperparameters",
    "attributes of modules",
    "running statistics",
)
"""Settings of a model; each has `SETTING_BYTES` in the digests of a record, except the last for a model without
them.
"""
SETTING_BYTES = 4


class LaneReport(msgspec.Struct, frozen=True, array_like=True):
    """One computed lane. loss: sum over its samples in units of `weight`; use: digest of its samples. logged: sums and
    counts that the user's loop has given, by name."""

    lane: int
    loss: float
    weight: float
    count: int
    use: int
    logged: dict[str, tuple[float, float]] = {}


class StageSection(msgspec.Struct, frozen=True, array_like=True):
    """Part of an agree record about one of the worker's stages.

    lanes: as computed, at the last stage alone (where the loss is). owned: where runs of blocks of the gradient begin
    and end, each of which one worker of the stage tells of. norms: of each of them the float64 sum of squares,
    unnormalised. ties: further summands, the same from every worker of the stage. buffers: what the lanes did to
    buffers (an encoded `BufferReport` per part of the stage). digest: of the stage's state before this step ("" if not
    due). tied: the same of each parameter (by name) that other stages hold too, with its optimizer state, and of
    segments of the optimizer's state, where the members divide it. settings: digests of how the model is set while the
    step's lanes are computed (modes, flags, hyperparameters, ...), and of the running statistics that they start from,
    by `SETTINGS`; empty if the worker has none. probes: what lanes that several members compute have given here, by
    lane and part of the model.
    """

    stage: int
    lanes: list[LaneReport]
    owned: tuple[int, ...]
    norms: bytes
    ties: list[float]
    buffers: list[bytes]
    digest: str
    tied: dict[str, str] = {}
    settings: bytes = b""
    probes: dict[int, dict[int, LaneSaid]] = {}

    @property
    def runs(self) -> Runs:
        """The blocks of `owned`. Raises: InvariantViolation if these are no runs."""
        if len(self.owned) % 2:
            raise InvariantViolation(f"expected where runs of blocks begin and end, got {self.owned}")
        return tuple((lo, hi) for lo, hi in zip(self.owned[::2], self.owned[1::2], strict=True) if lo < hi)


class AgreePayload(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of the agree record: a section per stage.

    committed_unix_ns: when this worker committed the step before. kept: the newest step of which it has kept, and
    handed on, all snapshots in memory that it is to; 0 if none. save, save_cause: from the job's leader, the tiers that
    take a checkpoint after this step, and why; and, from a member that knows that the job ends, that (`END`). saved:
    from the job's leader, the newest step whose checkpoint counts. nonfinite: how many steps in a row before this one
    were not finite, as far as this worker knows. asked: tickets of joiners that wait for this worker and others.
    """

    sections: list[StageSection]
    committed_unix_ns: int = 0
    kept: int = 0
    save: tuple[tuple[str, ...], str] = ((), "")
    save_cause: Cause = Cause.UNKNOWN
    saved: int = 0
    nonfinite: int = 0
    asked: tuple[int, ...] = ()

    def stamped(
        self,
        committed_unix_ns: int,
        kept: int,
        due: Due,
        saved: int = 0,
        nonfinite: int = 0,
        asked: tuple[int, ...] = (),
    ) -> AgreePayload:
        """The same payload with: time of the step before's commit, newest kept step, due tiers, newest saved step,
        non-finite steps, and tickets."""
        said: dict[str, Any] = {"save": (tuple(due.tiers), due.reason), "save_cause": due.cause, "saved": saved}
        said |= {"nonfinite": nonfinite, "asked": asked}
        return msgspec.structs.replace(self, committed_unix_ns=committed_unix_ns, kept=kept, **said)


class GatherPayload(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of a gather after a step. data: the application's. ends: its loop is over. states: then,
    statements about the state that this worker holds (only digests in each section)."""

    data: bytes
    committed_unix_ns: int
    ends: bool = False
    states: list[StageSection] = []


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step by its records, the same at every worker.

    workers: the worker that computed each lane (at the last stage). loss: mean over the global weight. weight: of
    the global batch. sumsq: sum of squares of the whole model's unnormalised gradient, NaN without norms. buffers:
    by stage, the encoded reports of every worker there, one per part. digests: of the state before the step, by
    stage and worker, if they were due; ties: digests of the copies of each parameter that several stages hold, and
    of model settings that differ, by name and (stage, worker). kept: the newest step whose snapshots are in memory
    in all stages. save, save_cause, saved: as in `AgreePayload`. probes: by lane and part of the model, the results
    of the members that computed it, by worker. nonfinite: the verdict on values that are not finite.
    """

    step: int
    lanes: tuple[LaneReport, ...]
    workers: Mapping[int, int]
    loss: float
    weight: float
    sumsq: float
    buffers: Mapping[int, tuple[tuple[bytes, ...], ...]]
    digests: Mapping[int, Mapping[int, str]]
    kept: int = 0
    save: tuple[tuple[str, ...], str] = ((), "")
    save_cause: Cause = Cause.UNKNOWN
    ties: Mapping[str, Mapping[tuple[int, int], str]] = field(default_factory=dict)
    nonfinite: Nonfinite = FINITE
    saved: int = 0
    probes: Mapping[tuple[int, int], Mapping[int, LaneSaid]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(report.count for report in self.lanes)

    def logged(self) -> dict[str, float]:
        """Means of the values that the user's loop has given, over all lanes that have them, folded in the order of the
        lanes; by name. NaN where nothing was counted."""
        found: dict[str, float] = {}
        for name in sorted({name for report in self.lanes for name in report.logged}):
            given = {report.lane: report.logged[name] for report in self.lanes if name in report.logged}
            total, count = fold(len(self.lanes), given, lambda a, b: (a[0] + b[0], a[1] + b[1]))
            found[name] = total / count if count else math.nan
        return found

    @property
    def compares(self) -> bool:
        """Whether all members compare their states before the next step."""
        return COMPARE in self.save[0]

    @property
    def ends(self) -> bool:
        """Whether all members save this step and leave."""
        return END in self.save[0]


_agree = msgspec.msgpack.Decoder(AgreePayload)
_gather = msgspec.msgpack.Decoder(GatherPayload)
_record = msgspec.msgpack.Decoder(Record)
_records = msgspec.msgpack.Decoder(dict[int, Record])


def encode(said: AgreePayload | GatherPayload | Record | Mapping[int, Record]) -> bytes:
    """The payload of a `Record`; a record for one exchange; or all records of a decision, by worker id."""
    return msgspec.msgpack.encode(said)


def conclude(step: int, n_lanes: int, records: Mapping[int, Record], rule: NonfiniteRule = APPLIED) -> StepOutcome:
    """Fold the records of one agree, in lane and block order, and judge values that are not finite by the rule.
    Raises: ProtocolError, InvariantViolation if they are not the records of the step."""
    payloads = {worker_id: _decoded(_agree, records[worker_id].payload) for worker_id in sorted(records)}
    named = [section.stage for payload in payloads.values() for section in payload.sections]
    stages = 1 + max(named, default=-1)
    if set(named) != set(range(min(stages, len(named)))):
        raise ProtocolError(f"expected sections of all stages in the records of step {step}, got those of {named[:8]}")
    sections: list[dict[int, StageSection]] = [{} for _ in range(stages)]
    for worker_id, payload in payloads.items():
        for section in payload.sections:
            sections[section.stage][worker_id] = section
    reports: dict[int, LaneReport] = {}
    workers: dict[int, int] = {}
    for worker_id, section in sections[-1].items():
        for report in section.lanes:
            if report.lane in reports:
                raise InvariantViolation(f"lane {report.lane} of step {step} was counted twice")
            reports[report.lane] = report
            workers[report.lane] = worker_id
    if sorted(reports) != list(range(n_lanes)):
        raise InvariantViolation(f"step {step} lacks lanes: got {sorted(reports)} of {n_lanes}")
    lanes = tuple(reports[lane] for lane in range(n_lanes))
    used = {r.lane: r for r in lanes if r.count > 0}
    due = sorted((p for p in payloads.values() if p.save[0]), key=lambda p: END not in p.save[0])[:1]
    weight = fold(n_lanes, {k: r.weight for k, r in used.items()}, lambda a, b: a + b)
    loss = fold(n_lanes, {k: r.loss for k, r in used.items()}, lambda a, b: a + b)
    sumsq = _sumsq(sections)
    normed = any(section.norms for stage in sections for section in stage.values())
    return StepOutcome(
        step=step,
        lanes=lanes,
        workers=workers,
        loss=loss / weight if weight else math.nan,
        weight=weight,
        sumsq=sumsq,
        buffers={k: tuple(tuple(s.buffers) for s in stage.values()) for k, stage in enumerate(sections)},
        digests={k: {w: s.digest for w, s in stage.items() if s.digest} for k, stage in enumerate(sections)},
        kept=min(p.kept for p in payloads.values()),
        save=due[0].save if due else ((), ""),
        save_cause=due[0].save_cause if due else Cause.UNKNOWN,
        ties=_ties(sections),
        nonfinite=judged(
            step,
            tuple(k for k, r in used.items() if not math.isfinite(r.loss) or not math.isfinite(r.weight)),
            max(p.nonfinite for p in payloads.values()),
            rule,
            gradient=not normed or math.isfinite(sumsq),
        ),
        saved=max(p.saved for p in payloads.values()),
        probes=_probes(sections),
    )


def _probes(sections: Sequence[Mapping[int, StageSection]]) -> dict[tuple[int, int], dict[int, LaneSaid]]:
    found: dict[tuple[int, int], dict[int, LaneSaid]] = {}
    for worker_id, section in (one for stage in sections for one in stage.items()):
        for lane, parts in section.probes.items():
            for part, said in parts.items():
                found.setdefault((lane, part), {})[worker_id] = said
    return found


def _ties(sections: Sequence[Mapping[int, StageSection]]) -> dict[str, dict[tuple[int, int], str]]:
    found: dict[str, dict[tuple[int, int], str]] = {}
    for stage, said in enumerate(sections):
        for worker_id, section in said.items():
            for name, digest in section.tied.items():
                found.setdefault(copy_of(name), {})[stage, worker_id] = digest
        found |= _settings(stage, {w: section.settings for w, section in said.items() if section.settings})
    return found


def segment_name(stage: int, number: int) -> str:
    """Name under which the holders of a segment of the optimizer's state state its digest."""
    return f"{_SEGMENT}{number} of stage {stage}"


def copy_of(name: str) -> str:
    """Words for a state that has several copies."""
    return f"the optimizer's state, {name}," if name.startswith(_SEGMENT) else f"the tied parameter {name}"


_SEGMENT = "segment "


def _settings(stage: int, said: Mapping[int, bytes]) -> dict[str, dict[tuple[int, int], str]]:
    """Settings that differ, by name; empty if none do."""
    found = {}
    for k, label in enumerate(SETTINGS if len(set(said.values())) > 1 else ()):
        at = slice(k * SETTING_BYTES, (k + 1) * SETTING_BYTES)
        found[f"how the script has set the model ({label})"] = {(stage, w): d[at].hex() for w, d in said.items()}
    return found


def _sumsq(stages: Sequence[Mapping[int, StageSection]]) -> float:
    """Sum over all stages, exact for any number of them."""
    values: list[float] = []
    ties: list[float] = []
    for stage in stages:
        check(len(stage) > 0, "every stage has a section in some record")
        told: dict[tuple[int, int], Sequence[float]] = {}
        for section in stage.values():
            if section.runs and not section.norms:
                return math.nan
            said, at = memoryview(section.norms).cast("d"), 0
            for lo, hi in section.runs:
                told[lo, hi], at = said[at : at + hi - lo], at + hi - lo
            check(at == len(said), f"expected norms of {at} blocks, got {len(said)}")
        end = 0
        for (lo, hi), norms in sorted(told.items(), key=itemgetter(0)):
            check(lo == end, f"block norms begin at {lo}, expected {end}")
            values.extend(norms)
            end = hi
        ties.extend(next(iter(stage.values())).ties)
    return total_sumsq(values) + total_sumsq(ties)


def committed_unix_ns(records: Mapping[int, Record], is_agree: bool) -> int:
    """When the first worker committed the step before this decision; 0 if unknown."""
    payloads = [records[w].payload for w in sorted(records)]
    times = [(_decoded(_agree, p) if is_agree else _decoded(_gather, p)).committed_unix_ns for p in payloads]
    return min((t for t in times if t), default=0)


def asked_in(records: Mapping[int, Record]) -> dict[int, frozenset[int]]:
    """By ticket of a joiner, the workers that say in the records of a step that it has asked them."""
    said = {w: _decoded(_agree, record.payload).asked for w, record in records.items()}
    return {t: frozenset(w for w in said if t in said[w]) for tickets in said.values() for t in tickets}


def last_states(records: Mapping[int, Record]) -> dict[int, list[StageSection]]:
    """Statements about the last state in the records of a gather, by worker id."""
    return {w: states for w in sorted(records) if (states := _decoded(_gather, records[w].payload).states)}


def gathered(records: Mapping[int, Record]) -> dict[int, bytes]:
    """Data of a gather by worker id."""
    return {w: _decoded(_gather, records[w].payload).data for w in sorted(records)}


def ends(records: Mapping[int, Record]) -> set[bool]:
    """Whether the members' loops are over, by the records of a gather; both values if they disagree."""
    return {_decoded(_gather, record.payload).ends for record in records.values()}


class _Held(msgspec.Struct, frozen=True, array_like=True):
    position: tuple[int, int]
    gradient_step: int
    digest: str
    records: dict[int, Record]
    stages: dict[int, Coded]
    lacking: tuple[int, ...]
    snapshots: dict[tuple[int, int], Coded]
    disk: tuple[int, ...]
    gradients: dict[int, Coded]
    sound: int = -1
    first: dict[int, str] = {}
    built: dict[int, str] = {}
    trust: tuple[bool, bool, Doubt | None] = (False, False, None)  # fresh, proven, doubt
    loop: tuple[int, int] = (-1, -1)  # heard, stays_at
    gathered: tuple[str, str] | None = None


_held = msgspec.msgpack.Decoder(_Held)


_ALIKE = (
    *("gradient_step", "digest", "records", "lacking", "disk", "sound"),
    *("first", "built"),
)
_BLOCKS = ("stages", "snapshots", "gradients")


_T = TypeVar("_T")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """Raises: ProtocolError if this is not a member's message."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"expected what another member states: {str(error)[:200]!a}") from None


def decode_record(data: bytes) -> Record:
    """Inverse of `encode` for one record."""
    return _decoded(_record, data)


def decode_records(data: bytes) -> dict[int, Record]:
    """Inverse of `encode` for the records of a decision."""
    return _decoded(_records, data)


def encode_holding(holding: Holding) -> bytes:
    """A holding for the exchange in which members settle."""
    alike = {name: getattr(holding, name) for name in _ALIKE}
    alike |= {name: {k: there.encoded() for k, there in getattr(holding, name).items()} for name in _BLOCKS}
    alike["loop"] = holding.heard, holding.stays_at
    alike["gathered"] = holding.gathered if holding.gathered[0] else None
    alike["trust"] = holding.fresh, holding.proven, holding.doubt if holding.doubt.step else None
    return msgspec.msgpack.encode(_Held(position=holding.position, **alike))


def decode_holding(data: bytes) -> Holding:
    """Inverse of `encode_holding`. Raises: ProtocolError if this is none."""
    held = _decoded(_held, data)
    try:
        blocks = {name: {k: Extents.decoded(c) for k, c in getattr(held, name).items()} for name in _BLOCKS}
    except (InvariantViolation, ValueError) as error:
        raise ProtocolError(f"expected what another member holds: {str(error)[:200]!a}") from None
    alike = {name: getattr(held, name) for name in _ALIKE} | blocks
    alike["fresh"], alike["proven"], doubt = held.trust
    alike["doubt"] = doubt or Doubt()
    alike["heard"], alike["stays_at"] = held.loop
    alike["gathered"] = held.gathered or ("", "")
    return Holding(position=Key(*held.position), **alike)
