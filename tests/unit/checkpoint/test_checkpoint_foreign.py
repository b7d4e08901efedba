"""What a manifest, a pointer or a directory that others prepared may do: be refused in one line, and nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.base import below
from everstep.base.errors import BlobForeign, CheckpointCorrupt, StoreError
from everstep.checkpoint.manifest import decode
from everstep.checkpoint.names import LATEST, PINS, is_part, part_name
from everstep.checkpoint.pointers import read_pins, read_pointer, read_pointer_value, seal
from everstep.checkpoint.reader import newest_complete, open_checkpoint, steps_in, verify_store
from everstep.checkpoint.retention import Shelf
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.transfer import transfer
from foreign_checkpoints import ESCAPE, PART, Body, body_of, escaping, idle, prepare, renamed, signed, text_of, tree_of

STEP = "step-0000000001"
OTHER = 4711
OUTSIDE = [
    ESCAPE,
    "/etc/cron.d/job",
    f"{STEP}/../../{PART}",
    f"{STEP}/../{PART}",
    f"{STEP}/./part-s0-w0-g1.safetensors",
    f"{STEP}//part-s0-w0-g1.safetensors",
    f"./{PART}",
    f"/{PART}",
    f"{PART}/",
    f"{PART}\n",
    f"{PART}\0",
    f"{STEP}\\part-s0-w0-g1.safetensors",
    f"{STEP}/part-s\u0660-w0-g1.safetensors",
    "",
]
NAMES = [
    *OUTSIDE,
    f"{STEP}/part-s0-w00-g1.safetensors",
    f"{STEP}/part-s0-w0-g1.safetensors.py",
    f"{STEP}/part-s0-w0-g1-0.safetensors",
    f"{STEP}/part-s0-w0-r-g1.safetensors",
    f"{STEP}/part-s0-w0-r01-g1.safetensors",
    "step-1/part-s0-w0-g1.safetensors",
    f"{STEP}/manifest.json",
    "latest.json",
]


def refused(folder: Path, change: Callable[[Body], None]) -> str:
    body = body_of(folder)
    change(body)
    with pytest.raises(CheckpointCorrupt) as caught:
        decode(text_of(body), "there/manifest.json")
    text = str(caught.value)
    assert text.startswith("there/manifest.json is not as Everstep writes it: ") and text.isprintable(), text
    return text


def at(*path: Any, to: Any) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        node: Any = body
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = to

    return change


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    prepare(folder, lambda body: None)
    return folder


def test_names_of_parts_are_those_that_are_written(good: Path) -> None:
    for numbers in [(1, 0, 0, 1), (10**10 - 1, 3, 12, 10**9, 999), (0, 0, 0, 0, 1)]:
        assert is_part(part_name(*numbers)) and is_part(part_name(*numbers, cell_rank=2))
    assert part_name(10, 0, 3, 5, 1, cell_rank=0) == "step-0000000010/part-s0-w3-r0-g5-1.safetensors"
    for name in NAMES:
        assert not is_part(name)
        assert ascii(name) in refused(good, renamed(name)), name
    assert decode(text_of(body_of(good)), "x").files[0].name == PART


@pytest.mark.parametrize("value", [None, True, -1, 1.0, "1", [1], 1 << 63])
@pytest.mark.parametrize(
    "path",
    [
        ("step",),
        ("generation",),
        ("depth",),
        ("written_bytes",),
        ("files", 0, 1),
        ("files", 0, 2),
        ("runs", 0, 0),
        ("runs", 0, 1),
        ("runs", 0, 2),
        ("runs", 0, 3),
        ("state", "entries", 0, 3),
        ("state", "entries", 0, 4),
    ],
)
def test_numbers_are_whole_and_within_bounds(good: Path, path: tuple[Any, ...], value: Any) -> None:
    refused(good, at(*path, to=value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at("files", 0, 3, to="a" * 31), "files[0][3]"),
        (at("files", 0, 4, to="A" * 32), "files[0][4]"),
        (at("files", 0, 3, to="a" * 32 + "\n"), "files[0][3]"),
        (at("state", "blocks", 0, to="../" * 10 + "ab"), "blocks[0]"),
        (at("files", 0, 0, to=7), "files[0][0]"),
        (lambda body: body["files"][0].append(1), "length 5"),
        (at("files", 0, 2, to=1 << 40), "one block or more"),
        (lambda body: body["files"][0].__setitem__(1, body["files"][0][2]), "one block or more"),
        (lambda body: body["files"][0].__setitem__(1, body["files"][0][1] + 1), "one block or more"),
        (at("runs", 0, 2, to=1), "file 1 of 1"),
        (at("runs", 0, 0, to=1), "no place in"),
        (lambda body: body["runs"][0].__setitem__(3, body["runs"][0][3] + 8), "no place in"),
        (at("runs", to=[]), "blocks have a place"),
        (idle, "part-s0-w1-g1.safetensors holds no block of it"),
        (lambda body: body["files"].append(body["files"][0]), "twice"),
        (at("step", to=10**10), "step"),
        (at("more", to=1), "unknown field"),
        (lambda body: body.pop("base"), "base"),
        (at("identity", to={}), "identity"),
        (at("metrics", to={"accuracy": "1e9999"}), "expected"),
        (at("metrics", to={"accuracy": "0x1p99999"}), "too large"),
        (at("records", to="Q"), "base64"),
        (at("records", to="QR=="), "base64"),
        (at("state", "entries", 0, 1, to="load"), "is no 'load'"),
        (at("state", "entries", 0, 2, to=[1 << 60, 1 << 60]), "which is no"),
        (at("state", "entries", 1, 3, to=0), "outside of its place"),
        (at("state", "digests", to=[]), "other numbers of digests"),
        (at("state", "format", to=1), "is of format 1"),
        (lambda body: body["state"].pop("planes"), "is of format 2"),
        (at("state", "planes", to=[]), "blocks in planes"),
        (at("state", "planes", 0, 0, to="models"), "'models' of 4 bytes per element is no plane"),
        (at("state", "planes", 0, 0, to="model:float32"), "is no plane"),
        (at("state", "planes", 0, 0, to="model:load"), "is no plane"),
        (at("state", "planes", 1, 0, to="optimizer/../x"), "is no plane"),
        (at("state", "planes", 0, 1, to=2), "of 2 bytes per element is no plane"),
        (at("state", "planes", 0, 1, to=0), "is no plane"),
        (at("state", "planes", 3, 1, to=4), "'rest' of 4 bytes"),
        (at("state", "planes", 0, 0, to="optimizer/zz"), "not in the order of names"),
        (at("state", "planes", 0, 2, to=[]), "is empty"),
        (at("state", "planes", 0, 2, 0, 0, to=1 << 48), "planes[0][2][0][0]"),
        (at("state", "planes", 0, 2, 0, 1, to=1), "no blocks 1 to 2"),
        (at("state", "planes", 0, 2, 0, 2, to=0), "no blocks 0 to 0"),
        (lambda body: body["state"]["planes"][0][2].append([0, 1, 1]), "no blocks 1 to 2"),
        (at("state", "entries", 0, 0, to="optimizer/weight"), "does not belong in plane 'model'"),
        (at("state", "entries", 0, 1, to="int32"), "does not belong in plane 'model'"),
        (lambda body: body["state"]["groups"].__setitem__(slice(2), [[0, 4]]), "in a group of several planes"),
        (at("state", "groups", 0, 0, to=-4), "groups[0][0]"),
    ],
)
def test_rows_fit_together(good: Path, change: Callable[[Body], None], words: str) -> None:
    assert words in refused(good, change)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"state":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "it is nested too deeply"),
        (b'{"reason":"\\udC00"}', "UnicodeEncodeError"),
        (b'{"step":' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"step":}', "Expecting value"),
        (b"[]", "expected an object"),
    ],
)
def test_text_that_cannot_be_held_or_shown(body: bytes, words: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=f"^m is not as Everstep writes it: {words}"):
        decode(signed(body), "m")


def test_the_file_bears_the_format_of_the_state(good: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"^m is not as .* the state is of format 2.* file, 1$"):
        decode(text_of(body_of(good), 1), "m")


def test_the_next_older_one_is_used(tmp_path: Path) -> None:
    prepare(tmp_path, lambda body: None, 1)
    prepare(tmp_path, lambda body: body["files"][0].__setitem__(0, ESCAPE), 2)
    told: list[str] = []
    found = newest_complete(DirectoryStore(tmp_path), told=lambda step, why: told.append(why.reason))
    assert found is not None and found.step == 1
    assert len(told) == 1 and ESCAPE in told[0] and "damaged-1-manifest.json" in told[0]


def test_a_transfer_writes_nothing_outside(tmp_path: Path) -> None:
    evil, target = tmp_path / "evil" / "a" / "b" / "checkpoints", tmp_path / "job" / "a" / "b" / "checkpoints"
    escaping(evil)
    target.parent.mkdir(parents=True)
    before = tree_of(tmp_path)
    assert "evil/uvloop.py" in before
    with pytest.raises(CheckpointCorrupt, match=r"evil/a/b/checkpoints/step-0000000001/manifest\.json .*uvloop\.py"):
        transfer(DirectoryStore(evil), DirectoryStore(target), 1)
    assert tree_of(tmp_path) == before


def test_a_manifest_of_another_step_is_not_carried_on(tmp_path: Path) -> None:
    prepare(tmp_path / "evil", at("step", to=7))
    with pytest.raises(CheckpointCorrupt, match="manifest of step 7: it belongs elsewhere"):
        transfer(DirectoryStore(tmp_path / "evil"), DirectoryStore(tmp_path / "good"), 1)
    assert not (tmp_path / "good").exists()


@pytest.mark.parametrize("name", [*OUTSIDE, "half\udc00"], ids=ascii)
def test_stores_take_no_name_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    store = DirectoryStore(tmp_path / "a" / "b" / "store")
    for act in (
        lambda: store.size(name),
        lambda: store.read(name),
        lambda: store.read_into(name, 0, []),
        lambda: store.write(name, [b"x"], 1),
        lambda: store.write(name, [b"x"], 1, if_absent=True),
        lambda: store.delete(name),
        lambda: store.mend(name, 0, memoryview(b"x")),
        lambda: store.move(name, "x"),
        lambda: store.move("x", name),
        lambda: store.draft(name).__enter__(),
    ):
        with pytest.raises(BlobForeign, match="is no name of a file here: expected one such as step-"):
            act()
    store.drop_temporaries(name)
    assert store.list(name) == store.list(f"{name}/") == [] and tree_of(tmp_path) == {}


def linked(path: Path, target: Path) -> None:
    """What lies at the path lies at the target from now on, and a link leads there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    path.symlink_to(target)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def listening(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as found:
        os.chdir(path.parent)
        found.bind(path.name)


@pytest.mark.parametrize("name", [PART, f"{STEP}/manifest.json", STEP])
def test_no_link_is_followed_below_a_store(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "evil", tmp_path / "outside" / "kept"
    prepare(folder, lambda body: None)
    linked(folder / name, outside)
    store = DirectoryStore(folder)
    steps = steps_in(store)
    assert steps == ([] if name == STEP else [1]), "nothing is found behind a link"
    with pytest.raises(CheckpointCorrupt, match=f"{name}.* (symbolic link|lies behind one)"):
        open_checkpoint(store, 1).check_files()
    with pytest.raises(CheckpointCorrupt, match=name):
        transfer(store, DirectoryStore(tmp_path / "copy"), 1)
    assert not list((tmp_path / "copy").rglob("manifest.json"))
    assert [problem.name for problem in verify_store(store)] == (["latest.json"] if name == STEP else [name])
    if name != STEP:
        told: list[str] = []
        assert newest_complete(store, told=lambda step, why: told.append(why.reason)) is None
        assert len(told) == 1 and "set aside as" in told[0]
    assert outside.exists() and not outside.is_symlink()


@pytest.mark.parametrize("become", [piped, listening, lambda path: (path.unlink(), path.mkdir())])
@pytest.mark.parametrize("name", [PART, f"{STEP}/manifest.json"])
def test_only_regular_files_are_read(
    tmp_path: Path, name: str, become: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path / "evil", lambda body: None)
    become(tmp_path / "evil" / name)
    store = DirectoryStore(tmp_path / "evil")
    with pytest.raises(CheckpointCorrupt, match=f"{name} is not a regular file: expected"):
        store.read(name)
    with pytest.raises(CheckpointCorrupt, match=name):
        transfer(store, DirectoryStore(tmp_path / "copy"), 1)
    found = newest_complete(store)
    assert found is None


def test_nothing_is_written_or_deleted_behind_a_link(tmp_path: Path) -> None:
    prepare(tmp_path / "good", lambda body: None)
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    for name in ("part-s0-w0-g1.safetensors", "manifest.json", ".tmp-old"):
        (outside / name).write_bytes(b"mine")
    (target / STEP).symlink_to(outside)
    before = tree_of(outside)
    store = DirectoryStore(target)
    with pytest.raises(StoreError, match="symbolic link"):
        transfer(DirectoryStore(tmp_path / "good"), store, 1)
    for act in (
        lambda: store.delete(PART),
        lambda: store.move(PART, "x"),
        lambda: store.write(PART, [b"x"], 1),
        lambda: store.mend(PART, 0, memoryview(b"x")),
    ):
        with pytest.raises(BlobForeign, match="symbolic link"):
            act()
    store.drop_temporaries(STEP)
    assert store.list() == store.list(f"{STEP}/") == [] and tree_of(outside) == before
    (target / STEP).unlink()
    (target / "latest.json").symlink_to(outside / "manifest.json")
    with pytest.raises(BlobForeign, match="symbolic link"):
        store.mend("latest.json", 0, memoryview(b"x"))
    store.write("latest.json", [b"new"], 3)
    assert bytes(store.read("latest.json")) == b"new" and tree_of(outside) == before, "the link itself is replaced"


@pytest.mark.parametrize("theirs", [STEP, f"{STEP}/x"])
def test_nothing_is_written_to_what_is_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    """A folder of a step, or a file in it; the store itself lies where a user says, and may be anybody's."""
    store = DirectoryStore(tmp_path / "store")
    store.write(f"{STEP}/x", [b"theirs"], 6)
    if os.geteuid() == 0:
        os.chown(store.path / theirs, OTHER, OTHER)
    own = OTHER + 1 if theirs == STEP else 0
    monkeypatch.setattr(below, "_makers", {tmp_path.stat().st_dev: OTHER + 1})
    monkeypatch.setattr(os, "geteuid", lambda: OTHER + 1)
    writes: list[Callable[[], Any]] = [lambda: store.mend(f"{STEP}/x", 0, memoryview(b"x"))]
    if own:
        writes.append(lambda: store.write(f"{STEP}/y", [b"y"], 1))
        writes.append(lambda: store.move(f"{STEP}/x", "y"))
        writes.append(lambda: store.move("z", f"{STEP}/z"))
    store.write("z", [b"z"], 1)
    for write in writes:
        with pytest.raises(StoreError, match=f"{STEP}.* belongs to another user"):
            write()
    assert bytes(store.read(f"{STEP}/x")) == b"theirs" and store.list() == [f"{STEP}/x", "z"]


def test_a_store_may_itself_lie_behind_a_link(tmp_path: Path) -> None:
    prepare(tmp_path / "real", lambda body: None)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert newest_complete(DirectoryStore(tmp_path / "link")) is not None


def test_names_that_lie_around_are_none_of_ours(tmp_path: Path) -> None:
    prepare(tmp_path, lambda body: None)
    for name in (f"{STEP}/deeper/manifest.json", "step-\u0661234567890/manifest.json", f"{STEP}/a b", "step-odd"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    store = DirectoryStore(tmp_path)
    assert steps_in(store) == [1]
    assert f"{STEP}/a b" not in store.list() and "step-odd" in store.list()
    assert Shelf.read(store).steps == [1] and verify_store(store) == []


@pytest.mark.parametrize("step", [-1, 10**10, True, 1.0, "1", "../../x", None])
def test_pointers_name_steps(tmp_path: Path, step: Any) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / LATEST).write_bytes(seal("pointer", {"step": step, "value": "0x1p99999"}))
    (tmp_path / PINS).write_bytes(seal("pins", {"pins": {"mine": step}}))
    for read in (lambda: read_pointer(store, LATEST), lambda: read_pins(store)):
        with pytest.raises(CheckpointCorrupt, match="expected"):
            read()
    with pytest.raises(CheckpointCorrupt, match="names no value"):
        read_pointer_value(store, LATEST)


def test_a_file_that_says_it_is_larger_than_memory(tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 43)
    with pytest.raises(BlobForeign, match="more than there is memory"):
        DirectoryStore(tmp_path).read("huge")
