"""One worker's part of a checkpoint: written by a thread, straight from the live state, while training goes on.

The file is a safetensors file whose tensors are runs of consecutive blocks, as bytes. Its header is written last, into
room that was left for it; then the file is synced and given its name.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import xxhash
from msgspec.structs import replace
from torch import Tensor

from everstep.base.cause import Cause, Why
from everstep.base.errors import EverstepError, ProtocolError, StoreError, cause_of, check
from everstep.base.extents import WHOLE, Extents, Runs
from everstep.checkpoint.manifest import PartFile
from everstep.checkpoint.names import part_name
from everstep.checkpoint.part_digest import PartDigest
from everstep.checkpoint.store import DirectoryStore, Draft, write_all
from everstep.exact.digest import bytes_of, digest_bytes
from everstep.exact.image import BLOCK_BYTES, FOREIGN, Outline, StateEntry, block_count, pieces_of, value_digests
from everstep.exact.layout import round_up
from everstep.exact.state import ModelState
from everstep.runtime.process import available_bytes

_PAGE = 4096
_BYTES_PER_RUN = 112
_PATIENCE_S = 0.05
LONG_PATIENCE_S = 30.0
_ATTEMPTS = 1000
CHECK_BYTES = 8
NOT_HELD = bytes(CHECK_BYTES)
"""Stands for the check of a block that a worker does not hold."""
NOT_KNOWN = "0" * 32
"""Stands for the digest of an entry of which its writer does not hold all."""
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})


class PartReport(msgspec.Struct, frozen=True):
    """Report of a worker to the job's leader about its part. Goes over connections as `encode_report` says.

    runs: its blocks of the stage's own state. digests: of each of them, 32 hex digits each, in one text. written:
    (first block, count) of the runs in `file`, in order; the other blocks are in older checkpoints, the newest
    being of step `base`. entry_digests: of the tensors that begin in its blocks (empty ones left out). file: None
    if nothing in them was new. entries, values and outline: from the first worker of a pool alone. finite: whether
    parameters and optimizer state in them are. sha256: of `file`, as `part_digest` makes it, where checkpoints are
    signed. error and cause: why there is none.

    checks, facts: what all workers of a pool have to say alike: `CHECK_BYTES` of the digest of each block of their
    state, and the digests of what else it is, by name.
    """

    step: int
    generation: int
    stage: int
    worker_id: int
    runs: Runs = ()
    digests: str = ""
    entry_digests: str = ""
    checks: bytes = b""
    facts: dict[str, str] = {}
    written: list[tuple[int, int]] = []
    file: PartFile | None = None
    base: int | None = None
    depth: int = 0
    entries: tuple[StateEntry, ...] | None = None
    values: Any = None
    outline: Outline | None = None
    written_bytes: int = 0
    stall_s: float = 0.0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    finite: bool = True
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    error: str = ""
    cause: Cause = Cause.UNKNOWN

    def failed(self, why: Why) -> PartReport:
        """The report of the same part if it failed."""
        return replace(self, error=why.reason, cause=why.cause)


_decoder = msgspec.msgpack.Decoder(PartReport)


def encode_report(report: PartReport) -> bytes:
    """For the way to the job's leader."""
    return msgspec.msgpack.encode(report)


