"""The shared memory of one worker: a memfd that only its owner writes and its peers map read-only.

Single writer: a process that was evicted and comes back to life can damage nothing but its own memory. A memfd leaves
nothing behind when everybody is killed, does not depend on the size of /dev/shm, and stays readable through existing
mappings after its owner's death. Only touched pages cost memory, so the file is laid out for the worst case:

    page 0     header (who, geometry), and the bell at byte 256
    records    exchange 0, exchange 1, nodes, result 0, result 1: small checksummed records
    nodes      `slots` flat gradients of float32: sums of complete subtrees
    results    two flat gradients of float32 (by parity of the step): finished blocks

The *bell* is a 32-bit counter that the owner raises after every record it has written; peers sleep on it (futex).
Order of writes: data, then the record that announces it, its checksum last, then the bell. x86 keeps the order of
stores; elsewhere the barrier inside the futex call orders data before the next record, and a reader that runs ahead of
it sees a checksum that does not fit.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import stat
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.base.errors import MembershipError, check
from everstep.base.plan import WorkerKey
from everstep.base.ports import Tag
from everstep.parallel import futex

EXCHANGE = (0, 1)
NODES = 2
RESULT = (3, 4)

_PAGE = 4096
_BELL_AT = 256
_MAGIC = b"EVERSTP1"
_HEADER = struct.Struct("<8s16sqqqqqq")
_RECORD = struct.Struct("<QQ40s")
_KEY = struct.Struct("<q16sqq")
_SPARE_SLOTS = 3


def record_key(generation: int, tag: Tag) -> bytes:
    """40 bytes that name a record: who waits for one compares them."""
    kind = tag.kind.encode()
    check(len(kind) <= 16, f"the kind of a tag has at most 16 bytes, got {tag.kind!r}")
    return _KEY.pack(generation, kind, tag.step, tag.seq)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


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
        offsets = [_PAGE]
        for capacity in self.capacities:
            offsets.append(offsets[-1] + _pages(_RECORD.size + capacity))
        return tuple(offsets)

    @property
    def flat_bytes(self) -> int:
        return _pages(4 * max(self.numel, 1))

    def slot_offset(self, slot: int) -> int:
        return self.record_offsets[-1] + slot * self.flat_bytes

    def result_offset(self, parity: int) -> int:
        return self.slot_offset(self.slots + parity)

    @property
    def size_bytes(self) -> int:
        return self.slot_offset(self.slots + 2)


class _Mapping:
    """A mapped segment, from either side."""

    def __init__(self, geometry: Geometry, memory: mmap.mmap) -> None:
        self.geometry = geometry
        self.memory = memory
        # The address of a read-only mapping is only to be had through an array over it.
        self.address: int = np.frombuffer(memory, np.uint8, count=1).ctypes.data
        self._bell = ctypes.c_uint32.from_address(self.address + _BELL_AT)

    @property
    def bell(self) -> int:
        return int(self._bell.value)

    @property
    def bell_address(self) -> int:
        return self.address + _BELL_AT

    def flat(self, offset: int) -> torch.Tensor:
        """float32 [numel] over the mapping. The tensor keeps the mapping alive, and nothing else has to."""
        if self.geometry.numel == 0:
            return torch.empty(0)
        array = (ctypes.c_float * self.geometry.numel).from_address(self.address + offset)
        array.keep_alive = self.memory  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.float32)

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


class OwnSegment(_Mapping):
    """The segment that this process writes."""

    def __init__(self, me: WorkerKey, geometry: Geometry) -> None:
        self._fd = os.memfd_create(f"everstep-{me}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, geometry.size_bytes)
        super().__init__(geometry, mmap.mmap(self._fd, geometry.size_bytes))
        self._nonce = os.urandom(8).hex().encode()
        _HEADER.pack_into(self.memory, 0, _MAGIC, self._nonce, *_facts(me, geometry))

    @property
    def name(self) -> str:
        """ "memfd:<pid>:<fd>:<nonce>": with it a process of the same user and host attaches."""
        return f"memfd:{os.getpid()}:{self._fd}:{self._nonce.decode()}"

    def write(self, record: int, key: bytes, payload: bytes) -> None:
        """Publish: everything that the record announces must have been written before."""
        capacity = self.geometry.capacities[record]
        check(len(payload) <= capacity, f"a record of {len(payload)} bytes does not fit into {capacity}")
        at = self.geometry.record_offsets[record]
        start = at + _RECORD.size
        self.memory[start : start + len(payload)] = payload
        _RECORD.pack_into(self.memory, at, xxhash.xxh3_64_intdigest(key + payload), len(payload), key)
        self._bell.value = (self._bell.value + 1) & 0xFFFFFFFF
        futex.wake(self.bell_address)

    def forget_slot(self, slot: int) -> None:
        """Give the slot's pages back to the system; it reads as zeros until it is written again."""
        self.memory.madvise(mmap.MADV_REMOVE, self.geometry.slot_offset(slot), self.geometry.flat_bytes)

    def close(self) -> None:
        """No peer can attach any more; existing mappings stay readable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PeerSegment(_Mapping):
    """A peer's segment, mapped read-only, and a watch on the peer's life.

    Raises: ProcessLookupError or FileNotFoundError if the process or its segment is gone (a dying process may have
    something else behind that descriptor already); MembershipError if the segment is of another model or job.
    """

    def __init__(self, name: str, key: WorkerKey, geometry: Geometry) -> None:
        pid, fd, nonce = _parse(name)
        self.pid = pid
        self._pidfd = _pidfd(pid)
        try:
            expected = (_MAGIC, nonce, *_facts(key, geometry))
            super().__init__(geometry, _map_readonly(f"/proc/{pid}/fd/{fd}", geometry.size_bytes, expected))
        except BaseException:
            self.close()
            raise

    def alive(self) -> bool:
        """Whether the process still runs (one that was killed and not yet waited for does not)."""
        if self._pidfd is None:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            return True
        watch = select.poll()
        watch.register(self._pidfd, select.POLLIN)
        return not watch.poll(0)

    def close(self) -> None:
        """Stop watching. The mapping goes when the last tensor over it does."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _facts(key: WorkerKey, geometry: Geometry) -> tuple[int, ...]:
    return (
        key.worker_id,
        key.incarnation,
        geometry.numel,
        geometry.entries,
        geometry.n_lanes,
        geometry.record_bytes,
    )


def _parse(name: str) -> tuple[int, int, bytes]:
    kind, *rest = name.split(":")
    if kind != "memfd" or len(rest) != 3 or not rest[0].isdecimal() or not rest[1].isdecimal():
        raise MembershipError(f"expected a segment as memfd:<pid>:<fd>:<nonce>, got {name!r}")
    return int(rest[0]), int(rest[1]), rest[2].encode()


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # kernel without pidfd
        return None


def _map_readonly(path: str, size_bytes: int, expected: tuple[Any, ...]) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket is behind it by now
            raise FileNotFoundError(f"segment {path} is gone") from None
        raise
    try:
        header = os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        found = _HEADER.unpack(header) if len(header) == _HEADER.size else ()
        if found[:2] != expected[:2]:
            raise FileNotFoundError(f"segment {path} is gone: something else is behind that descriptor")
        if found != expected:
            raise MembershipError(f"segment {path}: expected header {expected}, found {found}; another model or lanes?")
        return mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
