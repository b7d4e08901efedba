"""The progress board: a fixed row of shared memory per process of a worker, written by workers, read by their agent.

It lies in a memfd that every worker inherits. The agent can therefore see, without asking, that a worker holds the
interpreter lock for long, is stopped, or was killed.

The rows of all heads come first, then those of all ranks 1, and so on: rows that nobody writes take no memory.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, replace

from everstep.base.cell_keys import MAX_RANKS
from everstep.base.errors import ConfigError, check

ROW_BYTES = 512
MAX_ROWS = 4096
PHASES = (
    *("idle", "starting", "load", "forward", "backward", "transfer", "reduce", "agree", "update"),
    *("stall", "heal", "settle", "evaluate", "finish"),
)
PHASE_CODE = {name: code for code, name in enumerate(PHASES)}
OPERATIONS = ("reduce", "transfer", "heal")
ROLES = ("", "leader", "active", "standby")

# 8-byte words in a row
_COUNTER, _BEAT_NS, _STEP, _PHASE, _SAMPLES, _INCARNATION, _PID, _GENERATION, _LANES, _UNSEEN_NS, _STAGE, _ROLE = range(
    12
)
_RANKS, _ENDING, _LEFT, _WARM = 12, 13, 14, 15
_SPENT_NS = 16
"""First of the words with the time per phase."""
_SENT_BYTES = 32
"""First of the words with the bytes sent per operation."""
_ALLOCATED, _RESERVED = 40, 41
"""Bytes of device memory."""
_FORWARD, _BACKWARD, _UPDATE = PHASE_CODE["forward"], PHASE_CODE["backward"], PHASE_CODE["update"]
_WORDS = ROW_BYTES // 8
_monotonic_ns = time.monotonic_ns


@dataclass(frozen=True)
class Pulse:
    """Content of a row. `beat_ns` is the monotonic time (of this host) of the last tick.

    stage (the first of several), role: of a member's seat; None and "" for workers without one. Totals of this life:
    lanes: forward phases begun; spent_ns: time in each phase that has ended, in the order of `PHASES`; sent_bytes:
    bytes sent to others, in the order of `OPERATIONS`. ranks: processes of the worker, 0 or 1: this one alone; slowest:
    of several, the rank that has stood still for the longest; `counter` and `beat_ns` are its own. allocated_bytes,
    reserved_bytes: of device memory, by torch's allocator; 0 on the CPU. cold: the present work may compile, because no
    update has followed a lane yet, in this life or with this shape.
    """

    counter: int
    beat_ns: int
    step: int
    phase: str
    samples: int
    incarnation: int
    pid: int
    generation: int
    lanes: int = 0
    spent_ns: tuple[int, ...] = (0,) * len(PHASES)
    sent_bytes: tuple[int, ...] = (0,) * len(OPERATIONS)
    stage: int | None = None
    role: str = ""
    ranks: int = 0
    slowest: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    cold: bool = False

    @property
    def compute_ns(self) -> int:
        """Time spent in forward and backward passes."""
        return self.spent_ns[_FORWARD] + self.spent_ns[_BACKWARD]

    def still_ms(self, now_ns: int) -> int:
        """Milliseconds since the last tick."""
        return max(0, now_ns - self.beat_ns) // 1_000_000


class Row:
    """A process's own row. Only it writes; the agent only calls `reset` between two lives, and `ask_end`."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._since_ns = 0
        self._marks: list[tuple[int, str]] | None = None

    def tick(self) -> None:
        words = self._words
        words[_COUNTER] += 1
        words[_BEAT_NS] = _monotonic_ns()

    def set(
        self,
        *,
        step: int | None = None,
        phase: str | None = None,
        samples: int | None = None,
        generation: int | None = None,
    ) -> None:
        """Change the given fields, and count that as progress. `samples`: trained by this life in all.

        Raises: KeyError for an unknown phase.
        """
        words, now_ns = self._words, _monotonic_ns()
        if step is not None:
            words[_STEP] = step
        if phase is not None:
            if self._marks is not None:
                self._marks.append((time.time_ns(), phase))
            if self._since_ns:
                words[_SPENT_NS + words[_PHASE]] += now_ns - self._since_ns
            self._since_ns = now_ns
            if words[_PHASE] == _UPDATE and words[_LANES]:
                words[_WARM] = 1
            code = words[_PHASE] = PHASE_CODE[phase]
            words[_LANES] += code == _FORWARD
        if samples is not None:
            words[_SAMPLES] = samples
        if generation is not None:
            words[_GENERATION] = generation
        words[_COUNTER] += 1
        words[_BEAT_NS] = now_ns

    def chill(self) -> None:
        """Note that computations until the next update may have to be compiled."""
        self._words[_WARM] = 0

    def mark(self, marks: list[tuple[int, str]] | None) -> None:
        """From now on note each phase in `marks`, too, as (unix time in ns, name); None: no more."""
        self._marks = marks

    def seat(self, stage: int | None, role: str) -> None:
        """Set this worker's seat. Raises: ValueError for an unknown role."""
        self._words[_STAGE], self._words[_ROLE] = 0 if stage is None else stage + 1, ROLES.index(role)

    def sent(self, operation: str, n_bytes: int) -> None:
        """Count bytes sent to others. Raises: ValueError for an unknown operation."""
        self._words[_SENT_BYTES + OPERATIONS.index(operation)] += n_bytes

    def device_memory(self, allocated_bytes: int, reserved_bytes: int) -> None:
        """Set the device memory of tensors, and the memory that the allocator holds for them."""
        self._words[_ALLOCATED], self._words[_RESERVED] = allocated_bytes, reserved_bytes

    def reset(self, incarnation: int, pid: int, ranks: int = 1) -> None:
        """Begin a new life: everything zero, phase 'starting'. ranks: of the worker's cell."""
        words = self._words
        for i in range(_WORDS):
            words[i] = 0
        words[_INCARNATION], words[_PID], words[_RANKS] = incarnation, pid, ranks
        self.set(phase="starting")

    def set_pid(self, pid: int) -> None:
        self._words[_PID] = pid

    def ask_end(self) -> None:
        """Ask this worker to have all save and leave: the job's host ends the job, and no coordinator answers."""
        self._words[_ENDING] = 1

    @property
    def end_asked(self) -> bool:
        """Whether the agent has asked this life to end."""
        return bool(self._words[_ENDING])

    def leave(self, exit_code: int) -> None:
        """Note that this process is about to end with this code, for an agent that cannot wait for it."""
        self._words[_LEFT] = exit_code + 1

    @property
    def exit_code(self) -> int | None:
        """Exit code that the process announced; None if it did not."""
        return self._words[_LEFT] - 1 if self._words[_LEFT] else None

    def hide(self, until_ns: int) -> None:
        """A scripted partition: the agent is not to see this row before `until_ns` (monotonic)."""
        self._words[_UNSEEN_NS] = until_ns

    def hidden(self, now_ns: int) -> bool:
        """Whether a scripted partition keeps the agent from seeing this row."""
        return now_ns < self._words[_UNSEEN_NS]

    def read(self) -> Pulse:
        """Content of the row now; fields are read one after the other, not at one moment."""
        w = self._words
        phase, role = w[_PHASE], w[_ROLE]
        return Pulse(
            counter=w[_COUNTER],
            beat_ns=w[_BEAT_NS],
            step=w[_STEP],
            phase=PHASES[phase] if 0 <= phase < len(PHASES) else "idle",
            samples=w[_SAMPLES],
            incarnation=w[_INCARNATION],
            pid=w[_PID],
            generation=w[_GENERATION],
            lanes=w[_LANES],
            spent_ns=tuple(w[_SPENT_NS : _SPENT_NS + len(PHASES)]),
            sent_bytes=tuple(w[_SENT_BYTES : _SENT_BYTES + len(OPERATIONS)]),
            stage=w[_STAGE] - 1 if w[_STAGE] else None,
            role=ROLES[role] if 0 <= role < len(ROLES) else "",
            ranks=w[_RANKS],
            allocated_bytes=w[_ALLOCATED],
            reserved_bytes=w[_RESERVED],
            cold=not w[_WARM],
        )


