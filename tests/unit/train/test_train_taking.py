"""State from others, over real sockets: of one donor or several, whole or in part, and what comes damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint_saving import make_state
from everstep.base.cause import Cause
from everstep.base.errors import CollectiveAborted, EverstepError
from everstep.base.extents import NONE, WHOLE, Extents, Runs
from everstep.base.plan import Member, Plan, Seat
from everstep.base.ports import Piece, Reduced
from everstep.exact.image import BLOCK_BYTES, sizes_of
from everstep.exact.layout import BLOCK_ELEMENTS
from everstep.exact.state import ModelState
from everstep.exact.state_memory import HeldBlock, RoomThere
from everstep.protocol.driver import operations as do
from everstep.protocol.messages import MAX_FRAME_BYTES
from everstep.protocol.moving.giver import JointAsk
from everstep.protocol.step_types import Key, Pieces, Record
from everstep.runtime.link.peer import PeerConnection, PeerServer, peer_connect
from everstep.train import taking
from everstep.train.executor import Cutter, Unusable
from everstep.train.heal import Donor, FollowedStep, Held, Offer, ReceivedOffer, StageGradient, joined, next_item
from everstep.train.taking import Copier
from everstep.train.transfers import Transfers

TOKEN = b"x" * 32
RECORDS = {1: Record(0, b"r")}
GENEROUS_S = 20.0
AT = Key(4, 0)


class Shown:
    """A snapshot; `before` is called with the number of each block that is read, and may give another one."""

    def __init__(self, state: ModelState, before: Callable[[int], bytes | None] = lambda n: None) -> None:
        self._snapshot = state.clone_snapshot()
        self._snapshot.start()
        self._before = before
        self.n_blocks = self._snapshot.n_blocks

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._snapshot.wait(timeout_s)

    def manifest(self) -> dict[str, Any]:
        return self._snapshot.manifest()

    def read_block(self, index: int) -> memoryview:
        other = self._before(index)
        return self._snapshot.read_block(index) if other is None else memoryview(other)

    def release(self) -> None:
        self._snapshot.release()


class Peer:
    """A worker that gives its state: a donor behind a real server. `asked`: set when somebody wants to follow."""

    def __init__(self, worker_id: int) -> None:
        self.asked = threading.Event()
        self.doubted: list[tuple[int, int]] = []
        self.donor = Donor(lambda joint: self.asked.set(), doubt=lambda stage, step: self.doubted.append((stage, step)))
        self.conversations: list[tuple[PeerConnection, threading.Event]] = []
        self.server = PeerServer("127.0.0.1", TOKEN, self._handle)
        self.member = Member(worker_id, 0, "host", address=self.server.address)

    def _handle(self, connection: PeerConnection, request: dict[str, Any]) -> None:
        ended = threading.Event()
        self.conversations.append((connection, ended))
        try:
            self.donor.handle(connection, request)
        finally:
            ended.set()

    @property
    def given(self) -> int:
        """Blocks that it has sent, once nobody asks for any more."""
        assert all(ended.wait(GENEROUS_S) for _, ended in self.conversations)
        return sum(connection.sent_bytes for connection, _ in self.conversations) // BLOCK_BYTES

    def shelve(self, shown: Shown, there: Extents = WHOLE, *more: Held) -> None:
        held = {0: [(shown, there), *more]}
        self.donor.shelve(("settle", 3), Offer(position=AT, records=RECORDS, gathers={AT: RECORDS}, held=held))

    def offer(
        self,
        shown: Shown,
        position: Key = AT,
        records: Mapping[int, Record] = RECORDS,
        loop: bytes = b"",
        there: Extents = WHOLE,
        *tickets: int,
    ) -> None:
        """To who has asked by now."""
        assert self.asked.wait(GENEROUS_S)
        offer = Offer(position=position, records=records, held={0: [(shown, there)]}, application=loop)
        self.donor.offer(lambda asked: offer, frozenset(tickets))

    def die(self) -> None:
        self.server.abort_all()
        self.server.deaf_until(1 << 62)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made = [Peer(i) for i in range(3)]
    yield made
    for peer in made:
        peer.server.close()


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any state is worth several donors, block by block."""
    monkeypatch.setattr(taking, "LEAST_BYTES", 1)
    monkeypatch.setattr(taking, "CHUNK_BLOCKS", 1)