def decode_report(data: bytes) -> PartReport:
    """Inverse of `encode_report`. Raises: ProtocolError if it is no report."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"expected the report of a part: {str(error)[:200]!a}") from None


@dataclass(frozen=True)
class Base:
    """The checkpoint before, as far as it is known: the digests of its blocks."""

    step: int | None = None
    depth: int = 0
    digests: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PartJob:
    """A part that is to be written. report: what can be said of it beforehand. with_state: whether its report has the
    stage's entries and values. staging_bytes: memory to take when the update comes too early; None: the share
    `staging_share` of what is left then. metadata: text for the safetensors header. cell_rank: of a worker whose cell
    has several. compare: others hold the state, too. signed: its report has the SHA-256. held: what of the state is
    here: other blocks are not read."""

    report: PartReport
    with_state: bool
    staging_bytes: int | None = None
    staging_share: float = 0.5
    metadata: Mapping[str, str] = field(default_factory=dict)
    cell_rank: int | None = None
    compare: bool = False
    signed: bool = False
    held: Extents = WHOLE

    def staging_blocks(self) -> int:
        """Blocks for which there is room now."""
        left = self.staging_bytes
        return (int(available_bytes() * self.staging_share) if left is None else left) // BLOCK_BYTES

    def name(self, attempt: int = 0) -> str:
        """Name of the part's file; attempt: as for `part_name`."""
        who = self.report
        return part_name(who.step, who.stage, who.worker_id, who.generation, attempt, self.cell_rank)


