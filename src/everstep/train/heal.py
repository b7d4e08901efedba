"""Healing: bring a worker to the state of the others, while they go on.

The donor takes one lazy snapshot at a step boundary and feeds what follows: each step's records and reduced gradients.
The joiner loads the snapshot and applies the steps, until the members switch to a plan that has it. The same snapshot
path serves a member that turns out to lack the state when a generation settles. All of it goes by stages: who asks
names those that it wants.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import msgspec
import torch

from everstep.base.errors import CheckpointCorrupt, EverstepError, InvariantViolation, ProtocolError
from everstep.base.extents import Coded, Extents, Runs, union
from everstep.base.ports import Piece, Reduced
from everstep.checkpoint.vault import Kept, StageState
from everstep.exact.digest import bytes_of, digest_bytes, tensor_of_bytes
from everstep.exact.image import Image, sealed, sizes_of
from everstep.exact.layout import BLOCK_ELEMENTS
from everstep.exact.reduce import TiePlace
from everstep.exact.snapshot import StateInPlace
from everstep.exact.state import ModelState
from everstep.protocol.driver.records import decode_records, encode
from everstep.protocol.moving import giver
from everstep.protocol.moving.giver import AskerCame, JointAsk, read_joint
from everstep.protocol.step_types import Key, Record
from everstep.runtime.link.peer import PeerConnection

log = logging.getLogger(__name__)

_SERVE_TIMEOUT_S = 60.0
_MOST_NAMES = 50
_MOST_BYTES = 1 << 36
_MOST_PARAMETERS = 1 << 20
_OTHER_FORMS = (
    *(LookupError, TypeError, ValueError, AttributeError, OverflowError, MemoryError, RecursionError),
    *(InvariantViolation, msgspec.MsgspecError),
)


# ---- states by block


Held = tuple[Kept, Extents]
"""A snapshot from any worker, and the blocks that are there."""

Layers = Sequence[Held]
"""One state in several snapshots that have a part each: a block comes from the first one that has it."""


def joint_manifest(told: Sequence[tuple[dict[str, Any], Extents]], own: Iterable[Held] = ()) -> dict[str, Any]:
    """The manifest of a state that no worker has completely: each block's digest comes from a worker that has it.

    told: manifests, and the blocks that their makers have; digests of other blocks are not valid. own: this
    worker's.
    """
    first = told[0][0]
    digests: list[str | None] = [None] * len(first["blocks"])
    for manifest, there in told:
        if manifest["entries"] == first["entries"]:
            for lo, hi in there.spans(sizes_of(manifest)):
                digests[lo:hi] = [a or b for a, b in zip(digests[lo:hi], manifest["blocks"][lo:hi], strict=True)]
    for readable, there in own:
        for lo, hi in there.spans((("", readable.n_blocks),)):
            for n in range(lo, min(hi, len(digests))):
                digests[n] = digests[n] or digest_bytes(readable.read_block(n))
    body = {key: value for key, value in first.items() if key != "digest"}
    return sealed({**body, "blocks": [a or b for a, b in zip(digests, first["blocks"], strict=True)]})


# ---- the donor


class OfferTold(msgspec.Struct, frozen=True, kw_only=True):
    """Facts beside a state at `position`: the records of that decision, and the gathers of that step.

    application: what `LoopState.told` gives, where snapshots may have a later state; empty if the loop has none. past:
    the loop has changed tensors after that step and is through with it: application is what it goes on with. untold:
    of steps up to there that may not have been told. changed: names that the loop has changed and that are not carried.
    names: by stage, in which entry of the manifest each name of the model's state_dict is; of a split model.
    """

    position: Key
    records: Mapping[int, Record] = {}
    gathers: Mapping[Key, Mapping[int, Record]] = {}
    application: bytes = b""
    past: bool = False
    untold: bytes = b""
    changed: tuple[str, ...] = ()
    names: Mapping[int, Mapping[str, str]] = {}


class Offer(OfferTold, frozen=True, kw_only=True):
    """held: the state on offer, by stage."""

    held: Mapping[int, Layers]


class OfferHead(OfferTold, frozen=True, kw_only=True):
    """An offer on the wire, before any block. manifests: as JSON, of the requested stages; empty for an asker that
    has them from another donor. there: blocks of these stages."""

    manifests: list[str]
    there: dict[int, Coded]

    def place(self, stages: Iterable[int]) -> tuple[Key, dict[int, Extents]]:
        """A donor's position, and its blocks of these stages. Raises: ProtocolError if the head does not say them."""
        with _Sent("what a donor has"):
            return self.position, {k: Extents.decoded(self.there[k]) for k in stages}