class Apart:
    """Room in which every second block lies elsewhere."""

    def __init__(self, nbytes: int) -> None:
        self.there = bytearray(nbytes)

    def put(self, offset: int, data: memoryview) -> HeldBlock:
        if not offset // BLOCK_BYTES % 2:
            return data
        self.there[offset : offset + len(data)] = data
        return lambda: memoryview(self.there)[offset : offset + BLOCK_BYTES]


def copier(own: Mapping[int, Held] | None = None, room: Callable[[int], RoomThere] | None = None) -> Copier:
    size = make_state().n_blocks * BLOCK_BYTES
    view = SimpleNamespace(
        cutter=Cutter(lambda generation: None),
        link=SimpleNamespace(call_peer=lambda address, request: peer_connect(address, TOKEN, request), me="9.0"),
        stages=SimpleNamespace(expected_bytes=size, room=room),
        tick=lambda: None,
        me=9,
    )
    return Copier(view, lambda stage, step: [own[stage]] if own and stage in own else [])  # type: ignore[arg-type]


def settled(peers: list[Peer], pieces: Mapping[int, Pieces] | None = None, **more: Any) -> ReceivedOffer:
    members = tuple(peer.member for peer in peers)
    plan = Plan(3, "because", members, (Seat(0, 0, "active", (0,)),), 1)
    sources = {0: tuple(member.worker_id for member in members)}
    (received,) = copier(**more).settle(plan, AT, sources, pieces or {})
    return received


def part(state: ModelState, *numbers: int) -> Extents:
    return Extents.numbered(sizes_of(state.manifest()), numbers)


def same(received: ReceivedOffer, expected: ModelState) -> bool:
    """Whether what came is, loaded into another model, the same to the bit."""
    other = make_state(8)
    received.states[0].load_into(other)
    return other.manifest() == expected.manifest() and (received.position, received.records) == (AT, RECORDS)


def test_a_small_state_comes_of_one_donor(peers):
    state = make_state()
    for peer in peers:
        peer.shelve(Shown(state))
    assert same(settled(peers), state)
    assert [peer.given for peer in peers] == [state.n_blocks, 0, 0]


@pytest.mark.parametrize("follows", [False, True])
def test_what_comes_lies_with_other_hosts_until_it_is_loaded(peers, follows):
    state = make_state()
    if follows:
        taking = copier(room=Apart).follow(1, [peers[0].member], [0])
        peers[0].offer(Shown(state))
        received = taking.offer()
        taking.fed[0].close()
    else:
        peers[0].shelve(Shown(state))
        received = settled(peers[:1], room=Apart)
    blocks = received.states[0].blocks
    assert [callable(block) for block in blocks] == [n % 2 == 1 for n in range(state.n_blocks)]
    assert received.states[0].read_block(1) == _block(state, 1)
    assert same(received, state)


def test_a_host_without_room_is_the_takers_own_failure(peers):
    class Full:
        def __init__(self, nbytes: int) -> None:
            pass

        def put(self, offset: int, data: memoryview) -> HeldBlock:
            raise OSError("no 8 bytes for a copy")

    peers[0].shelve(Shown(make_state()))
    with pytest.raises(Unusable, match="has no room for the state that comes: no 8 bytes") as raised:
        settled(peers[:1], room=Full)
    assert raised.value.why.cause is Cause.OOM and raised.value.torn


def test_a_large_state_comes_of_several_at_once(peers, several):
    state = make_state()
    together = threading.Barrier(3, timeout=GENEROUS_S)
    first = [True] * 3

    def meet(k: int) -> None:
        if first[k]:  # nobody has given all before the others were asked
            first[k] = False
            together.wait()

    for k, peer in enumerate(peers):
        peer.shelve(Shown(state, lambda n, k=k: meet(k)))
    assert same(settled(peers), state)
    assert sum(peer.given for peer in peers) == state.n_blocks and all(peer.given for peer in peers)


