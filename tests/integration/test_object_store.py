"""Against a real S3 server: the store itself, checkpoints in it, and what happens when it is away, slow or full."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from everstep.base.errors import BlobExists, BlobForeign, BlobMissing, StoreError
from everstep.checkpoint.interchange import read_weights
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.object_store import ObjectOptions, ObjectStore, StoreRefused
from everstep.checkpoint.reader import newest_complete, open_checkpoint, steps_in, verify_blocks, verify_store
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.stores.s3 import open_s3
from everstep.checkpoint.stores.store_table import open_store
from everstep.checkpoint.transfer import Backoff, Uploader, transfer
from everstep.cli.job import Request, effective_config
from everstep.cli.main import run_command
from everstep.cli.task_loading import make_task, parse_task
from exchange_cases import checkpoint_of, copy_of, same_bits, trained, write_step, write_unchanged
from foreign_checkpoints import ESCAPE, PART, escaping, tree_of
from object_server import SMALL_KEY, SMALL_SECRET, ObjectServer, Proxy

LIMIT_S = 120.0
QUICK = ObjectOptions(request_timeout_s=5.0, connect_timeout_s=2.0, retries=0)
SOON = Backoff(initial_s=0.02, max_s=0.2, attempts=400)


@pytest.fixture
def bucket(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, and the environment to reach it."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return object_server.bucket()


@pytest.fixture
def source(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "disk")


@pytest.fixture
def proxy(object_server: ObjectServer) -> Iterator[Proxy]:
    with Proxy(object_server.endpoint) as found:
        yield found


def through(proxy: Proxy, bucket: str) -> ObjectStore:
    options = ObjectOptions(
        proxy.endpoint, request_timeout_s=QUICK.request_timeout_s, connect_timeout_s=2.0, retries=QUICK.retries
    )
    return open_s3(f"s3://{bucket}/job", options)


class Events:
    """What was reported; `told` is set with each."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self.told = threading.Event()

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.all.append((kind, fields))
        self.told.set()

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.all]


# ---- the store


def test_names_ranges_parts_and_conditions(bucket: str) -> None:
    store = open_store(f"s3://{bucket}/a/b")
    assert isinstance(store, ObjectStore)
    assert store.list() == [] and store.list("step-") == []
    data = os.urandom(20_000_003)
    pieces = [data[at : at + 3_000_000] for at in range(0, len(data), 3_000_000)]
    store.write("d/large", pieces, len(data), digest="ab" * 16)  # in parts
    store.write("d/small", [b"abc", memoryview(b"def")], 6)
    store.write("empty", [], 0)
    assert store.list() == ["d/large", "d/small", "empty"]
    assert store.list("d/") == store.list("d") == ["d/large", "d/small"] and store.list("d/s") == ["d/small"]
    assert store.sizes("d/") == {"d/large": len(data), "d/small": 6}
    assert store.fingerprint("d/large") == (len(data), "ab" * 16) and store.fingerprint("d/small") == (6, "")
    assert store.read("d/large") == data  # by several ranges
    assert bytes(store.read("d/large", 5, 17_000_000)) == data[5:17_000_005]
    assert bytes(store.read("d/small", 4, 100)) == b"ef" and bytes(store.read("d/small", 6, 1)) == b""
    assert bytes(store.read("empty")) == b""
    assert open_s3(f"s3://{bucket}").list("a/b/d/s") == ["a/b/d/small"]
    store.move("d/small", "d/moved")
    with pytest.raises(BlobExists):
        store.move("d/moved", "empty")
    store.delete("empty")
    store.delete("empty")
    assert store.list() == ["d/large", "d/moved"]
    for missing in (lambda: store.size("x"), lambda: store.read("x"), lambda: store.read("x", 0, 3)):
        with pytest.raises(BlobMissing, match="there is no s3://"):
            missing()


