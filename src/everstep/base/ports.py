"""Needs of the pure machines and the training loop from the world, as protocols: transport and channel.

Apart so that production, tests and the simulator can each supply their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from everstep.base.extents import Runs
from everstep.base.plan import Plan


class Node(NamedTuple):
    """A node of the lane tree: the lanes lo to hi - 1."""

    lo: int
    hi: int


class Tag(NamedTuple):
    """Name of one exchange of small records inside a generation.

    kind: "settle" or "decide"; step, seq: the decision's key (0, 0 for settle).
    """

    kind: str
    step: int
    seq: int


MOST_LANES = 1 << 13
"""Exclusive limit of lane numbers in messages between stages, those of lanes that are computed twice included."""

HopKind = Literal["act", "grad", "tied", "eval"]


class Hop(NamedTuple):
    """Name of one message between two members inside a generation; a sender uses it once per receiver.

    kind: activations on their way forward, their gradients on the way back, a reduced gradient of a tied parameter,
    activations of an evaluation. part: the part of the model that receives it. lane: the lane, or the number of the
    batch in an evaluation.
    """

    step: int
    kind: HopKind
    part: int
    lane: int


@dataclass(frozen=True)
class Piece:
    """A contiguous range [start, stop) of the flat gradient, in elements; `data` is a flat tensor view."""

    start: int
    stop: int
    data: Any


@dataclass(frozen=True)
class Reduced:
    """The reduced (summed, not normalised) flat gradient of a step, the part that this worker holds.

    `pieces` ascend and cover the part of the layout that this worker takes (`Transport.divide`), all where the members
    divide nothing. `presence`: one byte per layout
    entry, 1 where at least one lane had it. `owned`: the blocks whose norms this worker reports; each block has one
    owner. The memory stays valid and unchanged until this worker begins another step (asks for a node of it, or reduces
    it), even if its owner dies.
    """

    step: int
    pieces: tuple[Piece, ...]
    presence: bytes
    owned: Runs


@dataclass(frozen=True)
class Portion:
    """A part of a stage's parameters after an update: `source` has it, `takers`, ascending, lack it.

    `data`: the part itself, in the parameters' memory: flat, contiguous, float32, without gradient. It is read at the
    source and written at the takers.
    """

    source: int
    takers: tuple[int, ...]
    data: Any


class Transport(Protocol):
    """Moves gradients and records among the members of one generation.

    One thread calls all methods but `abort`. Blocking calls raise `CollectiveAborted` within a few milliseconds after
    `abort(generation)` was called for theirs, and when a peer is found dead (`accused` names it).
    They call `tick()` (progress counter) at least every 20 ms while they wait.
    """

    @property
    def segment(self) -> str:
        """Text for `Member.segment`, with which peers attach."""

    def open(self, plan: Plan) -> None:
        """Regroup: attach to the plan's members. Forgets every pending operation of older generations."""

    def node(self, step: int, node: Node) -> Any:
        """The flat tensor, `layout.numel` elements, 64-byte aligned, that the caller fills with the node's sum.

        The same (step, node) gives the same memory, so results survive a change of generation. Calling with a new
        step frees those of the step before.
        """

    def divide(self, step: int, takes: Mapping[int, Runs] | None, *, frees: bool = False) -> None:
        """Who takes which blocks of this step's result, by worker id; None: all take all. Where the plan's members hold
        segments of the optimizer's state, call it before `offering` and `reduce`, once the state is that of the step
        before: all members say the same. A second call for a step in the same generation changes nothing. frees: blocks
        of nodes may be given back once they have been added up; who is asked for a receiver of final blocks then lets
        go of what it has given."""

    def given_back(self, step: int) -> frozenset[Node]:
        """Nodes of the step of which blocks were given back in an older generation: their lanes have to be computed
        again. Each is named once."""

    def offering(self, step: int) -> OnFinal | None:
        """Receiver of this step's blocks as they become final, so that they leave before `reduce`; None if that would
        not help. Call it between `open` and the step's `reduce`, in the same generation."""

    def reduce(self, step: int, presence: Mapping[Node, bytes]) -> Reduced:
        """Offer the filled nodes of this step (presence bytes per node), wait for all others', and finish the tree."""

    def exchange(self, tag: Tag, payload: bytes) -> dict[int, bytes]:
        """All-gather of small records: every member's payload by worker_id, this one's included."""

    def settled(self) -> None:
        """Call it when all members are known to have received everything that was sent here in this generation."""

    def abort(self, generation: int) -> None:
        """Thread-safe. Free any caller that waits in an operation of this generation or an older one."""

    def close(self) -> None:
        """Release all resources."""


class Channel(Protocol):
    """Moves single messages between members of one generation, of all stages; a member may write to itself.

    One thread calls all methods but `abort`. `recv` raises `CollectiveAborted` within milliseconds after
    `abort(generation)` was called for its generation, and when the sender died (`accused` names it).
    """

    @property
    def segment(self) -> str:
        """Text for `Member.segment` in the plan given to `open`, with which peers attach."""

    def open(self, plan: Plan) -> None:
        """Regroup. Forgets everything sent or received in older generations."""

    def send(self, to: int, key: Hop, tensors: Sequence[Any], meta: bytes = b"") -> None:
        """Copy the tensors and send them, without waiting for the receiver. `meta`: opaque bytes that go along."""

    def expect(self, source: int, key: Hop) -> None:
        """Hint that `recv` will be called for this message, so that the transfer can overlap with computing."""

    def recv(self, source: int, key: Hop) -> tuple[list[Any], bytes]:
        """Wait for a message. Returns (fresh tensors that belong to the caller, at 64-byte boundaries; the
        description).

        Bits, dtypes and shapes are the sender's, and its strides where they are dense (else contiguous ones). The
        tensors do not require gradients.
        """

    def spread(self, step: int, stage: int, portions: Sequence[Portion]) -> None:
        """Give the portions of which this worker is the source, and take those that it lacks, straight into their
        memory, first ones first. Returns when it has all of them, and what it gives may change again; if it raises,
        some have come and others have not. All members of the stage's pool call it with the same portions, for steps
        and stages that ascend in a generation. The bytes under way are bounded, however many there are.
        """

    def forget(self, step: int) -> None:
        """All members have received the messages of steps up to this one: call it after the step's agree."""

    def abort(self, generation: int) -> None:
        """Thread-safe. Free any caller that waits in an operation of this generation or an older one."""

    def close(self) -> None:
        """Release all resources."""


OnTick = Callable[[], None]

OnFinal = Callable[[Node, int, int], None]
"""Called with a node whose blocks [first, last) are final, no entry in them being absent. Never raises."""