def test_a_damaged_block_is_repaired_from_a_peer_alone(peers):
    """The rest of the state does not cross the wire."""
    state, mine = make_state(), make_state()
    wide = dict(mine.model.named_parameters())["wide"]
    with torch.no_grad():
        wide.view(-1)[70_000] += 1.0
    changed = [n for n in range(state.n_blocks) if bytes(_block(state, n)) != bytes(_block(mine, n))]
    assert len(changed) == 1
    peers[0].shelve(Shown(state))
    pieces = {0: Pieces(part(state, *changed))}
    received = settled(peers[:1], pieces, own={0: (Shown(mine), WHOLE)})
    assert peers[0].given == 1
    received.states[0].load_into(mine)
    assert mine.manifest() == state.manifest()


def _block(state: ModelState, number: int) -> memoryview:
    state.manifest()
    return state.read_block(number)


def test_own_blocks_that_are_not_right_come_too(peers):
    """One is known to be lost, another has changed unnoticed."""
    state, mine = make_state(), make_state()
    deep = dict(mine.model.named_parameters())["deep"]
    with torch.no_grad():
        deep.view(-1)[200_000] += 1.0
    peers[0].shelve(Shown(state))
    received = settled(peers[:1], {0: Pieces(part(state, 0))}, own={0: (Shown(mine), WHOLE)})
    assert same(received, state) and peers[0].given == 2


