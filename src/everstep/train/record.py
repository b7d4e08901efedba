"""What travels in the records of decisions, and what everybody concludes from them.

Apart because both halves must agree to the bit: a conclusion is a function of the records alone, folded in lane order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from everstep.base.errors import check
from everstep.exact.reduce import total_sumsq
from everstep.placement.tree import fold
from everstep.protocol.step_types import Holding, Key, Record


class LaneReport(msgspec.Struct, frozen=True, array_like=True):
    """One lane as computed: `loss` is the sum over its samples in units of `weight`; `use`: digest of its samples."""

    lane: int
    loss: float
    weight: float
    count: int
    use: int


class AgreePayload(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of the agree record.

    norms: float64 sums of squares of the blocks owned[0]..owned[1]-1, unnormalised. buffers: what the lanes did to
    buffers (an encoded `BufferReport`). digest: of the state before this step ("" if not due). committed_unix_ns: when
    this worker committed the step before.
    """

    lanes: list[LaneReport]
    owned: tuple[int, int]
    norms: bytes
    buffers: bytes
    digest: str
    committed_unix_ns: int


class GatherPayload(msgspec.Struct, frozen=True, array_like=True):
    """A worker's part of a gather after a step; `data` belongs to whoever asked for it."""

    data: bytes
    committed_unix_ns: int


@dataclass(frozen=True)
class Outcome:
    """What a step's records say: the same at every worker.

    workers: who computed each lane. loss: mean over the global weight. weight: of the global batch. sumsq: sum of
    squares of the unnormalised gradient, NaN where norms are not computed. samples: how many were used. buffers: every
    worker's encoded report. digests: of the state before the step, by worker, where they were due.
    """

    step: int
    lanes: tuple[LaneReport, ...]
    workers: Mapping[int, int]
    loss: float
    weight: float
    sumsq: float
    samples: int
    buffers: tuple[bytes, ...]
    digests: Mapping[int, str]


_agree = msgspec.msgpack.Decoder(AgreePayload)
_gather = msgspec.msgpack.Decoder(GatherPayload)
_encode = msgspec.msgpack.Encoder().encode


def encode_payload(payload: AgreePayload | GatherPayload) -> bytes:
    """For the payload of a `Record`."""
    return _encode(payload)


def conclude(step: int, n_lanes: int, records: Mapping[int, Record]) -> Outcome:
    """Fold the records of one agree, in lane and block order."""
    payloads = {w: _agree.decode(records[w].payload) for w in sorted(records)}
    reports: dict[int, LaneReport] = {}
    workers: dict[int, int] = {}
    for worker_id, payload in payloads.items():
        for report in payload.lanes:
            check(report.lane not in reports, f"lane {report.lane} of step {step} was counted twice")
            reports[report.lane] = report
            workers[report.lane] = worker_id
    check(sorted(reports) == list(range(n_lanes)), f"step {step} lacks lanes: got {sorted(reports)} of {n_lanes}")
    lanes = tuple(reports[lane] for lane in range(n_lanes))
    used = {r.lane: r for r in lanes if r.count > 0}
    weight = fold(n_lanes, {k: r.weight for k, r in used.items()}, lambda a, b: a + b)
    loss = fold(n_lanes, {k: r.loss for k, r in used.items()}, lambda a, b: a + b)
    return Outcome(
        step=step,
        lanes=lanes,
        workers=workers,
        loss=loss / weight if weight else math.nan,
        weight=weight,
        sumsq=_sumsq(payloads),
        samples=sum(r.count for r in lanes),
        buffers=tuple(p.buffers for p in payloads.values()),
        digests={w: p.digest for w, p in payloads.items() if p.digest},
    )


def _sumsq(payloads: Mapping[int, AgreePayload]) -> float:
    values: list[float] = []
    for payload in sorted(payloads.values(), key=lambda p: p.owned):
        first, last = payload.owned
        if first == last:
            continue
        if not payload.norms:
            return math.nan
        check(first == len(values), f"block norms begin at {first}, expected {len(values)}")
        values.extend(memoryview(payload.norms).cast("d"))
    return total_sumsq(values)


def committed_unix_ns(records: Mapping[int, Record], is_agree: bool) -> int:
    """When the first worker committed the step before this decision; 0 if nobody said."""
    decoder = _agree if is_agree else _gather
    times = [decoder.decode(records[w].payload).committed_unix_ns for w in sorted(records)]
    return min((t for t in times if t), default=0)


def gathered(records: Mapping[int, Record]) -> dict[int, bytes]:
    """The data of a gather by worker id."""
    return {w: _gather.decode(records[w].payload).data for w in sorted(records)}


class _Held(msgspec.Struct, frozen=True, array_like=True):
    step: int
    seq: int
    gradient_step: int
    digest: str
    records: dict[int, tuple[int, bytes]]
    stages: tuple[int, ...] = (0,)
    lacking: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    disk: tuple[int, ...] = ()
    gradient_stages: tuple[int, ...] = (0,)


_held = msgspec.msgpack.Decoder(_Held)


def encode_record(record: Record) -> bytes:
    """For one exchange."""
    return _encode((record.prepared, record.payload))


def decode_record(data: bytes) -> Record:
    """What `encode_record` made."""
    prepared, payload = msgspec.msgpack.decode(data, type=tuple[int, bytes])
    return Record(prepared, payload)


def encode_records(records: Mapping[int, Record]) -> bytes:
    """All records of a decision, by worker id."""
    return _encode({w: (r.prepared, r.payload) for w, r in records.items()})


def decode_records(data: bytes) -> dict[int, Record]:
    """What `encode_records` made."""
    rows = msgspec.msgpack.decode(data, type=dict[int, tuple[int, bytes]])
    return {w: Record(*row) for w, row in rows.items()}


def encode_holding(holding: Holding) -> bytes:
    """For the exchange in which members settle."""
    return _encode(
        _Held(
            step=holding.position.step,
            seq=holding.position.seq,
            gradient_step=holding.gradient_step,
            digest=holding.digest,
            records={w: (r.prepared, r.payload) for w, r in holding.records.items()},
            stages=holding.stages,
            lacking=holding.lacking,
            snapshots=holding.snapshots,
            disk=holding.disk,
            gradient_stages=holding.gradient_stages,
        )
    )


def decode_holding(data: bytes) -> Holding:
    """What `encode_holding` made."""
    held = _held.decode(data)
    return Holding(
        position=Key(held.step, held.seq),
        records={w: Record(*row) for w, row in held.records.items()},
        gradient_step=held.gradient_step,
        digest=held.digest,
        stages=held.stages,
        lacking=held.lacking,
        snapshots=held.snapshots,
        disk=held.disk,
        gradient_stages=held.gradient_stages,
    )