class Runner:
    """A thread that is there already: starting one would let it run at once, and training wait for it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="everstep-part", daemon=True).start()

    def run(self, work: Callable[[], None]) -> None:
        """Run this after earlier work."""
        self._work.put(work)

    def close(self) -> None:
        """End the thread after its queued work."""
        self._work.put(None)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class PartWriter:
    """Writes one part. `run` in a thread, from which the report comes; `before_update` before the state changes."""

    def __init__(
        self,
        store: DirectoryStore,
        job: PartJob,
        live: LiveState,
        base: Callable[[], Base],
        done: Callable[[PartReport], None],
    ) -> None:
        """base: asked for in the thread. done: called from the thread, once, unless the part was abandoned."""
        self._store, self._job, self._live = store, job, live
        self._find_base, self._done = base, done
        self._changed = threading.Condition()
        self._next = 0  # so many of `_order` are copied out of the live state
        self._copying = False
        self._copied = False  # all blocks are copied; after the update the live state is another step's
        self._saved: dict[int, torch.Tensor] = {}
        self._checked: dict[int, bytes] = {}
        self._stop: Why | None = None
        self._ended = threading.Event()
        self._stall_s = job.report.stall_s
        self._began = time.monotonic()

    @cached_property
    def _own(self) -> dict[int, bool]:
        """The blocks that are read, and whether they are written: those after its own are only needed for the digest of
        an entry. Ascending."""
        written = {block: True for run in self._job.report.runs for block in range(*run)}
        for k in self._digested:
            for block in self._live.entries[k].blocks:
                written.setdefault(block, False)
        return dict(sorted(written.items()))

    @cached_property
    def _here(self) -> frozenset[int]:
        spans = self._job.held.spans((("", self._live.n_blocks),))
        return frozenset(n for lo, hi in spans for n in range(lo, hi))

    @cached_property
    def _digested(self) -> list[int]:
        """The entries that begin in its own blocks and are all here."""
        entries, here = self._live.entries, self._here
        return [k for k in entries_within(entries, self._job.report.runs) if here.issuperset(entries[k].blocks)]

    @cached_property
    def _order(self) -> Sequence[int]:
        """The blocks in the order in which they are read; those after the own ones are only compared."""
        own = list(self._own)
        others = [k for k in sorted(self._here) if k not in self._own] if self._job.compare else []
        after = bisect(others, own[-1]) if own else 0
        return [*own, *others[after:], *others[:after]]

    @property
    def step(self) -> int:
        return self._job.report.step

    @property
    def ended(self) -> bool:
        """Whether the thread is through, one way or the other."""
        return self._ended.is_set()

    def join(self, timeout_s: float | None) -> bool:
        """Until the thread is through; whether that came in time."""
        return self._ended.wait(timeout_s)

    def abandon(self, why: Why) -> None:
        """Writes no further and says so in the report; the state may change."""
        with self._changed:
            self._stop = self._stop or why
            self._changed.wait_for(lambda: not self._copying)
            self._changed.notify_all()

    def before_update(self, patience_s: float = _PATIENCE_S, tick: Callable[[], None] = lambda: None) -> bool:
        """After this the state may change. Copies what is not yet written, as far as the limit allows, waits a little
        for the rest, and abandons the part otherwise. Returns whether the part is still being made. tick: called while
        this waits."""
        began = time.monotonic()
        with self._changed:
            if self._stop:
                return False
            if self._copied or (self._next >= len(self._order) and not self._copying):
                return True
            try:
                self._copied = self._rescue(began + patience_s, tick)
                return self._copied
            finally:
                self._stall_s += time.monotonic() - began

    def _rescue(self, deadline: float, tick: Callable[[], None]) -> bool:
        """Copies blocks from the far end, while the thread goes on at the near one; those that are only compared need
        not be kept. Called with the lock."""
        room, order, passing = self._job.staging_blocks(), self._order, None
        low = len(order)
        while low > self._next:
            if low <= len(self._own) and len(self._saved) >= room:
                break
            low -= 1
            kept = low < len(self._own)
            memory = torch.empty(BLOCK_BYTES, dtype=torch.uint8) if kept or passing is None else passing
            self._changed.wait_for(lambda: not self._copying)
            if self._stop or low < self._next:  # it has failed, or came to it, while this one waited
                break
            self._live.copy_block(order[low], memory)
            if kept:
                self._saved[order[low]] = memory
            else:
                passing, self._checked[order[low]] = memory, check_of(bytes_of(memory))

        def covered() -> bool:
            there = (k in self._saved or k in self._checked for k in order[self._next :])
            return not self._copying and all(there)

        def over() -> bool:
            return bool(self._stop) or covered()

        while not (in_time := self._changed.wait_for(over, min(_PATIENCE_S, max(0.0, deadline - time.monotonic())))):
            if time.monotonic() >= deadline:
                break
            tick()
        if not in_time:
            text = f"the update came before the state was written, and memory had room for {room} of its blocks: set "
            text += "checkpoint.staging_mb to allow more, or save less often"
            self._stop = Why(Cause.SLOW, text)
            self._changed.wait_for(lambda: not self._copying)
        return in_time and not self._stop

    # ---- the thread

    def run(self) -> None:
        """Writes it, from beginning to end."""
        job, cpu_s = self._job, time.thread_time()
        report = None
        try:
            base = self._find_base()
            sums = PartDigest(self._live.buffer, wanted=job.signed)
            with self._store.draft(job.name()) as draft, sums:
                report = self._write(draft.fd, base, sums)
                if report.file is not None:
                    report = replace(report, file=report.file._replace(name=self._publish(draft)))
        except (EverstepError, OSError, MemoryError, RuntimeError) as error:  # CUDA errors are RuntimeErrors
            reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__) + (
                f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
            )
            with self._changed:
                self._stop = self._stop or Why(_cause_here(error), reason)
            report = job.report.failed(self._stop)
        finally:
            with self._changed:
                self._saved.clear()
                self._live.release()
                self._changed.notify_all()
        report = report or job.report.failed(Why(Cause.UNKNOWN, "the writer ended"))
        duration_s, cpu_s = time.monotonic() - self._began, time.thread_time() - cpu_s
        try:
            self._done(replace(report, stall_s=self._stall_s, duration_s=duration_s, cpu_s=cpu_s))
        finally:
            self._ended.set()

    def _write(self, fd: int, base: Base, sums: PartDigest) -> PartReport:
        job, report = self._job, self._job.report
        data_at = round_up(512 + _BYTES_PER_RUN * sum((hi - lo) // 2 + 1 for lo, hi in report.runs), _PAGE)
        live, n_own = self._live, self._live.n_own
        mine = {k: xxhash.xxh3_128() for k in self._digested}
        digests: list[str] = []
        runs: list[tuple[int, int]] = []
        tree: list[str] = []
        finite = True
        for index in self._order:
            block = self._take(index, sums.room())
            if block is None:
                continue
            view = bytes_of(block)
            if job.compare:
                self._checked[index] = check_of(view)
            if index not in self._own:
                continue
            for k, lo, hi in pieces_of(live.entries, index):
                if k in mine:
                    mine[k].update(view[lo - index * BLOCK_BYTES : hi - index * BLOCK_BYTES])
                piece = block[lo - index * BLOCK_BYTES : hi - index * BLOCK_BYTES]
                finite = finite and (k in live.passing or _is_finite(piece, live.entries[k].dtype))
            if not self._own[index]:
                continue
            digest = digest_bytes(view)
            digests.append(digest)
            if digest in base.digests or index >= n_own:
                continue
            sums.add(view)
            write_all(fd, view, data_at + len(tree) * BLOCK_BYTES)
            tree.append(digest)
            if runs and runs[-1][0] + runs[-1][1] == index:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((index, 1))
        file = None
        if runs:
            header = _header(runs, data_at, {**job.metadata, "stage": str(report.stage), "step": str(report.step)})
            write_all(fd, memoryview(header), 0)
            os.fsync(fd)
            size = data_at + len(tree) * BLOCK_BYTES
            file = PartFile("", size, data_at, digest_bytes(header), tree_digest(tree))
            report = replace(report, sha256=sums.of(header))
        if job.compare:
            checks = b"".join(self._checked.get(index, NOT_HELD) for index in range(live.n_blocks))
            report = replace(report, checks=checks, facts=_facts(live))
        if job.with_state:
            outline = live.outline._replace(ends=())
            report = replace(report, entries=tuple(live.entries), values=dict(live.values), outline=outline)
        return replace(
            report,
            digests="".join(digests),
            entry_digests="".join(
                mine[k].hexdigest() if k in mine else NOT_KNOWN for k in entries_within(live.entries, report.runs)
            ),
            written=runs,
            file=file,
            base=base.step,
            depth=base.depth,
            finite=finite,
            written_bytes=len(tree) * BLOCK_BYTES,
        )

    def _take(self, index: int, buffer: torch.Tensor) -> torch.Tensor | None:
        """A block as it was when the part began; None if it is only compared, and that was prepared before. Raises:
        StoreError if the part was abandoned."""
        with self._changed:
            if self._stop:
                raise StoreError(self._stop.reason)
            self._next += 1
            if index in self._checked:
                return None
            saved = self._saved.pop(index, None)
            if saved is not None:
                return saved
            self._copying = True
        try:
            self._live.copy_block(index, buffer)
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()
        return buffer

    def _publish(self, draft: Draft) -> str:
        """Gives the file a name that no file has."""
        for attempt in range(_ATTEMPTS):
            with suppress(FileExistsError):
                draft.publish(self._job.name(attempt), if_absent=True)
                return self._job.name(attempt)
        raise StoreError(f"{self._job.name(_ATTEMPTS - 1)} and {_ATTEMPTS - 1} further names are taken")


def entries_within(entries: Sequence[StateEntry], runs: Runs) -> list[int]:
    """The numbers of the entries that begin in these blocks; empty ones belong to none."""
    bounds = [(first * BLOCK_BYTES, last * BLOCK_BYTES) for first, last in runs]
    return [k for k, e in enumerate(entries) if e.nbytes and any(lo <= e.offset < hi for lo, hi in bounds)]


def _is_finite(piece: Tensor, dtype: str) -> bool:
    """Whether all values in a piece of a tensor's bytes are finite."""
    if dtype not in _FLOATS or not piece.numel():
        return True
    return bool(piece.view(getattr(torch, dtype)).isfinite().all())