def test_parts_of_several_make_a_whole(peers):
    """A snapshot of one and a live state of another, of which nobody has all."""
    state = make_state()
    half = part(state, *range(state.n_blocks // 2))
    peers[0].shelve(Shown(state), half)
    peers[1].shelve(Shown(state), WHOLE - half)
    pieces = {0: Pieces(WHOLE, {0: half, 1: WHOLE - half})}
    assert same(settled(peers[:2], pieces), state)
    of = sizes_of(state.manifest())
    assert [peer.given for peer in peers] == [half.size(of), (WHOLE - half).size(of), 0]


def test_what_a_part_has_instead_of_the_rest_counts_for_nothing(peers):
    """Live states with garbage where blocks are lost, of which the manifests of their owners know nothing."""
    state, mine, theirs = make_state(), make_state(), make_state()
    of = sizes_of(state.manifest())
    for broken, name in ((mine, "wide"), (theirs, "deep")):
        with torch.no_grad():
            dict(broken.model.named_parameters())[name].view(-1)[-10:].add_(1.0)
    differ = {n for n in range(state.n_blocks) if bytes(_block(state, n)) != bytes(_block(mine, n))}
    has = WHOLE - Extents.numbered(of, differ)
    theirs_has = WHOLE - Extents.numbered(
        of, [n for n in range(state.n_blocks) if bytes(_block(state, n)) != bytes(_block(theirs, n))]
    )
    assert has | theirs_has == WHOLE
    peers[0].shelve(Shown(theirs), theirs_has)
    peers[1].shelve(Shown(mine), has)
    assert same(settled(peers[:2], {0: Pieces(WHOLE, {0: theirs_has, 1: has})}), state)
    missing = WHOLE - has
    received = settled(peers[:1], {0: Pieces(missing, {0: missing})}, own={0: (Shown(mine), has)})
    assert same(received, state)


def test_a_live_state_and_a_snapshot_of_one_member_make_a_whole(peers):
    """Each has garbage where the other has the blocks: the digests are of who has them."""
    state, live, kept = make_state(), make_state(), make_state()
    for broken, name in ((live, "wide"), (kept, "deep")):
        with torch.no_grad():
            dict(broken.model.named_parameters())[name].view(-1)[-10:].add_(1.0)
    has = [
        part(state, *(n for n in range(state.n_blocks) if bytes(_block(state, n)) == bytes(_block(broken, n))))
        for broken in (live, kept)
    ]
    assert has[0] | has[1] == WHOLE and not any(one.whole for one in has)
    peers[0].shelve(Shown(live), has[0], (Shown(kept), has[1]))
    assert same(settled(peers[:1], {0: Pieces(WHOLE, {0: WHOLE})}), state)


def test_what_is_not_whole_is_not_taken_for_it(peers):
    """One of which only a part is there any more: all state anew what they have."""
    state = make_state()
    peers[0].shelve(Shown(state), part(state, 0))
    with pytest.raises(Unusable, match="none of the donors has all that is wanted") as caught:
        settled(peers[:1])
    assert not caught.value.torn


def test_a_donor_that_has_gone_is_accused(peers):
    peers[0].die()
    with pytest.raises(CollectiveAborted, match="could not be copied") as caught:
        settled(peers[:1])
    assert caught.value.accused == (0,)


def flipping(state: ModelState, number: int) -> Callable[[int], bytes | None]:
    bad = bytearray(_block(state, number))
    bad[5] ^= 1
    return lambda n: bytes(bad) if n == number else None


def test_a_block_that_comes_damaged_is_asked_of_another(peers):
    state = make_state()
    peers[0].shelve(Shown(state, flipping(state, 2)))
    peers[1].shelve(Shown(state))
    assert same(settled(peers[:2]), state)
    assert [peer.given for peer in peers] == [state.n_blocks, 1, 0]


def test_a_block_that_nobody_gives_undamaged_is_given_up_with_a_reason(peers, several):
    state = make_state()
    for peer in peers:
        peer.shelve(Shown(state, flipping(state, 2)))
    with pytest.raises(Unusable, match=r"stage 0 \(model 2-2\) did not come from 0\.0") as caught:
        settled(peers)
    assert not caught.value.torn
    assert all(peer.given for peer in peers)
    assert all(peer.doubted == [(0, 4)] for peer in peers), "each looks whether its own has changed"


def test_blocks_that_a_donor_has_lost_since_are_refused(peers):
    state = make_state()
    peers[0].shelve(Shown(state), NONE | part(state, 0))
    with pytest.raises(Unusable):
        settled(peers[:1], {0: Pieces(WHOLE, {0: part(state, 0, 1)})})
    assert peers[0].doubted == [], "that is not damage"


def test_a_donor_that_dies_in_the_middle_is_replaced(peers, several):
    state = make_state()
    peers[0].shelve(Shown(state, lambda n: peers[0].die() if n == 3 else None))
    for peer in peers[1:]:
        peer.shelve(Shown(state))
    assert same(settled(peers), state)


def test_nobody_is_left(peers, several):
    state = make_state()
    for peer in peers:
        peer.shelve(Shown(state, lambda n, peer=peer: peer.die() if n > 3 else None))
    with pytest.raises(CollectiveAborted, match="could not be copied"):
        settled(peers)


# ---- following


def test_a_joiner_heals_from_three_donors_of_which_one_dies_in_the_middle(peers, several):
    """It follows the first one, gets blocks of all, and ends with the same bits."""
    state = make_state()
    each, died, given = threading.Event(), threading.Event(), [0, 0, 0]

    def count(k: int) -> None:
        given[k] += 1
        if all(given):
            each.set()
        if given[k] == 2:
            assert each.wait(GENEROUS_S)
        if given[k] == 2 and k == 1:
            peers[1].die()
            died.set()
        elif given[k] == 2:
            assert died.wait(GENEROUS_S)

    copying = copier()
    asked = copying.follow(1, [peer.member for peer in peers], [0])
    for k, peer in enumerate(peers):
        peer.offer(Shown(state, lambda n, k=k: count(k)))
    received = asked.offer()
    assert same(received, state) and all(given), given
    flat = torch.arange(3.0)
    gradient = StageGradient(Reduced(5, (Piece(0, 3, flat),), b"\x01", ()))
    for peer in (peers[0], peers[2]):
        peer.donor.feed(5, RECORDS, {0: gradient}, {0: 3}, lambda: b"loop")
    item = _step(asked.fed[0])
    assert item.step == 5 and torch.equal(item.gradients[0].reduced.pieces[0].data, flat)
    asked.fed[0].close()
    peers[0].donor.cut()
    assert peers[1].given < state.n_blocks // 2


def joint(*segments: tuple[int, int]) -> dict[int, JointAsk]:
    """Each donor feeds one run of segments, the first one the rest as well."""
    ids = tuple(range(len(segments)))
    return {i: JointAsk(9, 7, ids, 1, (segments[i],), rest=not i) for i in ids}


def test_who_gets_its_part_follows_several_that_feed_a_part_each(peers):
    """Blocks that lie in two parts come twice, and count once; what nobody asked for does not come."""
    state, some = make_state(), [part(make_state(), *range(k, make_state().n_blocks, 2)) for k in range(2)]
    asked = copier().follow(1, [peer.member for peer in peers[:2]], [0], None, joint((0, 2), (2, 4)))
    peers[1].offer(Shown(state), there=some[1])
    assert peers[1].donor._giver.waits({7}), "it waits until the other offers the same step"
    for peer, there in zip(peers, some, strict=False):
        peer.offer(Shown(state), AT, RECORDS, b"", there, 7)
    assert same(asked.offer(), state)
    flat = torch.arange(4.0 * BLOCK_ELEMENTS)
    gradient = StageGradient(Reduced(5, (Piece(0, flat.numel(), flat),), b"\x01", ()))
    told: list[Any] = []

    def blocks(stage: int, segments: Runs, rest: bool) -> Runs:
        told.append((stage, segments, rest))
        return ((0, 2),) if rest else ((1, 3),)

    for peer in peers[:2]:
        peer.donor.feed(5, RECORDS, {0: gradient}, {0: flat.numel()}, lambda: b"loop", lambda n: {}, blocks)
    step = joined([_step(connection, flat.numel()) for connection in asked.fed])
    assert told == [(0, ((0, 2),), True), (0, ((2, 4),), False)] and step.step == 5
    pieces = step.gradients[0].reduced.pieces
    assert [(piece.start, piece.stop) for piece in pieces] == [
        (0, 2 * BLOCK_ELEMENTS),
        (2 * BLOCK_ELEMENTS, 3 * BLOCK_ELEMENTS),
    ]
    assert torch.equal(torch.cat([piece.data for piece in pieces]), flat[: 3 * BLOCK_ELEMENTS])
    for peer in peers[:2]:
        peer.donor.feed(6, RECORDS, {0: gradient}, {0: flat.numel()}, lambda: b"", lambda n: {0: ((0, 3),)}, blocks)
    with pytest.raises((EverstepError, OSError)):  # who has lost a segment cannot feed it
        _step(asked.fed[1], flat.numel())
    for connection in asked.fed:
        connection.close()


@pytest.mark.parametrize("how", ["dies", "began", "elsewhere"])
def test_nobody_is_followed_unless_all_offer_the_same(peers, how: str):
    asked = copier().follow(1, [peer.member for peer in peers[:2]], [0], None, joint((0, 2), (2, 4)))
    state = make_state()
    peers[0].offer(Shown(state), AT, RECORDS, b"", part(state, 0), 7)
    assert peers[1].asked.wait(GENEROUS_S)
    if how == "dies":
        peers[1].die()
    elif how == "began":
        peers[1].donor.began()
    else:
        peers[1].offer(Shown(state), Key(5, 0), RECORDS, b"", WHOLE, 7)
    with pytest.raises(CollectiveAborted):
        asked.offer()


def _step(connection: PeerConnection, numel: int = 3) -> FollowedStep:
    while not isinstance(item := next_item(connection, {0: numel}), FollowedStep):
        pass
    return item


def test_neither_the_state_of_the_loop_nor_the_records_of_a_step_have_a_limit(peers):
    """What trains must be able to heal: a frame is less than the average of a small model's weights, told twice."""
    state, large = make_state(), bytes(MAX_FRAME_BYTES + 1)
    asked = copier().follow(1, [peers[0].member], [0])
    peers[0].offer(Shown(state), records={0: Record(0, large)}, loop=large)
    received = asked.offer()
    assert received.application == large and received.records[0].payload == large
    asked.fed[0].close()


def test_one_that_is_elsewhere_is_let_go(peers, several):
    state, later = make_state(), make_state(steps=2)
    copying = copier()
    asked = copying.follow(1, [peer.member for peer in peers[:2]], [0])
    peers[1].offer(Shown(later), Key(5, 0))
    peers[0].offer(Shown(state))
    assert same(asked.offer(), state)
    asked.fed[0].close()
    assert [peer.given for peer in peers] == [state.n_blocks, 0, 0]


def test_healing_begins_anew_if_who_is_followed_dies(peers, several):
    state, died = make_state(), threading.Event()
    copying = copier()
    asked = copying.follow(1, [peer.member for peer in peers[:2]], [0])

    def die(n: int) -> None:
        peers[0].die()
        died.set()

    def outlive(n: int) -> None:
        assert died.wait(GENEROUS_S)

    peers[0].offer(Shown(state, die))
    peers[1].offer(Shown(state, outlive))
    with pytest.raises((EverstepError, OSError)):
        asked.offer()  # the others give the rest, but there is no feed
        next_item(asked.fed[0], {0: 3})


def test_nothing_is_left_open_if_who_is_followed_dies_before_it_has_answered(peers, several):
    copying, members = copier(), [peer.member for peer in peers]
    view = copying._view
    view.step, view.phase, view.link.host = 0, lambda *said: None, "host"
    view.stages.want = view.stages.keep = lambda stages: None
    transfers = Transfers(view, *(None for _ in range(5)))

    def die() -> None:
        for peer in peers:
            assert peer.asked.wait(GENEROUS_S)
        peers[0].die()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(CollectiveAborted):
        transfers.open_feeds(do.OpenFeeds(op=1, generation=1, ticket=7, groups=((tuple(members), (0,)),)))
    thread.join()
    assert not view.cutter._open
    transfers.close_feeds()
    for peer in peers[1:]:
        peer.offer(Shown(make_state()))
        assert not peer.given, "nobody is there to take it"


def test_a_small_state_is_followed_as_it_comes(peers):
    state = make_state()
    copying = copier()
    asked = copying.follow(1, [peer.member for peer in peers], [0])
    peers[0].offer(Shown(state))
    assert same(asked.offer(), state) and not any(peer.asked.is_set() for peer in peers[1:])
    assert not asked._states, "no copy of the state stays for as long as somebody is followed"
    asked.fed[0].close()


@pytest.mark.parametrize("scattered", [False, True])
def test_blocks_pass_by_a_few_at_a_time_and_own_ones_do_not(peers, monkeypatch, scattered):
    monkeypatch.setattr(taking, "CHUNK_BLOCKS", 1)
    monkeypatch.setattr(taking, "MOST_DONORS", 2)
    state = make_state()
    everything = range(state.n_blocks)
    own, odd, even = part(state, 0), part(state, *everything[1::2]), part(state, *everything[::2])
    peers[0].shelve(Shown(state), odd if scattered else WHOLE)
    peers[1].shelve(Shown(state), even if scattered else WHOLE)
    given = {0: odd, 1: even - own} if scattered else {}
    plan = Plan(3, "because", tuple(p.member for p in peers[:2]), (Seat(0, 0, "active", (0,)),), 1)
    came, most = [], 0
    for offer in copier().pass_by(plan, AT, {0: (0, 1)}, {0: Pieces(WHOLE - own, given)}):
        numbers = [n for n, block in enumerate(offer.states[0].blocks) if block is not None]
        assert all(offer.states[0].blocks[n] == state.read_block(n) for n in numbers)
        came, most = came + numbers, max(most, len(numbers))
    assert came == list(everything[1:]) and most == 2


def test_a_plan_frees_a_copy_from_several(peers, several):
    """Nobody gives the state: the cut ends it, with nothing held."""
    state, begun = make_state(), threading.Event()
    never = threading.Event()
    copying = copier()

    def hang(n: int) -> None:
        begun.set()
        never.wait(GENEROUS_S)

    peers[0].shelve(Shown(state, hang))
    plan = Plan(3, "because", (peers[0].member,), (Seat(0, 0, "active", (0,)),), 1)
    cutter = copying._view.cutter

    def cut() -> None:
        assert begun.wait(GENEROUS_S)
        cutter.cut(3)

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(CollectiveAborted, match="a newer plan has come"):
        copying.settle(plan, AT, {0: (0,)}, {0: Pieces(WHOLE, {0: WHOLE})})
    never.set()
    thread.join()
