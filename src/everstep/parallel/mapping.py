"""Shared memory with one writer: a memfd that its owner maps for writing and its peers read-only.

Single writer: an evicted process that comes back to life can damage only its own memory. A memfd leaves nothing behind
when all processes are killed, does not depend on the size of /dev/shm, and stays readable through existing mappings
after its owner's death. Only touched pages cost memory, so a file may be laid out for the worst case.

Its first page holds a header (owner, facts about the layout) and, at byte 256, the *bell*: a 32-bit counter that the
owner raises after every record it has written; peers sleep on it (futex). Code that builds on this decides what the
other pages hold.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import select
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import xxhash

from everstep.base.errors import CollectiveAborted, DiskUnfit, MembershipError, check
from everstep.base.plan import Member, Plan, WorkerKey
from everstep.base.ports import Tag
from everstep.exact.layout import BLOCK_ELEMENTS
from everstep.parallel.fence import Fence

PAGE = 4096
_BELL_AT = 256
_HEADER = struct.Struct("<8s16sqqqqqq")

MappingFacts = tuple[int, int, int, int]
"""Four numbers that the writer and its readers must agree on before they look at anything else."""


def pages(size_bytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-size_bytes // PAGE) * PAGE


# ---- sleeping until a word in shared memory changes, and waking those who sleep on it: Linux futexes, shared between
# processes (no FUTEX_PRIVATE_FLAG: the key is the file's page, so the waiter may have it mapped read-only). Where the
# number of the call is not known, waiting is a short sleep. Waiters must be ready for spurious returns.
# Source: man 2 futex. ctypes releases the interpreter lock during the call; both calls are full memory barriers.

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX = _FUTEX_NUMBERS.get(platform.machine())
_WAIT, _WAKE = 0, 1
_POLL_S = 0.0002
_SYSCALL = ctypes.CDLL(None).syscall
_FENCE = ctypes.c_uint32(0)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_SYSCALL.restype = ctypes.c_long
_SYSCALL.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.POINTER(_Timespec), ctypes.c_void_p, ctypes.c_uint32),
)


def _wake(address: int) -> None:
    """Wake all threads that sleep on the word at `address`."""
    if _FUTEX is not None:
        _SYSCALL(_FUTEX, address, _WAKE, 0x7FFFFFFF, None, None, 0)


def load_fence() -> None:
    """Keep earlier reads before later ones. x86 keeps that order by itself."""
    if platform.machine() != "x86_64":
        _wake(ctypes.addressof(_FENCE))


class Mapping:
    """A mapped segment, from either side."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        # only an array over a read-only mapping gives its address
        self.address: int = np.frombuffer(memory, np.uint8, count=1).ctypes.data
        self._bell = ctypes.c_uint32.from_address(self.address + _BELL_AT)

    @property
    def bell(self) -> int:
        return int(self._bell.value)

    def poke(self) -> None:
        """Wake all that sleep on the bell, from either side, without a write. A thread about to sleep may miss it."""
        _wake(self.address + _BELL_AT)

    def await_bell(self, seen: int, timeout_s: float) -> None:
        """Sleep while the bell has the value `seen`, `timeout_s` seconds at most (below one second)."""
        if _FUTEX is None:
            time.sleep(min(_POLL_S, timeout_s))
        else:
            timeout = ctypes.byref(_Timespec(0, int(timeout_s * 1e9)))
            _SYSCALL(_FUTEX, self.address + _BELL_AT, _WAIT, seen, timeout, None, 0)

    def alive(self) -> bool:
        """Whether its owner still runs."""
        return True

    def array(self, kind: Any, count: int, offset: int) -> Any:
        """A ctypes array over the mapping. It alone keeps the mapping alive."""
        array = (kind * count).from_address(self.address + offset)
        array.keep_alive = self.memory
        return array


class OwnMapping(Mapping):
    """The memory that this process writes. `magic`: 8 bytes that name the layout. folder: it is a file there, without a
    name, of which memory holds what is in use. Raises: DiskUnfit if there can be none."""

    def __init__(
        self, me: WorkerKey, size_bytes: int, magic: bytes, facts: MappingFacts, folder: Path | None = None
    ) -> None:
        self.folder = folder
        self._on_disk: set[int] = set()
        self._fd = os.memfd_create(f"everstep-{me}", os.MFD_CLOEXEC) if folder is None else _nameless(folder)
        os.ftruncate(self._fd, size_bytes)
        super().__init__(mmap.mmap(self._fd, size_bytes))
        if folder is not None:
            _in_files.add(self)
        self._nonce = os.urandom(8).hex().encode()
        _HEADER.pack_into(self.memory, 0, magic, self._nonce, me.worker_id, me.incarnation, *facts)

    @property
    def name(self) -> str:
        """ "memfd:<pid>:<fd>:<nonce>": text with which a process of the same user and host attaches."""
        return f"memfd:{os.getpid()}:{self._fd}:{self._nonce.decode()}"

    def ring(self) -> None:
        """Wake all that sleep on the bell: something has been written. A full memory barrier."""
        self._bell.value = (self._bell.value + 1) & 0xFFFFFFFF
        _wake(self.address + _BELL_AT)

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Give whole pages back to the system; they read as zeros until they are written again. A file keeps them."""
        self.memory.madvise(mmap.MADV_REMOVE if self.folder is None else mmap.MADV_DONTNEED, offset, size_bytes)

    def take(self, offset: int, size_bytes: int) -> None:
        """Before pages of a file are written: a page that has no place on disk then would end the process. Raises:
        DiskUnfit if the disk is full."""
        if self.folder is not None and offset not in self._on_disk:
            try:
                os.posix_fallocate(self._fd, offset, size_bytes)
            except OSError as error:
                raise _no_room(self.folder, error) from None
            self._on_disk.add(offset)

    def close(self) -> None:
        """Let no further peer attach; existing mappings stay readable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_in_files: weakref.WeakSet[OwnMapping] = weakref.WeakSet()


