"""A worker's snapshots of its own stages: what is kept, told and let go, and what damage to them does."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_saving import advance, make_state
from everstep.base.cause import Cause
from everstep.base.config_keys import CheckpointConfig, MemoryTierConfig
from everstep.base.errors import CollectiveAborted, EverstepError
from everstep.base.extents import NONE, WHOLE, Extents
from everstep.checkpoint.vault import StageState
from everstep.exact.digest import digest_bytes
from everstep.exact.image import sizes_of
from everstep.exact.snapshot import Snapshot
from everstep.exact.state import ModelState
from everstep.protocol.driver.operations import ForgetKept, InMemory, Keep, NotKept, OthersKept, RetireKept
from everstep.protocol.step_types import Key
from everstep.train.heal import ReceivedOffer
from everstep.train.keeping import SnapshotKeeper
from transferring import PLAN, Recorder

GENEROUS_S = 60.0
SMALL = {"w": (9, 7)}


def copied(state: ModelState) -> StageState:
    manifest = state.manifest()
    return StageState(manifest, [memoryview(bytes(state.read_block(k))) for k in range(state.n_blocks)])


class Keeping:
    """A worker that holds stages 0 and 2. calls: what its donor was told; notes: what its driver was."""

    def __init__(self, limit_mb: int = 64, **held: Extents) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.notes: SimpleQueue[Any] = SimpleQueue()
        self.states = {0: make_state(1, SMALL), 2: make_state(2, SMALL)}
        rule = CheckpointConfig(memory=MemoryTierConfig(limit_mb=limit_mb, keep_last=2))
        machine = SimpleNamespace(held={int(name[1:]): there for name, there in held.items()})
        self.view: Any = SimpleNamespace(
            config=SimpleNamespace(checkpoint=rule),
            stages={k: SimpleNamespace(state=state) for k, state in self.states.items()},
            driver=SimpleNamespace(machine=machine),
        )
        self.donor: Any = Recorder(self.calls, "donor")
        self.donor.busy = False
        self.keeper = SnapshotKeeper(self.view, self.donor, self.notes.put)

    def keep(self, step: int, **more: Any) -> None:
        self.keeper.handlers()[Keep](Keep(PLAN, step, more.get("sources", {}), {}))
        self.keeper.stand_still()

    def told(self) -> Any:
        return self.notes.get(timeout=GENEROUS_S)

    def copies(self, monkeypatch: pytest.MonkeyPatch, kept: Callable[[Keep], Any]) -> None:
        """What comes of others."""
        monkeypatch.setattr(self.keeper, "_copier", SimpleNamespace(kept=kept))


def test_all_stages_are_kept_as_they_are_and_offered_with_the_blocks_that_there_are() -> None:
    at = Keeping()
    some = Extents.numbered(sizes_of(at.states[2].manifest()), [0])
    at.view.driver.machine.held[2] = some
    manifests = {k: state.manifest() for k, state in at.states.items()}
    at.keep(4)
    for state in at.states.values():
        advance(state, 9)
    held = at.keeper.held(4)
    assert {k: there for k, (_, there) in held.items()} == {0: WHOLE, 2: some}
    assert held[0][0].manifest() == manifests[0]
    assert held[2][0].manifest()["blocks"][0] == manifests[2]["blocks"][0], "the block that there is"
    ((name, shelf, offer),) = at.calls
    assert (name, shelf, offer.position) == ("donor.shelve", ("kept", 4), Key(4, 0))
    assert offer.held == {k: [one] for k, one in held.items()}
    assert at.keeper.held(5) == {} and at.notes.empty()


def test_the_state_waits_until_it_has_been_copied() -> None:
    at = Keeping()
    waits: list[str] = []
    at.keeper._copying = [SimpleNamespace(wait=lambda: waits.append("waited"))]  # type: ignore[list-item]
    at.keeper.stand_still()
    at.keeper.stand_still()
    assert waits == ["waited"]


def test_the_driver_hears_of_what_there_is_once() -> None:
    at = Keeping()
    at.keeper.state()
    assert at.notes.empty(), "nothing is nothing new"
    at.keep(4)
    at.keeper.state()
    at.keeper.state()
    assert at.told() == InMemory({(0, 4): WHOLE, (2, 4): WHOLE}, False) and at.notes.empty()
    at.donor.busy = True
    at.keeper.state()
    assert at.told().busy and at.notes.empty()


def test_what_no_rule_keeps_goes_and_steps_that_are_done_again() -> None:
    at = Keeping()
    for step in (2, 4, 6):
        at.keep(step)
        at.keeper.handlers()[RetireKept](RetireKept(step, 0))
    assert [step for step in (2, 4, 6) if at.keeper.held(step)] == [4, 6]
    at.keeper.handlers()[RetireKept](RetireKept(6, 5))
    assert at.keeper.held(4), "the newest that is known to be right stays"
    at.calls.clear()
    at.keeper.handlers()[ForgetKept](ForgetKept(4))
    assert at.calls == [("donor.unshelve", "kept")] and at.keeper.held(4) and not at.keeper.held(6)
    at.keeper.close()
    assert not at.keeper.held(4)


def test_what_does_not_fit_is_told_and_neither_offered_nor_kept() -> None:
    at = Keeping()
    big = make_state(1, {"w": (512, 1024)})
    at.view.stages = {0: SimpleNamespace(state=big)}
    at.keeper._vault = type(at.keeper._vault)(at.view.config.checkpoint.memory, most_blocks=big.n_blocks - 1)
    released = []
    clone = big.clone_snapshot

    def snapshot(there: Extents) -> Any:
        made = clone(there)
        back = made.release
        made.release = lambda: (released.append(made), back())  # type: ignore[method-assign,assignment,func-returns-value]
        return made

    big.clone_snapshot = snapshot  # type: ignore[method-assign]
    at.keep(4)
    said = at.told()
    assert isinstance(said, NotKept) and (said.step, said.why.cause) == (4, Cause.CONFIG)
    assert "checkpoint.memory.limit_mb=64" in said.why.reason
    assert not at.calls and not at.keeper.held(4) and len(released) == 1
    at.keeper._vault = type(at.keeper._vault)(at.view.config.checkpoint.memory, most_blocks=big.n_blocks)
    at.keep(5)
    assert at.keeper.held(5) and at.notes.empty()


def test_a_copy_that_has_taken_the_room_meanwhile_leaves_the_own_one_out() -> None:
    at = Keeping()
    vault = at.keeper._vault
    vault.put = lambda *_: False  # type: ignore[method-assign]
    at.keep(4)
    assert isinstance(at.told(), NotKept) and at.notes.empty() and not at.calls


# ---- damage


def damage(at: Keeping, stage: int, step: int) -> int:
    """Change a bit of a snapshot. Returns the number of its block."""
    snapshot: Any = at.keeper._vault._held[stage, step]
    digests = snapshot.manifest()["blocks"]
    snapshot._arena[-1] ^= 1
    (number,) = (n for n, digest in enumerate(digests) if digest_bytes(snapshot.read_block(n)) != digest)
    return number


def test_damaged_blocks_of_a_snapshot_count_no_more_and_that_is_told() -> None:
    at = Keeping()
    at.keep(4)
    at.keeper.check(0, 4)
    at.keeper.check(1, 4)
    at.keeper.check(0, 3)
    assert at.notes.empty()
    number = damage(at, 0, 4)
    at.keeper.check(2, 4)
    assert at.notes.empty()
    at.keeper.check(0, 4)
    of = sizes_of(at.states[0].manifest())
    left = WHOLE - Extents.numbered(of, [number])
    assert at.told() == InMemory({(0, 4): left, (2, 4): WHOLE}, False) and at.keeper.held(4)[0][1] == left
    at.keeper.check(0, 4)
    assert at.notes.empty(), "it is known"


# ---- copies of other pools


def test_who_copies_for_another_pool_says_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    at, other = Keeping(), make_state(3, SMALL)
    asked: list[Keep] = []

    def kept(effect: Keep) -> list[ReceivedOffer]:
        asked.append(effect)
        return [ReceivedOffer(position=Key(4, 0), states={1: copied(other)})]

    at.copies(monkeypatch, kept)
    at.keep(4)
    assert at.notes.empty() and not asked, "there is nothing to copy"
    at.keep(5, sources={1: (0,)})
    said = at.told()
    assert said.snapshots[1, 5] == WHOLE and at.told() == OthersKept(5, True)
    assert [one.step for one in asked] == [5] and at.keeper.held(5)[1][0].manifest() == other.manifest()


@pytest.mark.parametrize("error", [CollectiveAborted("gone"), OSError("reset"), EverstepError("damaged")])
def test_a_copy_that_breaks_is_no_end(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    at = Keeping()

    def kept(effect: Keep) -> list[ReceivedOffer]:
        raise error

    at.copies(monkeypatch, kept)
    at.keep(5, sources={1: (0,)})
    assert isinstance(at.told(), InMemory) and at.told() == OthersKept(5, False)


def test_of_several_copies_each_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that does counts, and the driver hears of it."""
    at, other = Keeping(), make_state(3, SMALL)
    large = make_state(4, {"w": (512, 1024)})
    sizes = 2 * at.states[0].n_blocks + other.n_blocks
    at.keeper._vault = type(at.keeper._vault)(at.view.config.checkpoint.memory, most_blocks=sizes)
    offers = [ReceivedOffer(position=Key(5, 0), states={k: copied(one)}) for k, one in ((1, large), (3, other))]
    at.copies(monkeypatch, lambda effect: offers)
    at.keep(5, sources={1: (0,), 3: (0,)})
    said = at.told()
    assert (3, 5) in said.snapshots and (1, 5) not in said.snapshots and isinstance(at.told(), NotKept)


def test_a_copy_that_lacks_blocks_gives_way_to_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at, other = Keeping(), make_state(3, SMALL)
    at.keeper._vault.put(1, 5, copied(make_state(4, SMALL)), NONE)
    at.copies(monkeypatch, lambda effect: [ReceivedOffer(position=Key(5, 0), states={1: copied(other)})])
    at.keep(5, sources={1: (0,)})
    at.told()
    assert at.told() == OthersKept(5, True) and at.keeper.held(5)[1][0].manifest() == other.manifest()


def test_a_snapshot_that_failed_neither_stops_training_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(snapshot: Snapshot) -> None:
        snapshot._error = RuntimeError("the device has an error")
        snapshot._copied.set()

    monkeypatch.setattr(Snapshot, "_run", fails)
    at = Keeping()
    at.keep(3)
    at.keeper.state()
    assert at.keeper.held(3) == {}
    at.keeper.close()
