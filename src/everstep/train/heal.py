"""Healing: bring a worker to the state of the others, while they go on.

The donor takes one lazy snapshot at a step boundary and feeds what follows: each step's records and reduced gradient.
The joiner loads the snapshot and applies the steps, until the members switch to a plan that has it.
The same snapshot path serves a member that turns out to lack the state when a generation settles.
"""

from __future__ import annotations

import json
import logging
import queue
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from everstep.base.errors import CheckpointCorrupt, EverstepError, check
from everstep.base.plan import Member
from everstep.base.ports import Piece, Reduced
from everstep.exact.digest import bytes_of
from everstep.exact.snapshot import Snapshot
from everstep.exact.state import ModelState
from everstep.protocol.step_types import Key, Record
from everstep.runtime.peer import PeerConnection, peer_connect
from everstep.train.record import decode_records, encode_records

log = logging.getLogger(__name__)

MAX_BACKLOG = 16
_SERVE_TIMEOUT_S = 60.0


@dataclass
class Offer:
    """A snapshot on offer: state and records at `position`, with the gathers of that step."""

    position: Key
    records: Mapping[int, Record]
    gathers: Mapping[Key, Mapping[int, Record]]
    snapshot: Snapshot


@dataclass
class Feed:
    """One joiner being followed: `items` are (step number, then records, presence, application state, gradient)."""

    offer: Offer | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    items: queue.SimpleQueue[tuple[int, tuple[Any, ...]]] = field(default_factory=queue.SimpleQueue)
    closed: bool = False


class Donor:
    """Serves state to joiners (from handler threads) out of what the training thread offers at step boundaries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[Feed] = []
        self._feeds: list[Feed] = []
        self._settled: dict[int, Offer] = {}
        self._settled_changed = threading.Condition(self._lock)

    # ---- training thread

    def wanted(self) -> bool:
        return bool(self._asked)

    def offer(self, make: Callable[[], Offer]) -> None:
        """At a step boundary: give everyone who asked a snapshot of now; they are fed from the next step on."""
        with self._lock:
            asked, self._asked = self._asked, []
        if not asked:
            return
        offer = make()
        for feed in asked:
            feed.offer = offer
            feed.ready.set()
        with self._lock:
            self._feeds += asked

    def feed(
        self, step: int, records: Mapping[int, Record], reduced: Reduced, numel: int, application: Callable[[], bytes]
    ) -> None:
        """Pass a decided step on to those who follow, before it is applied here.

        application: the packed state of the user's loop as it is now; who follows does not run that loop.
        """
        with self._lock:
            self._feeds = [f for f in self._feeds if not f.closed]
            feeds = list(self._feeds)
        if not feeds:
            return
        flat = torch.empty(numel, dtype=torch.float32)
        for piece in reduced.pieces:
            flat[piece.start : piece.stop].copy_(piece.data)
        parts = (encode_records(records), reduced.presence, application(), bytes_of(flat))
        for feed in feeds:
            if feed.items.qsize() >= MAX_BACKLOG:
                feed.closed = True
            feed.items.put((step, parts))

    def offer_settled(self, generation: int, offer: Offer) -> None:
        """While settling: members of this generation may fetch this."""
        with self._settled_changed:
            self._settled = {generation: offer}
            self._settled_changed.notify_all()

    def forget_settled(self) -> None:
        """A decision was taken since: whoever had to fetch the state has it."""
        with self._lock:
            self._settled = {}

    def busy_snapshot(self) -> None:
        """Wait until what is on offer has been copied; call before the state changes."""
        with self._lock:
            offers = [f.offer for f in self._feeds if f.offer and not f.closed] + list(self._settled.values())
        for offer in offers:
            offer.snapshot.wait()

    # ---- handler threads

    def handle(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        """One joiner's connection, from request to end."""
        if request.get("kind") == "settle":
            self._serve_settled(connection, int(request["generation"]))
        elif request.get("kind") == "heal":
            self._serve_heal(connection)

    def _serve_settled(self, connection: PeerConnection, generation: int) -> None:
        with self._settled_changed:
            self._settled_changed.wait_for(lambda: generation in self._settled, timeout=_SERVE_TIMEOUT_S)
            offer = self._settled.get(generation)
        if offer is not None:
            send_offer(connection, offer)

    def _serve_heal(self, connection: PeerConnection) -> None:
        feed = Feed()
        with self._lock:
            self._asked.append(feed)
        try:
            if not feed.ready.wait(timeout=_SERVE_TIMEOUT_S) or feed.offer is None:
                return
            send_offer(connection, feed.offer)
            feed.offer = None
            self._stream(connection, feed)
        except (EverstepError, OSError) as error:
            log.debug("the joiner left: %s", error)  # it went away, or became a member: nothing is owed to it
        finally:
            feed.closed = True

    def _stream(self, connection: PeerConnection, feed: Feed) -> None:
        last = 0
        while not feed.closed:
            try:
                step, parts = feed.items.get(timeout=0.02)
            except queue.Empty:
                connection.send_json({"kind": "caught_up", "step": last})
                continue
            last = step
            connection.send_json({"kind": "step", "step": step, "nbytes": [len(part) for part in parts]})
            for part in parts:
                connection.send_bytes([part])