def let_files_go() -> None:
    """Memory of this process that lies in files is not in use for now: the kernel may write it out and drop it."""
    for one in list(_in_files):
        one.memory.madvise(mmap.MADV_DONTNEED)


def _nameless(folder: Path) -> int:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise _no_room(folder, error) from None


def _no_room(folder: Path, error: OSError) -> DiskUnfit:
    return DiskUnfit(
        f"zero.offload_params: expected room for the gradients in {folder}, got: {error.strerror}: make room, name "
        "another folder as zero.offload, or set zero.offload_params=false",
        folder,
    )


class PeerMapping(Mapping):
    """A peer's memory, mapped read-only, and a watch on the peer's life.

    Raises: ProcessLookupError or FileNotFoundError if the process or its memory is gone (a dying process may already
    have something else behind that descriptor); MembershipError if it is of another model or job.
    """

    def __init__(self, name: str, key: WorkerKey, size_bytes: int, magic: bytes, facts: MappingFacts) -> None:
        pid, fd, nonce = _parse(name)
        self._pidfd = os.pidfd_open(pid)
        try:
            expected = (magic, nonce, key.worker_id, key.incarnation, *facts)
            super().__init__(_map_readonly(f"/proc/{pid}/fd/{fd}", size_bytes, expected))
        except BaseException:
            self.close()
            raise

    def alive(self) -> bool:
        """Whether the process still runs (a killed process that was not yet waited for does not)."""
        watch = select.poll()
        watch.register(self._pidfd, select.POLLIN)
        return not watch.poll(0)

    def close(self) -> None:
        """Stop watching. The mapping goes with the last tensor over it."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


P = TypeVar("P", bound=PeerMapping)


class Attached(Generic[P]):
    """The memory of the other members of a generation. Workers that stay members stay attached. attach: maps one."""

    def __init__(self, me: WorkerKey, attach: Callable[[Member], P]) -> None:
        self._me = me
        self._attach = attach
        self._found: dict[str, P] = {}

    def meet(self, plan: Plan, fence: Fence) -> dict[int, P]:
        """Mappings of all members of the plan but this one, by worker id; former members are let go.

        Raises: CollectiveAborted if members are dead; MembershipError if a segment is not that of a member.
        """
        others = [m for m in plan.members if m.key != self._me]
        for name in self._found.keys() - {m.segment for m in others}:
            self._found.pop(name).close()
        dead = []
        for member in others:
            fence.check()
            try:
                if member.segment not in self._found:
                    self._found[member.segment] = self._attach(member)
                elif not self._found[member.segment].alive():
                    dead.append(member.worker_id)
            except (ProcessLookupError, FileNotFoundError):
                dead.append(member.worker_id)
        if dead:
            raise CollectiveAborted(f"generation {plan.generation}: workers {dead} are gone", dead)
        return {m.worker_id: self._found[m.segment] for m in others}

    def close(self) -> None:
        while self._found:
            self._found.popitem()[1].close()


def _parse(name: str) -> tuple[int, int, bytes]:
    kind, *rest = name.split(":")
    if kind != "memfd" or len(rest) != 3 or not rest[0].isdecimal() or not rest[1].isdecimal():
        raise MembershipError(f"expected a segment as memfd:<pid>:<fd>:<nonce>, got {name!r}")
    return int(rest[0]), int(rest[1]), rest[2].encode()


def _map_readonly(path: str, size_bytes: int, expected: tuple[Any, ...]) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # by now a socket has this number
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


# ---- the shared memory in which a worker offers sums, results and records to its peers
#
#     page 0     header and bell
#     records    exchange 0, exchange 1, nodes, result 0, result 1, final, done: small checksummed records
#     nodes      `slots` flat gradients of float32: sums of complete subtrees
#     results    two flat gradients of float32: finished blocks
#
# Order of writes: data, then the record that announces it, its checksum last, then the bell. x86 keeps the order of
# stores; elsewhere the barrier inside the futex call orders data before the next record, and a reader that runs ahead
# of it sees a checksum that does not fit.
EXCHANGE = (0, 1)
NODES = 2
RESULT = (3, 4)
FINAL = 5
DONE = 6

_MAGIC = b"EVERSTP3"
_BLOCK_BYTES = 4 * BLOCK_ELEMENTS
_RECORD = struct.Struct("<QQ40s")
_KEY = struct.Struct("<q16sqq")


def record_key(generation: int, tag: Tag) -> bytes:
    """Name of a record, 40 bytes; waiting members compare it."""
    kind = tag.kind.encode()
    check(len(kind) <= 16, f"the kind of a tag has at most 16 bytes, got {tag.kind!r}")
    return _KEY.pack(generation, kind, tag.step, tag.seq)


@dataclass(frozen=True)
class Geometry:
    """Layout of a segment; equal for all members of a job.

    numel: elements of the flat gradient; entries: entries of its layout; record_bytes: capacity of an exchange record.
    """

    numel: int
    entries: int
    n_lanes: int
    record_bytes: int

    @property
    def slots(self) -> int:
        """Number of node slots: one for each node of the lane tree."""
        return 2 * self.n_lanes - 1

    @property
    def blocks(self) -> int:
        return -(-self.numel // BLOCK_ELEMENTS)

    @cached_property
    def capacities(self) -> tuple[int, ...]:
        """Payload bytes of each record."""
        nodes = self.slots * (64 + self.entries)
        final = 64 + self.slots * (64 + self.blocks)
        return (self.record_bytes, self.record_bytes, nodes, 64, 64, final, 64 + self.blocks)

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

    def result_offset(self, area: int) -> int:
        return self.slot_offset(self.slots + area)

    @property
    def size_bytes(self) -> int:
        return self.slot_offset(self.slots + 2)

    @property
    def facts(self) -> MappingFacts:
        return (self.numel, self.entries, self.n_lanes, self.record_bytes)


class _Segment(Mapping):
    """The part of a segment that both sides use."""

    geometry: Geometry

    def flat(self, offset: int) -> torch.Tensor:
        """float32 [numel] over the mapping. The tensor alone keeps the mapping alive."""
        if self.geometry.numel == 0:
            return torch.empty(0)
        return torch.frombuffer(self.array(ctypes.c_float, self.geometry.numel, offset), dtype=torch.float32)

    def slot(self, slot: int) -> torch.Tensor:
        check(0 <= slot < self.geometry.slots, f"slot {slot} of {self.geometry.slots}")
        return self.flat(self.geometry.slot_offset(slot))

    def result(self, area: int) -> torch.Tensor:
        check(area in (0, 1), f"result area {area} of 2")
        return self.flat(self.geometry.result_offset(area))

    def read(self, record: int, key: bytes) -> bytes | None:
        """Payload of a record that bears this key and is whole; None otherwise."""
        at = self.geometry.record_offsets[record]
        digest, length, found = _RECORD.unpack_from(self.memory, at)
        if found != key or length > self.geometry.capacities[record]:
            return None
        start = at + _RECORD.size
        payload = self.memory[start : start + length]
        return payload if xxhash.xxh3_64_intdigest(key + payload) == digest else None


class OwnSegment(OwnMapping, _Segment):
    """The segment that this process writes."""

    def __init__(self, me: WorkerKey, geometry: Geometry, folder: Path | None = None) -> None:
        self.geometry = geometry
        super().__init__(me, geometry.size_bytes, _MAGIC, geometry.facts, folder)
        self.take(0, geometry.slot_offset(0))

    def flat(self, offset: int) -> torch.Tensor:
        """As of any segment. Raises: DiskUnfit if there is no room for it."""
        self.take(offset, self.geometry.flat_bytes)
        return super().flat(offset)

    def write(self, record: int, key: bytes, payload: bytes) -> None:
        """Publish a record; everything that it announces must have been written before."""
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

    def forget_node(self, slot: int, first: int, last: int) -> None:
        """The same for the blocks [first, last) of a slot."""
        self.give_back(self.geometry.slot_offset(slot) + first * _BLOCK_BYTES, (last - first) * _BLOCK_BYTES)

    def forget_result(self, area: int, first: int, last: int) -> None:
        """The same for the blocks [first, last) of a result."""
        if first < last:
            self.give_back(self.geometry.result_offset(area) + first * _BLOCK_BYTES, (last - first) * _BLOCK_BYTES)


class PeerSegment(PeerMapping, _Segment):
    """A peer's segment, mapped read-only, and a watch on the peer's life; raises the errors of `PeerMapping`."""

    def __init__(self, name: str, key: WorkerKey, geometry: Geometry) -> None:
        self.geometry = geometry
        super().__init__(name, key, geometry.size_bytes, _MAGIC, geometry.facts)
