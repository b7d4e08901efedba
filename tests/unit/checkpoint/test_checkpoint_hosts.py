"""One store of several hosts' directories: what one has all find, and a host that is lost takes nothing along."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from checkpoint_saving import advance, make_state, save
from everstep.base.domains import Domains, ordered
from everstep.base.errors import BlobExists, BlobForeign, BlobMissing, PartsAway, StoreError
from everstep.checkpoint import hosts_store
from everstep.checkpoint.host_files import HostFiles
from everstep.checkpoint.hosts_store import HostsStore, next_host
from everstep.checkpoint.manifest import PartFile
from everstep.checkpoint.names import LATEST, manifest_name
from everstep.checkpoint.reader import newest_complete, open_checkpoint, read_manifest, steps_in, verify_store
from everstep.checkpoint.retention import discard_after
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.digest import digest_bytes
from everstep.runtime.link.peer import PeerConnection, PeerServer, peer_connect

TOKEN = secrets.token_bytes(32)
NAMES = ("a", "b", "c")
PART = "step-0000000010/part-s0-w{}-g1.safetensors"


def call(address: str, request: dict[str, object]) -> PeerConnection:
    return peer_connect(address, TOKEN, request)


class Hosts:
    """Three, each with a directory, what serves it, and the store as its workers see it."""

    def __init__(self, base: Path) -> None:
        self.folders = {name: base / name for name in NAMES}
        self.servers = {n: PeerServer("127.0.0.1", TOKEN, HostFiles(self.folders[n], call)) for n in NAMES}
        self.there = {name: server.address for name, server in self.servers.items()}
        self.domains: dict[str, Domains] = {}
        self.stores = {
            name: HostsStore(self.folders[name], name, self._others(name), call, domains=lambda: self.domains)
            for name in NAMES
        }

    def _others(self, me: str):  # type: ignore[no-untyped-def]
        return lambda: {name: address for name, address in self.there.items() if name != me}

    def lose(self, name: str) -> None:
        """Its processes and its disk are gone, and that is known."""
        self.servers[name].close()
        del self.there[name]
        shutil.rmtree(self.folders[name])

    def who_has(self, name: str) -> list[str]:
        return [host for host, folder in self.folders.items() if (folder / name).is_file()]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    yield found
    for server in found.servers.values():
        server.close()


def part(worker: int, data: bytes) -> PartFile:
    return PartFile(PART.format(worker), len(data), 8, digest_bytes(data[:8]), "0" * 32)


def test_parts_stay_where_they_are_written_and_all_else_is_everywhere(hosts: Hosts) -> None:
    hosts.stores["b"].write(PART.format(1), [b"abc"], 3)
    hosts.stores["b"].write("step-0000000010/manifest.json", [b"mani", b"fest"], 8)
    assert hosts.who_has(PART.format(1)) == ["b"]
    assert hosts.who_has("step-0000000010/manifest.json") == list(NAMES)
    for store in hosts.stores.values():
        assert store.list("step-") == [PART.format(1).replace("part", "part"), "step-0000000010/manifest.json"][::-1]
        assert store.size(PART.format(1)) == 3
        assert bytes(store.read(PART.format(1), 1)) == b"bc"
        into = [memoryview(bytearray(2)), memoryview(bytearray(2))]
        assert store.read_into(PART.format(1), 0, into) == 3 and bytes(into[0]) + bytes(into[1]) == b"abc\0"
    with pytest.raises(BlobMissing):
        hosts.stores["a"].size(PART.format(2))


def test_one_of_two_who_write_a_manifest_at_once_is_told(hosts: Hosts) -> None:
    name = "step-0000000010/manifest.json"
    hosts.stores["c"].write(name, [b"first"], 5, if_absent=True)
    with pytest.raises(BlobExists):
        hosts.stores["b"].write(name, [b"other"], 5, if_absent=True)
    assert {(folder / name).read_bytes() for folder in hosts.folders.values()} == {b"first"}
    hosts.stores["b"].move(name, "step-0000000010/damaged-1-manifest.json")
    assert hosts.who_has(name) == [] and hosts.who_has("step-0000000010/damaged-1-manifest.json") == list(NAMES)
    with pytest.raises(BlobMissing):
        hosts.stores["a"].move(name, "step-0000000010/damaged-2-manifest.json")
    hosts.stores["a"].delete("step-0000000010/damaged-1-manifest.json")
    assert hosts.stores["c"].list("step-") == []


def test_a_manifest_is_written_although_the_first_host_does_not_answer(hosts: Hosts) -> None:
    """It was lost a moment ago, and is still taken for one that is there; who is new decides the next that answers."""
    name = "step-0000000010/manifest.json"
    hosts.servers["a"].close()
    hosts.stores["c"].write(name, [b"first"], 5, if_absent=True)
    assert hosts.who_has(name) == ["b", "c"]
    with pytest.raises(BlobExists):
        hosts.stores["c"].write(name, [b"other"], 5, if_absent=True)
    assert bytes(hosts.stores["b"].read(name)) == b"first"


def test_each_part_is_on_two_hosts_and_again_on_two_when_one_is_lost(hosts: Hosts) -> None:
    data = {n: secrets.token_bytes(3000 + n) for n in range(3)}
    for n, name in enumerate(NAMES):
        hosts.stores[name].write(PART.format(n), [data[n]], len(data[n]))
    files = [part(n, data[n]) for n in data]
    found = hosts.stores["a"].spread(files, 2)
    assert found == {PART.format(n): tuple(hosts.who_has(PART.format(n))) for n in data}
    assert all(len(who) == 2 for who in found.values())
    hosts.lose("b")
    for n in data:
        assert bytes(hosts.stores["c"].read(PART.format(n))) == data[n]
    again = hosts.stores["c"].spread(files, 2)
    assert again == {PART.format(n): ("a", "c") for n in data}


def test_a_part_of_another_size_is_no_copy(hosts: Hosts) -> None:
    name, data = PART.format(0), secrets.token_bytes(3000)
    hosts.stores["a"].write(name, [data], len(data))
    hosts.stores["b"].write(name, [data[:1000]], 1000)
    assert hosts.stores["a"].spread([part(0, data)], 1) == {name: ("a",)}


def test_a_copy_goes_to_another_rack_and_to_the_same_one_where_there_is_no_other(hosts: Hosts) -> None:
    hosts.domains = {name: ordered({"rack": rack}, name) for name, rack in zip(NAMES, ("r1", "r1", "r2"), strict=True)}
    for n, name in enumerate(NAMES):
        hosts.stores[name].write(PART.format(n), [b"abc"], 3)
    files = [part(n, b"abc") for n in range(3)]
    found = hosts.stores["b"].spread(files, 2)
    assert found == {PART.format(0): ("a", "c"), PART.format(1): ("b", "c"), PART.format(2): ("a", "c")}
    assert all(found[file.name] == tuple(hosts.who_has(file.name)) for file in files)
    hosts.lose("c")
    assert hosts.stores["a"].spread(files, 2) == {file.name: ("a", "b") for file in files}


@pytest.mark.parametrize(
    ("holders", "left", "expected"),
    [
        (["a1"], ["a2", "b1", "c1"], "b1"),  # a2 is in the same rack
        (["a1", "b1"], ["a2", "b2", "c1", "d1"], "d1"),  # in the other zone
        (["a1", "d1"], ["a2", "b1", "c1"], "b1"),  # each zone has one: another rack
        (["a1", "b1", "c1"], ["a2", "b2"], "a2"),  # of equals the first
        (["a1"], ["x", "d1"], "x"),  # of which nothing is known: it is apart from all
        (["x"], ["y", "z"], "y"),
    ],
)
def test_the_widest_domains_come_first(holders: list[str], left: list[str], expected: str) -> None:
    zones = {"a": "z1", "b": "z1", "c": "z1", "d": "z2"}
    domains = {f"{r}{n}": ordered({"zone": zones[r], "rack": r}, f"{r}{n}") for r in zones for n in (1, 2)}
    assert next_host(left, holders, domains) == expected


def test_a_block_that_is_damaged_here_is_asked_of_another_host(hosts: Hosts) -> None:
    hosts.stores["a"].write(PART.format(0), [b"as it was"], 9)
    hosts.stores["a"].spread([part(0, b"as it was")], 2)
    (hosts.folders["a"] / PART.format(0)).write_bytes(b"as it WAS")
    assert bytes(hosts.stores["a"].read(PART.format(0))) == b"as it WAS"
    assert bytes(hosts.stores["a"].read_elsewhere(PART.format(0), 3, 6)) == b"it was"


def test_a_part_that_nobody_has_is_said(hosts: Hosts) -> None:
    with pytest.raises(StoreError, match="on none of the hosts a, b, c"):
        hosts.stores["a"].spread([part(0, b"parts")], 2)
    assert hosts.stores["a"].away(["a", "z", "b"]) == ["z"]


def test_a_host_that_does_not_answer_is_not_one_that_has_nothing(hosts: Hosts) -> None:
    hosts.stores["b"].write(PART.format(1), [b"abc"], 3)
    hosts.servers["b"].close()
    for ask in (lambda: hosts.stores["a"].size(PART.format(1)), lambda: hosts.stores["a"].list("step-")):
        with pytest.raises(PartsAway) as caught:
            ask()
        assert caught.value.hosts == ["b"]


def test_large_files_come_in_pieces(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.checkpoint.hosts_store.CHUNK_BYTES", 1000)
    monkeypatch.setattr("everstep.checkpoint.host_files.CHUNK_BYTES", 1000)
    data = secrets.token_bytes(4321)
    hosts.stores["a"].write(PART.format(0), [data], len(data))
    assert bytes(hosts.stores["c"].read(PART.format(0))) == data
    assert hosts.stores["c"].spread([part(0, data)], 3) == {PART.format(0): NAMES}
    assert {(folder / PART.format(0)).read_bytes() for folder in hosts.folders.values()} == {data}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "", None, 7, "a\0b"])
def test_names_that_lead_elsewhere_are_refused(hosts: Hosts, name: object) -> None:
    for request in ({"op": "read", "name": name, "start": 0, "length": 9}, {"op": "delete", "name": name}):
        with call(hosts.there["b"], {"kind": "files", **request}) as connection:
            assert connection.recv_json()["error"] == "foreign"
    with pytest.raises(BlobForeign):
        hosts.stores["a"]._lines.ask(hosts.there["b"], {"op": "move", "old": name, "new": "x"})


def test_a_manifest_that_is_decided_replaces_what_a_host_has_of_one_that_was_not(hosts: Hosts) -> None:
    name = "step-0000000010/manifest.json"
    left = hosts.folders["c"] / name
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of a writer that died before the first host had it")
    hosts.stores["b"].write(name, [b"decided"], 7, if_absent=True)
    assert {(folder / name).read_bytes() for folder in hosts.folders.values()} == {b"decided"}


def saved(hosts: Hosts, *steps: int) -> None:
    """Checkpoints that all hosts have, parts and all."""
    state = make_state(1)
    for step in steps:
        save(hosts.folders["a"], state, step)
        advance(state, step)
    for name in "bc":
        shutil.copytree(hosts.folders["a"], hosts.folders[name], dirs_exist_ok=True)


def test_a_file_that_is_in_the_way_is_no_copy_and_the_next_host_gets_one(hosts: Hosts) -> None:
    name, data = PART.format(0), secrets.token_bytes(3000)
    hosts.stores["a"].write(name, [data], len(data))
    for other in (data[:1000], bytes(3000)):
        (hosts.folders["b"] / name).parent.mkdir(exist_ok=True, parents=True)
        (hosts.folders["b"] / name).write_bytes(other)
        assert hosts.stores["a"].spread([part(0, data)], 2) == {name: ("a", "c")}
        assert hosts.stores["b"].spread([part(0, data)], 2) == {name: ("a", "c")}
        (hosts.folders["c"] / name).unlink()


def test_a_host_names_all_its_files_however_many(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.checkpoint.host_files.MOST_NAMES", 2)
    names = [f"step-{n:010d}/manifest.json" for n in range(5)]
    for name in names:
        hosts.stores["b"].write(name, [b"text"], 4)
        (hosts.folders["a"] / name).unlink()
    assert hosts.stores["a"].list("step-") == names


@pytest.mark.parametrize("bad", [("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize("how", ["short", "head"])
def test_a_bad_copy_of_a_file_discards_nothing_that_another_host_has(hosts: Hosts, bad: tuple[str], how: str) -> None:
    saved(hosts, 1, 2)
    file = open_checkpoint(hosts.stores["a"], 2).manifest.files[-1]
    for name in bad:
        path = hosts.folders[name] / file.name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if how == "short" else b"x" * 9 + data[9:])
    if "b" not in bad:
        (hosts.folders["b"] / file.name).unlink()
    path = hosts.folders["c"] / file.name
    kept = path.read_bytes()
    for store in hosts.stores.values():
        found = newest_complete(store)
        assert found is not None and found.step == 2
        assert bytes(store.read(file.name)) == kept
    others = [name for name in NAMES if name not in bad]
    assert hosts.stores["c"].spread([file], 3) == {file.name: tuple(others)}, "what is in the way stays"
    path.unlink()
    told: list[int] = []
    found = newest_complete(hosts.stores["a"], told=lambda step, why: told.append(step))
    if bad == ("a", "b"):
        assert told == [2] and found is not None and found.step == 1, "no host has a good one"
    else:
        assert not told and found is not None and found.step == 2


def test_what_this_disk_cannot_read_is_read_on_another_host(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(hosts, 1)
    store, read, into = hosts.stores["a"], DirectoryStore.read, DirectoryStore.read_into

    def broken(way):  # type: ignore[no-untyped-def]
        def act(self: DirectoryStore, name: str, *where: object) -> object:
            if self.path == store.path:
                raise StoreError(f"cannot read {name}: Input/output error")
            return way(self, name, *where)

        return act

    monkeypatch.setattr(DirectoryStore, "read", broken(read))
    monkeypatch.setattr(DirectoryStore, "read_into", broken(into))
    found = newest_complete(store)
    assert found is not None and found.step == 1
    for name in "bc":
        hosts.lose(name)
    with pytest.raises(StoreError, match="Input/output error"):
        newest_complete(store)
    assert steps_in(store) == [1]


def test_a_host_that_was_away_brings_back_nothing_that_was_set_aside(hosts: Hosts) -> None:
    """It has an older manifest of a step that was done again, and one of a step that was not."""
    saved(hosts, 1, 2, 3)
    address = hosts.there.pop("b")
    discard_after(hosts.stores["a"], 1)
    again = b"of step 2, done again"
    hosts.stores["c"].write(manifest_name(2), [again], len(again), if_absent=True)
    hosts.there["b"] = address
    hosts.stores["c"].heed()
    for store in hosts.stores.values():
        assert steps_in(store) == [1, 2]
    assert hosts.who_has(manifest_name(3)) == [] and hosts.who_has(manifest_name(2)) == ["a", "c"]
    assert bytes(hosts.stores["b"].read(manifest_name(2))) == again
    before = {name: sorted(folder.rglob("*")) for name, folder in hosts.folders.items()}
    hosts.stores["b"].heed()
    assert before == {name: sorted(folder.rglob("*")) for name, folder in hosts.folders.items()}


def test_a_host_that_cannot_set_its_old_manifest_aside_decides_for_nobody_else(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(hosts, 1, 2)
    address = hosts.there.pop("b")
    discard_after(hosts.stores["a"], 1)
    again = b"of step 2, done again"
    hosts.stores["c"].write(manifest_name(2), [again], len(again), if_absent=True)
    hosts.there["b"] = address
    move = DirectoryStore.move

    def full(self: DirectoryStore, old: str, new: str) -> None:
        if self.path == hosts.folders["b"]:
            raise StoreError("No space left on device")
        move(self, old, new)

    monkeypatch.setattr(DirectoryStore, "move", full)
    for store in hosts.stores.values():
        store.heed()
        assert bytes(store.read(manifest_name(2))) == again
    for host in "ab":  # its disk works again, and the others' copies are lost
        (hosts.folders[host] / manifest_name(2)).unlink()
    (hosts.folders["b"] / manifest_name(2)).write_bytes(again)
    (hosts.folders["c"] / manifest_name(2)).unlink()
    hosts.stores["c"].heed()
    assert bytes(hosts.stores["c"].read(manifest_name(2))) == again


def damage_manifest(folder: Path, step: int) -> None:
    path = folder / manifest_name(step)
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)


@pytest.mark.parametrize("bad", ["a", "ab", "abc"])
@pytest.mark.parametrize("silent", [False, True])
def test_a_bad_copy_of_a_manifest_discards_nothing_that_another_host_has(hosts: Hosts, bad: str, silent: bool) -> None:
    """silent: c, which may have a good one, does not answer."""
    saved(hosts, 1, 2)
    good = bytes(hosts.stores["c"].read(manifest_name(2)))
    for name in bad:
        damage_manifest(hosts.folders[name], 2)
    problems = verify_store(hosts.stores["a"], [2])
    assert [(p.step, p.name) for p in problems] == [(2, manifest_name(2))] and str(hosts.folders["a"]) in problems[
        0
    ].what
    told: list[int] = []
    if silent:
        hosts.servers["c"].close()
        with pytest.raises(PartsAway) if bad != "a" else nullcontext():
            assert bytes(read_manifest(hosts.stores["a"], 2)[1]) == good
    else:
        found = newest_complete(hosts.stores["a"], told=lambda step, why: told.append(step))
        assert found is not None and (found.step, told) == ((1, [2]) if bad == "abc" else (2, []))
    assert hosts.who_has(manifest_name(2)) == ([] if told else list(NAMES))


@pytest.mark.parametrize("how", ["short", "head", "block"])
def test_a_bad_copy_of_this_host_is_said_although_another_host_has_a_good_one(hosts: Hosts, how: str) -> None:
    saved(hosts, 1, 2)
    store = hosts.stores["a"]
    assert verify_store(store) == []
    file = open_checkpoint(store, 2).manifest.files[-1]
    path = hosts.folders["a"] / file.name
    data = path.read_bytes()
    path.write_bytes({"short": data[:-9], "head": b"x" * 9 + data[9:], "block": data[:-9] + b"x" * 9}[how])
    assert [(p.step, p.name) for p in verify_store(store)] == [(2, file.name)]


def test_a_host_that_does_not_answer_keeps_no_other_from_setting_aside(hosts: Hosts) -> None:
    saved(hosts, 1, 2)
    hosts.servers["b"].close()
    (hosts.folders["a"] / LATEST).unlink()
    with pytest.raises(PartsAway, match="what b has is set aside once b answers"):
        discard_after(hosts.stores["a"], 1)
    assert hosts.who_has(manifest_name(2)) == ["b"] and hosts.who_has(manifest_name(1)) == list(NAMES)


def test_a_manifest_that_one_host_cannot_move_is_said(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(hosts, 1, 2)
    move = DirectoryStore.move

    def stuck(self: DirectoryStore, old: str, new: str) -> None:
        if self.path == hosts.folders["b"]:
            raise StoreError(f"cannot move {old}: Read-only file system")
        move(self, old, new)

    monkeypatch.setattr(DirectoryStore, "move", stuck)
    for name in "ab":
        with pytest.raises(StoreError, match="Read-only"):
            discard_after(hosts.stores[name], 1)
        assert hosts.who_has(manifest_name(2)) == ["b"]


@pytest.mark.parametrize("silent", [False, True])
def test_a_host_that_cannot_set_aside_decides_for_no_other(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """What it alone has counts for nothing, and what was done again is read from others. silent: since it was asked
    for its names; what it has may be needed."""
    saved(hosts, 1, 2, 3)
    address = hosts.there.pop("b")
    discard_after(hosts.stores["a"], 1)
    again = b"of step 2, done again"
    hosts.stores["c"].write(manifest_name(2), [again], len(again), if_absent=True)
    hosts.there["b"] = address
    move = DirectoryStore.move

    def stuck(self: DirectoryStore, old: str, new: str) -> None:
        if self.path == hosts.folders["b"]:
            raise StoreError(f"cannot move {old}: Read-only file system")
        move(self, old, new)

    def away(*given: object) -> None:
        raise StoreError("it does not answer", hosts_store._AWAY)

    monkeypatch.setattr(DirectoryStore, "move", stuck)
    if silent:
        monkeypatch.setattr(hosts_store._Far, "read", away)
        with pytest.raises(PartsAway):
            hosts.stores["c"].heed()
        return
    for store in hosts.stores.values():
        store.heed()
        assert bytes(store.read(manifest_name(2))) == again
        with pytest.raises(BlobMissing):
            store.read(manifest_name(3))


def test_a_copy_of_this_host_that_is_not_right_is_read_no_more_once_parts_are_spread(hosts: Hosts) -> None:
    store, data = hosts.stores["a"], b"as it was written"
    file = part(1, data)
    hosts.stores["b"].write(file.name, [data], len(data))
    DirectoryStore(store.path).write(file.name, [data[:9]], 9)
    assert store.spread([file], 1) == {file.name: ("b",)}
    assert store.size(file.name) == len(data) and bytes(store.read(file.name)) == data


def test_names_that_another_host_gives_and_that_are_none_are_left_out() -> None:
    lines = Mock(ask=lambda address, request: ["step-0000000010/manifest.json", 3, None, ["x"]])
    assert hosts_store._Far(lines, "h:1").list("") == ["step-0000000010/manifest.json"]