def send_offer(connection: PeerConnection, offer: Offer) -> None:
    """Manifest and records first, then the blocks in order."""
    offer.snapshot.wait()
    records = encode_records(offer.records)
    gathers = {f"{k.step},{k.seq}": encode_records(v).hex() for k, v in offer.gathers.items()}
    connection.send_json(
        {
            "position": list(offer.position),
            "records": records.hex(),
            "gathers": gathers,
            "manifest": offer.snapshot.manifest(),
        }
    )
    for index in range(offer.snapshot.n_blocks):
        connection.send_bytes([offer.snapshot.read_block(index)])


@dataclass(frozen=True)
class Received:
    """An offer as it arrived; `blocks` are in memory and their hashes are checked when they are loaded."""

    position: Key
    records: Mapping[int, Record]
    gathers: Mapping[Key, Mapping[int, Record]]
    manifest: dict[str, Any]
    blocks: list[memoryview]


def receive_offer(connection: PeerConnection, tick: Callable[[], None]) -> Received:
    """Raises: EverstepError or OSError if the donor goes away."""
    header = connection.recv_json()
    blocks = []
    for _ in header["manifest"]["blocks"]:
        block = memoryview(bytearray(int(header["manifest"]["block_bytes"])))
        connection.recv_into(block)
        blocks.append(block)
        tick()
    gathers = {
        Key(*map(int, name.split(","))): decode_records(bytes.fromhex(text)) for name, text in header["gathers"].items()
    }
    records = decode_records(bytes.fromhex(header["records"]))
    return Received(Key(*header["position"]), records, gathers, header["manifest"], blocks)


@dataclass(frozen=True)
class FollowedStep:
    """One step from a donor's feed; `application`: packed state of the user's loop before the step's update."""

    step: int
    records: Mapping[int, Record]
    reduced: Reduced
    application: bytes


def next_item(connection: PeerConnection, numel: int) -> FollowedStep | int:
    """The next step of the feed, or (caught up) the number of the last one."""
    header = connection.recv_json()
    if header["kind"] == "caught_up":
        return int(header["step"])
    sizes = header["nbytes"]
    check(sizes[3] == numel * 4, f"a fed gradient has {sizes[3]} bytes, expected {numel * 4}")
    records, presence, application = (bytearray(size) for size in sizes[:3])
    flat = torch.empty(numel, dtype=torch.float32)
    for part in (records, presence, application, bytes_of(flat)):
        connection.recv_into(part)
    step = int(header["step"])
    reduced = Reduced(step, (Piece(0, numel, flat),), bytes(presence), (0, 0))
    return FollowedStep(step, decode_records(bytes(records)), reduced, bytes(application))


def pack_state(state: ModelState) -> bytes:
    """A small state (of the user's loop, say) in one piece."""
    manifest = state.manifest()
    blocks = [bytes(state.read_block(i)) for i in range(state.n_blocks)]
    return msgspec.msgpack.encode((json.dumps(manifest), blocks))


def unpack_state(state: ModelState, data: bytes) -> None:
    """Load what `pack_state` made. Raises: CheckpointCorrupt if it was altered."""
    manifest, blocks = msgspec.msgpack.decode(data, type=tuple[str, list[bytes]])
    state.load(json.loads(manifest), lambda i: blocks[i])


def readable(connection: PeerConnection, timeout_s: float) -> bool:
    """Whether something can be read within the timeout."""
    return bool(select.select([connection.fileno()], [], [], timeout_s)[0])


def connect_first(donors: list[Member], token: bytes, request: dict[str, Any]) -> PeerConnection:
    """Connect to the first donor that answers.

    Raises: CheckpointCorrupt if none does (nobody to copy from).
    """
    reasons = []
    for donor in donors:
        try:
            return peer_connect(donor.address, token, request)
        except (EverstepError, OSError) as error:
            reasons.append(f"{donor.key} at {donor.address}: {error}")
    raise CheckpointCorrupt("no donor could be reached: " + "; ".join(reasons))