class ReceivedOffer(OfferTold, frozen=True, kw_only=True):
    """An offer as it arrived, with the states by stage."""

    states: Mapping[int, StageState]


def offered(head: OfferTold, states: Mapping[int, StageState]) -> ReceivedOffer:
    """An offer of a donor, with the states that came."""
    return ReceivedOffer(**{**_told(head), "changed": head.changed[:_MOST_NAMES]}, states=states)


def _told(offer: OfferTold) -> dict[str, Any]:
    return {name: getattr(offer, name) for name in OfferTold.__struct_fields__}


@dataclass(frozen=True)
class StageGradient:
    """The reduced gradient of one stage, and gradients of other stages for shared parameters."""

    reduced: Reduced
    received: Mapping[TiePlace, torch.Tensor | None] = field(default_factory=dict)


class AskerTalk:
    """A conversation with one that wants state. items: the steps that it is to get, as (message header, parts). joint:
    its ask, if several donors offer it a state together."""

    def __init__(self, joint: JointAsk | None = None) -> None:
        self.joint = joint
        self.items: queue.SimpleQueue[tuple[dict[str, Any], list[Any]]] = queue.SimpleQueue()
        self.offer: Offer | None = None
        self.over = False
        self._told = threading.Event()

    def give(self, offer: Offer | None) -> None:
        self.offer = offer
        self._told.set()

    def took(self) -> None:
        """The receiver has read everything: release it."""
        self.offer = None

    def end(self) -> None:
        """Nothing more comes."""
        self.over = True
        self._told.set()

    def given(self, timeout_s: float) -> Offer | None:
        """The offer for this receiver, as soon as it is known; None if it gets nothing."""
        self._told.wait(timeout_s)
        return self.offer


