"""The shared memory in which a worker offers sums, results and records to its peers: what lies where in it.

    page 0     header and bell (see `mapping`)
    records    exchange 0, exchange 1, nodes, result 0, result 1: small checksummed records
    nodes      `slots` flat gradients of float32: sums of complete subtrees
    results    two flat gradients of float32 (by parity of the step): finished blocks

Order of writes: data, then the record that announces it, its checksum last, then the bell. x86 keeps the order of
stores; elsewhere the barrier inside the futex call orders data before the next record, and a reader that runs ahead of
it sees a checksum that does not fit.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash

from everstep.base.errors import check
from everstep.base.plan import WorkerKey
from everstep.base.ports import Tag
from everstep.parallel.mapping import PAGE, Mapping, MappingFacts, OwnMapping, PeerMapping, pages

EXCHANGE = (0, 1)
NODES = 2
RESULT = (3, 4)

_MAGIC = b"EVERSTP1"
_RECORD = struct.Struct("<QQ40s")
_KEY = struct.Struct("<q16sqq")
_SPARE_SLOTS = 3


def record_key(generation: int, tag: Tag) -> bytes:
    """40 bytes that name a record: who waits for one compares them."""
    kind = tag.kind.encode()
    check(len(kind) <= 16, f"the kind of a tag has at most 16 bytes, got {tag.kind!r}")
    return _KEY.pack(generation, kind, tag.step, tag.seq)


@dataclass(frozen=True)
class Geometry:
    """Where things are in a segment; equal for all members of a job.

    numel: elements of the flat gradient; entries: entries of its layout; record_bytes: capacity of an exchange record.
    """

    numel: int
    entries: int
    n_lanes: int
    record_bytes: int

    @property
    def slots(self) -> int:
        """Node slots: every lane apart, and those that results of the last steps may still occupy."""
        return self.n_lanes + _SPARE_SLOTS

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """Payload bytes of each record."""
        nodes = self.slots * (64 + self.entries)
        return (self.record_bytes, self.record_bytes, nodes, 64, 64)

    @cached_property
    def record_offsets(self) -> tuple[int, ...]:
        offsets = [PAGE]
        for capacity in self.capacities:
            offsets.append(offsets[-1] + pages(_RECORD.size + capacity))
        return tuple(offsets)

    @property
    def flat_bytes(self) -> int:
        return pages(4 * max(self.numel, 1))

    def slot_offset(self, slot: int) -> int:
        return self.record_offsets[-1] + slot * self.flat_bytes

    def result_offset(self, parity: int) -> int:
        return self.slot_offset(self.slots + parity)

    @property
    def size_bytes(self) -> int:
        return self.slot_offset(self.slots + 2)

    @property
    def facts(self) -> MappingFacts:
        return (self.numel, self.entries, self.n_lanes, self.record_bytes)


class _Segment(Mapping):
    """What both sides can find in a segment."""

    geometry: Geometry

    def flat(self, offset: int) -> torch.Tensor:
        """float32 [numel] over the mapping. The tensor keeps the mapping alive, and nothing else has to."""
        if self.geometry.numel == 0:
            return torch.empty(0)
        return torch.frombuffer(self.array(ctypes.c_float, self.geometry.numel, offset), dtype=torch.float32)

    def slot(self, slot: int) -> torch.Tensor:
        check(0 <= slot < self.geometry.slots, f"slot {slot} of {self.geometry.slots}")
        return self.flat(self.geometry.slot_offset(slot))

    def result(self, parity: int) -> torch.Tensor:
        return self.flat(self.geometry.result_offset(parity))

    def read(self, record: int, key: bytes) -> bytes | None:
        """The payload, if the record bears this key and is whole; None otherwise."""
        at = self.geometry.record_offsets[record]
        digest, length, found = _RECORD.unpack_from(self.memory, at)
        if found != key or length > self.geometry.capacities[record]:
            return None
        start = at + _RECORD.size
        payload = self.memory[start : start + length]
        return payload if xxhash.xxh3_64_intdigest(key + payload) == digest else None


class OwnSegment(OwnMapping, _Segment):
    """The segment that this process writes."""

    def __init__(self, me: WorkerKey, geometry: Geometry) -> None:
        self.geometry = geometry
        super().__init__(me, geometry.size_bytes, _MAGIC, geometry.facts)

    def write(self, record: int, key: bytes, payload: bytes) -> None:
        """Publish: everything that the record announces must have been written before."""
        capacity = self.geometry.capacities[record]
        check(len(payload) <= capacity, f"a record of {len(payload)} bytes does not fit into {capacity}")
        at = self.geometry.record_offsets[record]
        start = at + _RECORD.size
        self.memory[start : start + len(payload)] = payload
        _RECORD.pack_into(self.memory, at, xxhash.xxh3_64_intdigest(key + payload), len(payload), key)
        self.ring()

    def forget_slot(self, slot: int) -> None:
        """Give the slot's pages back to the system; it reads as zeros until it is written again."""
        self.give_back(self.geometry.slot_offset(slot), self.geometry.flat_bytes)


class PeerSegment(PeerMapping, _Segment):
    """A peer's segment, mapped read-only, and a watch on the peer's life; raises what `PeerMapping` does."""

    def __init__(self, name: str, key: WorkerKey, geometry: Geometry) -> None:
        self.geometry = geometry
        super().__init__(name, key, geometry.size_bytes, _MAGIC, geometry.facts)