def test_what_a_server_names_leads_nowhere(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket that others filled: keys that are no names are none, and a manifest's escape is refused."""
    evil = tmp_path / "evil" / "a" / "b" / "checkpoints"
    escaping(evil)
    store = open_s3(f"s3://{bucket}/job")
    copy_of(DirectoryStore(evil), store)
    for key in (f"job/{PART}/deeper/manifest.json", "job/step-0000000002/a b", "jobs/step-0000000003/manifest.json"):
        obstore.put(store._store, key, b"x")
    assert steps_in(store) == [1] and "step-0000000002/a b" not in store.list()
    before = tree_of(tmp_path)
    target = tmp_path / "job" / "a" / "b" / "run"
    assert run_command(["checkpoints", "copy", store.url, str(target)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"{store.url}/step-0000000001/manifest.json" in told and ESCAPE in told
    for name in (ESCAPE, f"/{PART}", "a//b", "./a", "a/../b", "a\\b", "a\0", ""):
        for act in (
            lambda name=name: store.read(name),
            lambda name=name: store.write(name, [b"x"], 1),
            lambda name=name: store.delete(name),
            lambda name=name: store.move("a", name),
            lambda name=name: store.fingerprint(name),
        ):
            with pytest.raises(BlobForeign, match="is no name of a file here"):
                act()
        assert store.list(name and f"{name}/") == (store.list() if not name else [])
    assert tree_of(tmp_path) == before


def test_exactly_one_writer_wins(bucket: str) -> None:
    store = open_s3(f"s3://{bucket}")

    def write(number: int) -> int | None:
        try:
            store.write("manifest.json", [str(number).encode()], len(str(number)), if_absent=True)
        except BlobExists:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        won = [number for number in pool.map(write, range(8)) if number is not None]
    assert len(won) == 1 and bytes(store.read("manifest.json")) == str(won[0]).encode()


def test_a_write_that_fails_half_way_leaves_nothing(bucket: str) -> None:
    store = open_s3(f"s3://{bucket}")

    def chunks() -> Iterator[bytes]:
        yield bytes(20_000_000)
        raise StoreError("the disk is gone")

    with pytest.raises(StoreError, match="the disk is gone"):
        store.write("x", chunks(), 30_000_000)
    assert store.list() == []


def test_what_is_wrong_is_said_in_one_line(
    bucket: str, object_server: ObjectServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(store: ObjectStore, error: type[Exception] = StoreError) -> str:
        texts = []
        for action in (store.list, lambda: store.write("x", [b"abc"], 3), lambda: store.read("x", 0, 3)):
            with pytest.raises(error) as told:
                action()
            texts.append(str(told.value))
        text = " | ".join(texts)
        assert "\n" not in text and "testsecret" not in text and "Debug" not in text
        return text

    assert "there is no bucket 'everstep-none'" in said(open_s3("s3://everstep-none"), StoreRefused)
    gone = ObjectOptions("http://127.0.0.1:9", retries=0)
    assert said(open_s3(f"s3://{bucket}", gone)).count("connection refused") == 3
    proxy.set("error")
    assert said(through(proxy, bucket)).count("answered 503") == 3
    proxy.set("silent")
    impatient = ObjectOptions(proxy.endpoint, request_timeout_s=0.3, retries=0)
    assert said(open_s3(f"s3://{bucket}", impatient)).count("did not answer in time") == 3
    if object_server.kind == "rgw":  # moto takes any key
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
        assert "refuses these credentials (SignatureDoesNotMatch)" in said(open_s3(f"s3://{bucket}"), StoreRefused)


def test_a_full_store_is_told_and_damages_nothing(
    object_server: ObjectServer, bucket: str, source: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if object_server.kind != "rgw":
        pytest.skip("moto knows no quota; Ceph RGW is not installed or may not run here")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SMALL_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SMALL_SECRET)
    small = object_server.bucket(SMALL_KEY, SMALL_SECRET)
    store = open_s3(f"s3://{small}/job")
    checkpoint = checkpoint_of(nn.Linear(2, 2), None, source.path)
    transfer(source, store, checkpoint.step)
    with pytest.raises(StoreRefused, match="the store is full"):
        store.write("large", [bytes(3_000_000)], 3_000_000)
    assert newest_complete(store) is not None and store.list("large") == []


# ---- checkpoints in it


def test_checkpoints_are_read_from_it_like_from_a_directory(bucket: str, source: DirectoryStore) -> None:
    first = write_step(source, 1)
    write_unchanged(source, first, 2)
    store = open_s3(f"s3://{bucket}/runs/a")
    assert transfer(source, store, 1).files == 1
    assert transfer(source, store, 2).files == 0
    found = newest_complete(store)
    assert found is not None and found.step == 2 and steps_in(store) == [1, 2] and verify_store(store) == []
    model = read_weights(found).model
    assert all(same_bits(model[name], tensor) for name, tensor in trained()[0].state_dict().items())

    part = first.manifest.files[0]
    data = bytearray(store.read(part.name))
    data[part.data_at + 5] ^= 1
    store.write(part.name, [data], len(data))
    told: list[str] = []
    assert newest_complete(store, told=lambda step, why: told.append(why.reason)) is None
    assert len(told) == 2 and "does not match its digest" in told[0] and steps_in(store) == []


def test_resuming_a_transfer_sends_only_what_lacks(bucket: str, source: DirectoryStore) -> None:
    checkpoint = write_step(source, 1)
    store = open_s3(f"s3://{bucket}")
    part = checkpoint.manifest.files[0]
    data = bytes(source.read(part.name))
    store.write(part.name, [data], len(data), digest=part.head + part.tree)  # as the interrupted one did
    assert transfer(source, store, 1).files == 0
    store.delete("step-0000000001/manifest.json")
    store.write(part.name, [bytes(len(data))], len(data))  # the right size, not the right bytes
    assert transfer(source, store, 1).files == 1
    verify_blocks(open_checkpoint(store, 1))


# ---- the uploader, while the store is ill


@pytest.mark.parametrize("mode", ["refuse", "error", "cut"])
def test_upload_gets_through_once_the_store_works_again(
    bucket: str, source: DirectoryStore, proxy: Proxy, mode: str
) -> None:
    write_step(source, 1)
    proxy.set(mode, cut_bytes=40_000)
    events = Events()
    uploader = Uploader(source, through(proxy, bucket), events, backoff=SOON, seed=1)
    uploader.offer(1)
    assert events.told.wait(LIMIT_S)
    proxy.wait_for_connections(3)  # it tries again and again
    assert events.kinds == ["checkpoint_failed"]  # and says so once
    store = open_s3(f"s3://{bucket}/job")
    assert newest_complete(store) is None
    proxy.set("pass", reset=mode != "error")  # a connection that is reset is trouble of another kind
    assert uploader.finish(LIMIT_S)
    assert events.kinds == ["checkpoint_failed", "checkpoint_completed"]
    verify_blocks(open_checkpoint(store, 1))


def test_a_slow_store_skips_checkpoints_and_gets_the_newest(bucket: str, source: DirectoryStore, proxy: Proxy) -> None:
    for step in (1, 2, 3):
        write_step(source, step, seed=step)
    proxy.set("slow", bytes_per_s=400_000)
    events = Events()
    uploader = Uploader(source, through(proxy, bucket), events, backoff=SOON, seed=1)
    uploader.offer(1)
    proxy.wait_for_connections(1)
    uploader.offer(2)
    uploader.offer(3)
    assert uploader._skipped == [2] and events.kinds == ["checkpoint_skipped"]
    proxy.set("pass")  # resets the connection in the middle of it, too
    assert uploader.finish(LIMIT_S)
    found = newest_complete(open_s3(f"s3://{bucket}/job"))
    assert found is not None and found.step == 3


def test_finishing_does_not_wait_longer_than_its_grace(bucket: str, source: DirectoryStore, proxy: Proxy) -> None:
    write_step(source, 1)
    proxy.set("silent")
    uploader = Uploader(source, through(proxy, bucket), Events(), backoff=SOON)
    uploader.offer(1)
    proxy.wait_for_connections(1)
    assert not uploader.finish(0.2)


def test_manifests_keep_their_bytes(bucket: str, source: DirectoryStore) -> None:
    checkpoint = write_step(source, 4)
    store = open_s3(f"s3://{bucket}")
    transfer(source, store, 4)
    there: Manifest = open_checkpoint(store, 4).manifest
    assert there == checkpoint.manifest and json.loads(there.application["names"])["names"]["head.weight"]


# ---- the command line


@pytest.mark.longer
def test_commands_take_urls(
    bucket: str, source: DirectoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: object, code: int = 0) -> dict[str, Any]:
        assert run_command(["checkpoints", *(str(word) for word in words), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    for step in (1, 2, 3):
        write_step(source, step, seed=step)
    url = f"s3://{bucket}/runs/a"
    assert call("copy", source.url, url, "--all")["steps"] == [1, 2, 3]
    assert call("copy", source.url, url, "--all")["files"] == 0
    assert [row["step"] for row in call("ls", url)] == [1, 2, 3]
    assert call("show", f"{url}/step-0000000002")["step"] == 2
    assert call("verify", url) == {"checked": 3, "problems": []}
    assert call("diff", f"{url}/step-0000000002", f"{source.url}/step-0000000002")["equal"]
    assert not call("diff", f"{url}/step-0000000002", f"{url}/step-0000000003", code=1)["equal"]
    assert (
        call("export", url, "--step", "1", "--to", tmp_path / "m.safetensors", "--format", "safetensors")["step"] == 1
    )
    found = load_file(tmp_path / "m.safetensors")
    assert all(same_bits(found[name], tensor) for name, tensor in trained(1)[0].state_dict().items())
    assert call("prune", url, "--keep-last", "1")["places"][0]["deleted"] == [1, 2]
    assert call("copy", url, tmp_path / "back")["steps"] == [3]
    verify_blocks(open_checkpoint(DirectoryStore(tmp_path / "back"), 3))

    save_file(fresh_weights(), tmp_path / "w.safetensors")
    start = f"s3://{bucket}/start"
    assert call("import", tmp_path / "w.safetensors", "--task", "mlp-digits", "--to", start)["step"] == 0
    assert call("verify", start) == {"checked": 1, "problems": []}


def test_commands_say_what_is_wrong(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place, words in ((f"s3://{bucket}/none", "no checkpoint"), ("s3://everstep-none/x", "there is no bucket")):
        assert run_command(["checkpoints", "show", place]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def fresh_weights() -> dict[str, torch.Tensor]:
    task = make_task(parse_task("mlp-digits"))
    task.config = effective_config(task.defaults, Request(()), script=True)
    return {name: tensor.contiguous() for name, tensor in task.build_model().state_dict().items()}