class Donor:
    """Serves state (from handler threads) out of what the training thread has to give, as `protocol.moving.giver` says.

    others: answers further kinds of requests, by kind.
    """

    def __init__(
        self,
        asked: Callable[[JointAsk | None], None] = lambda joint: None,
        others: Mapping[str, Callable[[PeerConnection, dict[str, Any]], None]] | None = None,
        doubt: Callable[[int, int], None] = lambda stage, step: None,
    ) -> None:
        """asked: called, in a handler thread, when a joiner wants to follow. doubt: called in a handler thread with
        a stage and a step when blocks reached an asker damaged."""
        self._told_asked = asked
        self._lock = threading.RLock()
        self._giver = giver.Giver()
        self._shelves: dict[giver.ShelfKind, Offer] = {}
        self._others = dict(others or {})
        self._doubt = doubt

    def _tell(self, event: giver.GiverEvent, offer: Offer | None = None, item: Any = None) -> None:
        """offer: what goes on a shelf, or of the state as it is. item: makes the step that is decided."""
        with self._lock:
            if isinstance(event, giver.ShelfFilled) and offer is not None:
                self._shelves[event.shelf[0]] = offer
            elif isinstance(event, giver.ShelfEmptied):
                self._shelves.pop(event.kind, None)
            for effect in self._giver.handle(event):
                match effect:
                    case giver.GiveState(asker, shelf):
                        asker.give(self._shelves.get(shelf) if shelf else offer)
                    case giver.FeedStep(asker, stages):
                        asker.items.put(item(stages, asker.joint))
                    case giver.EndAsker(asker):
                        asker.end()

    # ---- training thread

    def offer(self, make: Callable[[Sequence[AskerCame]], Offer], tickets: frozenset[int] = frozenset()) -> None:
        """At a step boundary: give everyone who asked a snapshot of now; they are fed from the next step on. tickets:
        of joiners that get it from several donors, and may have it now."""
        with self._lock:  # who asks meanwhile waits for the next one
            if asked := self._giver.waiting(tickets):
                offer = make(asked)
                self._tell(giver.StandsStill(frozenset(offer.held), tickets), offer)

    def feed(
        self,
        step: int,
        records: Mapping[int, Record],
        gradients: Mapping[int, StageGradient],
        numel: Mapping[int, int],
        application: Callable[[], bytes],
        segments: Callable[[int], Mapping[int, Runs]] = lambda step: {},
        blocks: Callable[[int, Runs, bool], Runs] = lambda stage, segments, rest: (),
    ) -> None:
        """Pass a decided step on to those who follow, before it is applied here.

        gradients, numel (of the flat vector): by stage. application: the packed state of the user's loop as it is now;
        who follows does not run that loop. segments: of the optimizer's state, whose gradients are here, by stage, if
        not all. blocks: of the gradient of a stage, of these segments, and of the rest.
        """
        if self._giver.feeds:
            common = [encode(records), application()]
            whole = cache(lambda stage: _pack_gradient(gradients[stage], numel[stage]))

            def item(stages: Sequence[int], joint: JointAsk | None) -> tuple[dict[str, Any], list[Any]]:
                if joint is None or joint.segments is None:
                    packed = {k: whole(k) for k in stages}
                else:
                    some = {k: _some(gradients[k], blocks(k, joint.segments, joint.rest), joint.rest) for k in stages}
                    packed = {k: _pack_gradient(some[k], numel[k]) for k in stages}
                told = {str(k): packed[k][0] for k in stages}
                header = {"kind": "step", "step": step, "nbytes": [len(p) for p in common], "stages": told}
                return header, [*common, *(part for k in stages for part in packed[k][1])]

            self._tell(giver.StepToFeed(frozenset(gradients), segments(step)), item=item)

    def cut(self) -> None:
        """The state jumps: end all feeds, so that followers start over."""
        self._tell(giver.WentElsewhere())

    def began(self) -> None:
        """All members have settled in a new generation: who waits for several donors starts over."""
        self._tell(giver.GenerationBegan())

    def shelve(self, shelf: giver.ShelfName, offer: Offer) -> None:
        """Members may fetch this."""
        self._tell(giver.ShelfFilled(shelf, frozenset(offer.held)), offer)

    def unshelve(self, kind: giver.ShelfKind) -> None:
        """No worker needs that shelf any more."""
        in_place = [one for one in _readable([self._shelves.get(kind)]) if isinstance(one, StateInPlace)]
        self._tell(giver.ShelfEmptied(kind))
        for one in in_place:
            one.release()

    @property
    def feeds(self) -> bool:
        """Whether a follower gets the next step."""
        with self._lock:
            return self._giver.feeds

    @property
    def busy(self) -> bool:
        """Whether an asker still copies a kept snapshot."""
        return self._giver.busy

    def busy_snapshot(self, *, stays: bool = False) -> None:
        """Wait until the offered state has been copied; call before the state changes. stays: what is offered does
        not."""
        with self._lock:
            offers = [*(asker.offer for asker in self._giver.giving), *self._shelves.values()]
        for readable in _readable(offers):
            if not (stays and isinstance(readable, StateInPlace)):
                with contextlib.suppress(Exception):  # a copy that failed is none, and says so to its readers
                    readable.wait()

    # ---- handler threads

    def handle(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        kind = request.get("kind")
        if kind == "settle":
            self._serve(connection, request, (kind, int(request["generation"])), follows=False)
        elif kind == "kept":
            self._serve(connection, request, (kind, int(request["step"])), follows=False)
        elif kind == "heal":
            self._serve(connection, request, None, follows=request["ranges"] == "first")
        elif kind in self._others:
            self._others[str(kind)](connection, request)

    def _serve(
        self, connection: PeerConnection, request: dict[str, Any], shelf: giver.ShelfName | None, *, follows: bool
    ) -> None:
        """Manifests and records first, then the blocks that are asked for, then steps."""
        joint = read_joint(request["joint"]) if request.get("joint") else None
        asker, stages = AskerTalk(joint), tuple(request["stages"])
        self._tell(AskerCame(asker, stages, shelf, follows, joint))
        if shelf is None:
            self._told_asked(joint)
        try:
            offer = asker.given(_SERVE_TIMEOUT_S)
            if offer is None:
                return
            connection.send_bytes([msgspec.msgpack.encode(_head(offer, stages, request["ranges"] == "first"))])
            step = offer.position.step
            serve_blocks(connection, offer.held, lambda stage: self._doubt(stage, step))
            self._tell(giver.AskerHasAll(asker))
            asker.took()
            if follows:
                self._stream(connection, asker)
        except (EverstepError, OSError) as error:
            log.debug("who wanted state left: %s", error)  # it went away, or has all: nothing is owed to it
        finally:
            self._tell(giver.AskerGone(asker))

    def _stream(self, connection: PeerConnection, asker: AskerTalk) -> None:
        last = 0
        while not asker.over:
            try:
                header, parts = asker.items.get(timeout=0.02)
            except queue.Empty:
                connection.send_json({"kind": "caught_up", "step": last})
                continue
            self._tell(giver.StepSent(asker))
            last = header["step"]
            connection.send_json(header)
            for part in parts:
                connection.send_bytes([part])


def _readable(offers: Iterable[Offer | None]) -> Iterator[Kept]:
    for offer in offers:
        for readable, _ in chain.from_iterable(offer.held.values()) if offer is not None else ():
            yield readable


# ---- states on the wire


def serve_blocks(connection: PeerConnection, held: Mapping[int, Layers], doubt: Callable[[int], None]) -> None:
    """Blocks of these stages as they are asked for, until the other side has enough or goes.

    doubt: called when blocks of a stage came damaged.

    Raises: CollectiveAborted when the other side has gone.
    """
    while not (request := connection.recv_json()).get("enough"):
        stage = int(request["stage"])
        n_blocks = held[stage][0][0].n_blocks
        if request.get("damaged"):
            doubt(stage)
            continue
        layers = [(snapshot, there.spans((("", n_blocks),))) for snapshot, there in held[stage]]
        numbers = [n for lo, hi in request["blocks"] for n in range(max(lo, 0), min(hi, n_blocks))]
        for n in numbers:
            found = (snapshot for snapshot, spans in layers if any(lo <= n < hi for lo, hi in spans))
            connection.send_bytes([snapshot.read_block(n) for snapshot in islice(found, 1)])


def _head(offer: Offer, stages: Sequence[int], leads: bool) -> OfferHead:
    """leads: otherwise the asker takes only blocks, and has the manifests of another donor."""
    said = _told(offer) if leads else {**_told(offer), "untold": b""}
    told = {k: [(snapshot.manifest(), there) for snapshot, there in offer.held[k]] for k in stages if leads}
    manifests = [json.dumps(of[0][0] if len(of) == 1 else joint_manifest(of)) for of in told.values()]
    there = {k: union(part for _, part in offer.held[k]).encoded() for k in stages}
    return OfferHead(**said, manifests=manifests, there=there)


def receive_head(connection: PeerConnection) -> OfferHead:
    """Receive a donor's offer, which comes before the blocks in one run of bytes, since a frame has a limit.

    Raises: CollectiveAborted if it goes; ProtocolError for another form.
    """
    with _Sent("what a donor offers"):
        return _heads.decode(connection.recv_bytes(_MOST_BYTES))


_heads = msgspec.msgpack.Decoder(OfferHead)


class _Sent(contextlib.AbstractContextManager[None]):
    """Turns what reading something raises that is not of the expected form into `ProtocolError`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _OTHER_FORMS):
            raise ProtocolError(f"expected {self._what}, got another form ({error!r:.200})") from error


# ---- steps on the wire


@dataclass(frozen=True)
class FollowedStep:
    """One step from a donor's feed. application: packed state of the user's loop before the step's update."""

    step: int
    records: Mapping[int, Record]
    gradients: Mapping[int, StageGradient]
    application: bytes


def next_item(connection: PeerConnection, numel: Mapping[int, int]) -> FollowedStep | int:
    """The next step of the feed, or (caught up) the number of the last one. numel: by stage, as for `feed`.

    Raises: CollectiveAborted if the donor goes; ProtocolError if it sends something else.
    """
    header = connection.recv_json()
    with _Sent("a step that a donor feeds"):
        if header["kind"] == "caught_up":
            return int(header["step"])
        records, application = (connection.recv_bytes(_MOST_BYTES) for _ in range(2))
        step = int(header["step"])
        gradients = {
            int(k): _receive_gradient(connection, step, facts, numel[int(k)]) for k, facts in header["stages"].items()
        }
        return FollowedStep(step, decode_records(bytes(records)), gradients, bytes(application))


def _some(gradient: StageGradient, blocks: Runs, rest: bool) -> StageGradient:
    """These blocks of a gradient, and with the rest what other stages have given."""
    pieces = []
    for piece in gradient.reduced.pieces:
        for lo, hi in blocks:
            start, stop = max(piece.start, lo * BLOCK_ELEMENTS), min(piece.stop, hi * BLOCK_ELEMENTS)
            if start < stop:
                pieces.append(Piece(start, stop, piece.data[start - piece.start : stop - piece.start]))
    reduced = replace(gradient.reduced, pieces=tuple(pieces))
    return StageGradient(reduced, gradient.received if rest else {})


def joined(steps: Sequence[FollowedStep]) -> FollowedStep:
    """One step, as several donors have fed it: blocks may have come twice. The first one fed what is not dealt out."""
    first, gradients = steps[0], dict[int, StageGradient]()
    for stage, gradient in first.gradients.items() if len(steps) > 1 else ():
        pieces: list[Piece] = []
        every = (piece for one in steps for piece in one.gradients[stage].reduced.pieces)
        for piece in sorted(every, key=lambda one: (one.start, -one.stop)):
            start = max(piece.start, pieces[-1].stop if pieces else 0)
            if start < piece.stop:
                pieces.append(Piece(start, piece.stop, piece.data[start - piece.start :]))
        gradients[stage] = StageGradient(replace(gradient.reduced, pieces=tuple(pieces)), gradient.received)
    return replace(first, gradients=gradients) if gradients else first


def _pack_gradient(gradient: StageGradient, numel: int) -> tuple[dict[str, Any], list[Any]]:
    """Description of a gradient, and its bytes."""
    ranges: list[tuple[int, int]] = []
    for piece in gradient.reduced.pieces:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == piece.start else piece.start
        ranges.append((first, piece.stop))
    flats = [torch.empty(stop - start, dtype=torch.float32) for start, stop in ranges]
    for piece in gradient.reduced.pieces:
        k = bisect(ranges, (piece.start, numel)) - 1
        flats[k][piece.start - ranges[k][0] : piece.stop - ranges[k][0]].copy_(piece.data)
    there = [(p, t) for p, t in gradient.received.items() if t is not None]
    told = {
        "presence": len(gradient.reduced.presence),
        "numel": numel,
        "ranges": ranges,
        "tied": [[p.name, p.unit, p.stage, t.numel()] for p, t in there],
        "absent": [[p.name, p.unit, p.stage] for p, t in gradient.received.items() if t is None],
    }
    tied = [bytes_of(t.detach().to("cpu", torch.float32, copy=True)) for _, t in there]
    return told, [gradient.reduced.presence, *map(bytes_of, flats), *tied]


def _receive_gradient(connection: PeerConnection, step: int, told: dict[str, Any], numel: int) -> StageGradient:
    if told["numel"] != numel:
        raise ProtocolError(f"expected a fed gradient of {numel} elements, got {str(told['numel'])[:40]}")
    ranges = [(int(start), int(stop)) for start, stop in told["ranges"]]
    ends = [0, *(end for one in ranges for end in one), numel]
    if ends != sorted(ends) or any(start == stop for start, stop in ranges):
        raise ProtocolError(f"expected ranges of a fed gradient that ascend up to {numel}, got {str(ranges)[:80]}")
    presence = connection.recv_bytes(numel + _MOST_PARAMETERS)
    pieces = tuple(Piece(lo, hi, torch.empty(hi - lo, dtype=torch.float32)) for lo, hi in ranges)
    for piece in pieces:
        connection.recv_into(bytes_of(piece.data))
    received: dict[TiePlace, torch.Tensor | None] = {TiePlace(*row): None for row in told["absent"]}
    for name, unit, stage, size in told["tied"]:
        if not 0 <= size <= numel:
            raise ProtocolError(f"expected a tied gradient of at most {numel} elements, got {str(size)[:40]}")
        tied = torch.empty(size, dtype=torch.float32)
        connection.recv_into(bytes_of(tied))
        received[TiePlace(name, unit, stage)] = tied
    return StageGradient(Reduced(step, pieces, bytes(presence), ()), received)


# ---- small states


class _Small(msgspec.Struct, array_like=True):
    """A small state in one piece. entry: another one that goes with it; moved: tensors beside it, by name, each as
    dtype, shape and bytes. See `LoopState`."""

    manifest: str
    blocks: list[bytes]
    entry: bytes = b""
    moved: dict[str, tuple[str, tuple[int, ...], bytes]] = {}


_small = msgspec.msgpack.Decoder(_Small)  # made here: two threads that make one at once end the process


def pack_state(state: ModelState, settings: Mapping[str, Any] | None = None) -> bytes:
    """A small state (of the user's loop, say) in one piece. settings: of the model, if not the present ones."""
    manifest: Mapping[str, Any] = state.manifest()
    return _packed(manifest if settings is None else with_settings(manifest, settings), state)


def with_settings(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manifest with these settings of the model."""
    body = {key: value for key, value in manifest.items() if key not in ("digest", "settings")}
    return sealed({**body, "settings": dict(settings)} if settings else body)


def _packed(manifest: Mapping[str, Any], of: ModelState | Image) -> bytes:
    return msgspec.msgpack.encode(_Small(json.dumps(manifest), [bytes(of.read_block(i)) for i in range(of.n_blocks)]))


def with_entry(data: bytes, entry: bytes) -> bytes:
    """A state from `pack_state`, with another one beside it."""
    if not entry:
        return data
    return msgspec.msgpack.encode(msgspec.structs.replace(_small.decode(data), entry=entry))


def with_moved(data: bytes, moved: Mapping[str, torch.Tensor]) -> bytes:
    """A state from `pack_state`, with tensors beside it."""
    if not moved:
        return data
    told = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), bytes_of(t)) for name, t in moved.items()}
    small = _small.decode(data)
    return msgspec.msgpack.encode(msgspec.structs.replace(small, moved=told))


def moved_in(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors that `with_moved` put beside a state. Raises: ProtocolError for another form."""
    with _Sent("tensors that a loop has changed"):
        told = _small.decode(data).moved if data else {}
        return {name: tensor_of_bytes(*facts) for name, facts in told.items()}


class StateCopy:
    """A copy of a small state, where its tensors are; its memory is used again for the next one."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._image: Callable[[], Image] | None = None

    def take(self, state: ModelState) -> None:
        entries, tensors, values, _ = state.live_tensors(settings=False)
        alike = [(t.dtype, t.shape, t.device) for t in tensors] == [(t.dtype, t.shape, t.device) for t in self._tensors]
        with torch.no_grad():
            if alike:
                for copy, tensor in zip(self._tensors, tensors, strict=True):
                    copy.copy_(tensor)
            else:
                self._tensors = [tensor.detach().clone() for tensor in tensors]
        self._image = partial(Image.of_tensors, entries, self._tensors, values, state.outline)

    def packed(self, settings: Mapping[str, Any]) -> bytes:
        """As `pack_state`, with these settings of the model; empty if nothing was taken."""
        if self._image is None:
            return b""
        image = self._image()
        return _packed(with_settings(image.manifest, settings), image)


def unpack_state(state: ModelState, data: bytes) -> bytes:
    """Load what `pack_state` made; returns what `with_entry` put beside it. Raises: CheckpointCorrupt if it was
    altered."""
    try:
        small = _small.decode(data)
        state.load(json.loads(small.manifest), lambda i: small.blocks[i])
        return small.entry
    except _OTHER_FORMS as error:
        raise CheckpointCorrupt(f"expected a small state, got another form ({error!r:.200})") from error
