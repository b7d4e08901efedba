"""Checkpoints in Google Cloud Storage, against a stand-in that speaks the part of its XML API that is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bucket_server import TOKEN, BucketServer
from everstep.base.config import load_config
from everstep.base.errors import BlobExists, BlobForeign, BlobMissing, ConfigError
from everstep.checkpoint.object_store import ObjectOptions, StoreRefused
from everstep.checkpoint.reader import newest_complete, steps_in, verify_blocks
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.stores.gs import open_gs
from everstep.checkpoint.stores.store_table import open_store
from everstep.checkpoint.transfer import open_object_tier, transfer
from exchange_cases import write_step
from foreign_checkpoints import ESCAPE


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """A server, and the environment to reach it."""
    for name in [n for n in os.environ if n.startswith("GOOGLE_")]:
        monkeypatch.delenv(name)
    with BucketServer() as running:
        monkeypatch.setenv("GOOGLE_BASE_URL", running.endpoint)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
        yield running


def test_names_ranges_parts_and_conditions(server: BucketServer) -> None:
    store = open_store(f"gs://{server.bucket}/a/b")
    assert store.list() == []
    data = os.urandom(20_000_003)
    pieces = [data[at : at + 3_000_000] for at in range(0, len(data), 3_000_000)]
    far = open_gs(f"gs://{server.bucket}/a/b/")
    far.write("d/large", pieces, len(data), digest="ab" * 16)  # in parts
    store.write("d/small", [b"abc", memoryview(b"def")], 6)
    for number in range(5):
        store.write(f"e/{number}", [b""], 0)  # more than one page of a listing
    assert store.list("d/") == ["d/large", "d/small"] and len(store.list()) == 7
    assert far.fingerprint("d/large") == (len(data), "ab" * 16) and far.fingerprint("d/small") == (6, "")
    assert store.read("d/large") == data and bytes(store.read("d/large", 5, 17_000_000)) == data[5:17_000_005]
    assert bytes(store.read("d/small", 4, 100)) == b"ef" and bytes(store.read("d/small", 6, 1)) == b""
    store.move("d/small", "d/moved")
    store.delete("d/small")
    assert store.list("d/") == ["d/large", "d/moved"]
    for act in (lambda: store.size("x"), lambda: store.read("x"), lambda: store.read("x", 0, 3)):
        with pytest.raises(BlobMissing, match="there is no gs://"):
            act()
    with pytest.raises(BlobForeign, match="is no name of a file here"):
        store.write(ESCAPE, [b"x"], 1)


def test_exactly_one_writer_wins(server: BucketServer) -> None:
    store = open_store(f"gs://{server.bucket}")

    def write(number: int) -> int | None:
        try:
            store.write("manifest.json", [b"%d" % number], 1, if_absent=True)
        except BlobExists:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        won = [number for number in pool.map(write, range(8)) if number is not None]
    assert len(won) == 1 and bytes(store.read("manifest.json")) == b"%d" % won[0]


def test_checkpoints_go_there_and_come_back(server: BucketServer, tmp_path: Path) -> None:
    source, back = DirectoryStore(tmp_path / "disk"), DirectoryStore(tmp_path / "back")
    write_step(source, 3)
    values = {"checkpoint.object.url": f"gs://{server.bucket}/job", "checkpoint.object.endpoint": server.endpoint}
    store = open_object_tier(load_config([("--set", values)]).checkpoint)
    assert store is not None and transfer(source, store, 3).files == len(source.list()) - 1
    assert transfer(source, store, 3).bytes == 0, "it is known by its hashes"
    assert steps_in(store) == [3]
    transfer(store, back, 3)
    found = newest_complete(back)
    assert found is not None
    verify_blocks(found)
    assert found.manifest.files == newest_complete(source).manifest.files  # type: ignore[union-attr]


def test_what_is_wrong_is_said_in_one_line(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = ObjectOptions(retries=0)
    with pytest.raises(StoreRefused, match="there is no bucket 'other'"):
        open_gs("gs://other/x", quick).ask()
    with pytest.raises(ConfigError, match="expected no region for gs://b, whose bucket has one, got 'eu'"):
        open_gs("gs://b", ObjectOptions(region="eu"))
    with pytest.raises(ConfigError, match="such as gs://bucket/prefix"):
        open_gs("s3://b", quick)
    with pytest.raises(ConfigError, match="no keys in a URL: set GOOGLE_"):
        open_gs("gs://key@b", quick)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "expired")
    with pytest.raises(StoreRefused, match="refuses these credentials") as told:
        open_gs(f"gs://{server.bucket}", quick).ask()
    assert "\n" not in str(told.value) and "expired for" not in str(told.value)