def check_of(view: memoryview) -> bytes:
    """Checksum by which a block is compared."""
    return xxhash.xxh3_64_digest(view)


def _facts(live: LiveState) -> dict[str, str]:
    """Digests of all that a state is beside its blocks, by name."""
    entries = [[e.name, e.dtype, list(e.shape), e.offset, e.nbytes] for e in live.entries]
    return {"what it consists of": digest_bytes(json.dumps(entries).encode()), **value_digests(live.values)}


def split_digests(text: str) -> list[str]:
    """The digests that a text consists of."""
    return [text[at : at + 32] for at in range(0, len(text), 32)]


def tree_digest(digests: Sequence[str]) -> str:
    """Digest of blocks that have these digests, one after the other."""
    return digest_bytes("".join(digests).encode())


def _header(runs: Sequence[tuple[int, int]], data_at: int, metadata: Mapping[str, str]) -> bytes:
    """The first `data_at` bytes of a safetensors file with these runs of blocks."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for first, count in runs:
        size = count * BLOCK_BYTES
        table[f"blocks-{first}-{first + count}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    check(len(text) <= data_at - 8, f"a header of {len(text)} bytes has no room in {data_at}")
    return (data_at - 8).to_bytes(8, "little") + text.ljust(data_at - 8)


def _cause_here(error: BaseException) -> Cause:
    """Cause of the error that ended the writing: one of the system's is the disk's."""
    return Cause.DISK if isinstance(error, OSError) else cause_of(error)


# ---- the live state


class LiveState:
    """Entries, values and blocks of a stage's state at a step boundary, which a writer copies while the next step
    computes its gradients. One block at a time is copied, from the tensors themselves.

    Buffers and values are taken at once; parameters and optimizer state must not change while their blocks are
    copied. One thread at a time.
    """

    def __init__(self, state: ModelState) -> None:
        self.entries, tensors, self.values, now = state.live_tensors()
        self.outline, self.n_blocks = state.outline, block_count(self.entries)
        self.passing = frozenset(now)  # buffers and the like, in which masks have infinities
        self._tensors: list[Tensor] = list(tensors)
        with torch.no_grad():
            for k in now:
                self._tensors[k] = tensors[k].detach().clone()
        self._at = -1
        self._bytes: Any = None
        self._memory, self._let_go = state.memory, state.memory.let_go
        self._cuda = next((t.device for t in self._tensors if t.is_cuda), None)
        self._stream: Any = None
        if self._cuda is not None:
            self._stream = torch.cuda.Stream(self._cuda)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._cuda))

    @property
    def n_own(self) -> int:
        """How many blocks are this stage's; those after them are copies of what another stage has."""
        entries = iter(self.entries)
        for label, count in self.outline.groups:
            group = list(islice(entries, count))
            if label == FOREIGN and group:
                return group[0].offset // BLOCK_BYTES
        return self.n_blocks

    def buffer(self) -> Tensor:
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._cuda is not None)

    def copy_block(self, index: int, out: Tensor) -> None:
        """Copies a block to host memory of `BLOCK_BYTES`; large pieces without the interpreter lock."""
        check(0 <= index < self.n_blocks, f"there is no block {index} of {self.n_blocks}")
        start, at = index * BLOCK_BYTES, 0
        for k, lo, hi in pieces_of(self.entries, index):
            out[at : lo - start] = 0
            offset, at = self.entries[k].offset, hi - start
            self._copy(k, lo - offset, hi - offset, out[lo - start : at])
        out[at:] = 0

    def release(self) -> None:
        self._tensors, self._bytes, self._at = [], None, -1

    def _copy(self, k: int, lo: int, hi: int, out: Tensor) -> None:
        if self._at != k:  # blocks are read in order: the piece of memory in use is the last one's, nearly always
            tensor = self._tensors[k]
            self._let_go()
            on_device = tensor.is_cuda and tensor.is_contiguous() and not tensor.is_complex()
            self._at = k
            self._bytes = (
                tensor.detach().reshape(-1).view(torch.uint8)
                if on_device
                else bytes_of(tensor if tensor.is_contiguous() else self._memory.whole(tensor))
            )
        if isinstance(self._bytes, Tensor):
            with torch.no_grad(), torch.cuda.stream(self._stream):
                out.copy_(self._bytes[lo:hi], non_blocking=True)
            self._stream.synchronize()
        else:
            np.copyto(out.numpy(), np.frombuffer(self._memory.there(self._bytes[lo:hi]), np.uint8))