class Board:
    """All rows. Made once for a host (`create`), attached by its agent and workers through the inherited descriptor.

    rows: number of workers that it has room for.
    """

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self.rows = len(memory) // ROW_BYTES // MAX_RANKS
        self._memory = memory
        self._words = memoryview(memory).cast("q")

    @classmethod
    def create(cls, rows: int = MAX_ROWS) -> Board:
        """A new board of zeros. Raises: ConfigError beyond `MAX_ROWS`."""
        return cls.attach(create_board_memory(rows))

    @classmethod
    def attach(cls, fd: int) -> Board:
        """The board behind an inherited descriptor."""
        size = os.fstat(fd).st_size
        check(size > 0 and size % (ROW_BYTES * MAX_RANKS) == 0, f"descriptor {fd} is no progress board: {size} bytes")
        return cls(fd, mmap.mmap(fd, size))

    def row(self, worker_id: int, cell_rank: int = 0) -> Row:
        """Row of one process. Raises: InvariantViolation if the board has no such row."""
        check(0 <= worker_id < self.rows, f"the board has rows 0 to {self.rows - 1}, asked for {worker_id}")
        check(0 <= cell_rank < MAX_RANKS, f"a worker has ranks 0 to {MAX_RANKS - 1}, asked for {cell_rank}")
        at = cell_rank * self.rows + worker_id
        return Row(self._words[at * _WORDS : (at + 1) * _WORDS])

    def begin(self, worker_id: int, incarnation: int, ranks: int) -> None:
        """Begin a new life of a worker with `ranks` processes."""
        for cell_rank in range(ranks):
            self.row(worker_id, cell_rank).reset(incarnation, 0, ranks)

    def read(self, worker_id: int) -> Pulse:
        """Content of a worker's head row, with the progress of the slowest of its ranks."""
        head = self.row(worker_id).read()
        if not 1 < head.ranks <= MAX_RANKS:
            return head
        cell = [head, *(self.row(worker_id, cell_rank).read() for cell_rank in range(1, head.ranks))]
        slowest = min(range(len(cell)), key=lambda cell_rank: cell[cell_rank].beat_ns)
        return replace(
            head,
            counter=cell[slowest].counter,
            beat_ns=cell[slowest].beat_ns,
            sent_bytes=tuple(map(sum, zip(*(pulse.sent_bytes for pulse in cell), strict=True))),
            slowest=slowest,
            allocated_bytes=sum(pulse.allocated_bytes for pulse in cell),
            reserved_bytes=sum(pulse.reserved_bytes for pulse in cell),
        )

    def close(self) -> None:
        """Close the descriptor. The mapping lives on while rows are in use."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_board_memory(rows: int) -> int:
    """The descriptor of a new board of zeros. Raises: ConfigError beyond `MAX_ROWS`."""
    if not 1 <= rows <= MAX_ROWS:
        raise ConfigError(f"a host has room for 1 to {MAX_ROWS} workers, got {rows}: use fewer workers")
    fd = os.memfd_create("everstep-board", os.MFD_CLOEXEC)
    os.ftruncate(fd, rows * MAX_RANKS * ROW_BYTES)
    return fd
