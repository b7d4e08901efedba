"""Checkpoints written by any number of workers, read back; everything that can be wrong with them, found and named."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from checkpoint_saving import SHAPES, advance, base_of, identity_of, make_state, save, write_part
from everstep.base.cause import Why
from everstep.base.config_keys import DiskTierConfig
from everstep.base.errors import BlobMissing, CheckpointCorrupt, ConfigError, StoreError
from everstep.checkpoint.manifest import decode, refuse_foreign, refuse_kernels
from everstep.checkpoint.names import BEST, LATEST, manifest_name
from everstep.checkpoint.pointers import read_pins, read_pointer, seal, write_pins
from everstep.checkpoint.reader import newest_complete, open_checkpoint, steps_in, verify_blocks, verify_store
from everstep.checkpoint.retention import Shelf
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.stores.store_table import open_store
from everstep.exact.image import BLOCK_BYTES
from everstep.protocol.identity import Kernels
from sampling import mostly_longer

TINY = {"weight": (50, 40), "bias": (9,)}


def flip(path: Path, byte: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ (1 << bit)]))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_what_any_number_of_workers_wrote_is_the_state(tmp_path: Path, workers: int) -> None:
    state = make_state(1)
    manifest = save(
        tmp_path, state, 7, workers=workers, records=b"who", application={"loop": b"what"}, metrics={"accuracy": 0.1}
    )
    assert manifest.state == state.manifest()
    found = newest_complete(DirectoryStore(tmp_path))
    assert found is not None and found.step == 7
    assert (found.manifest.records, found.manifest.application) == (b"who", {"loop": b"what"})
    assert found.manifest.metrics == {"accuracy": 0.1}
    other = make_state(99)
    found.load_into({0: other})
    assert other.manifest() == state.manifest()


def test_parts_are_safetensors_files_of_the_blocks(tmp_path: Path) -> None:
    state = make_state(1)
    manifest = save(tmp_path, state, 1, workers=3)
    seen = 0
    for file in manifest.files:
        for name, data in load_file(tmp_path / file.name).items():
            first, last = map(int, name.split("-")[1:])
            expected = b"".join(bytes(state.read_block(k)) for k in range(first, last))
            assert data.tobytes() == expected
            seen += last - first
    assert seen == manifest.n_blocks


def test_states_that_are_not_contiguous(tmp_path: Path) -> None:
    state = make_state(1, {"a": (2, 3, 100, 300)})
    with torch.no_grad():
        state.model.a.data = state.model.a.data.contiguous(memory_format=torch.channels_last)
    manifest = save(tmp_path, state, 1, workers=2)
    assert manifest.state == state.manifest()


def test_unchanged_blocks_are_referred_to(tmp_path: Path) -> None:
    shapes = {f"frozen{k}": (256, 256) for k in range(27)} | {"hot": (256, 256)}
    state = make_state(1, shapes, steps=0)
    for name, parameter in state.model.named_parameters():
        parameter.requires_grad_(name == "hot")
    for name, parameter in state.model.named_parameters():
        parameter.grad = torch.ones_like(parameter) if name == "hot" else None
    state.optimizer.step()
    full = save(tmp_path, state, 1, workers=2, incremental=True)
    state.optimizer.step()
    second = save(tmp_path, state, 2, workers=3, incremental=True)
    assert (second.base, second.depth) == (1, 1)
    assert 0 < second.written_bytes <= 0.15 * full.written_bytes
    third = save(tmp_path, state, 3, workers=1, incremental=True)
    assert (third.written_bytes, third.depth) == (0, 2)
    other = make_state(9, shapes, steps=0)
    open_checkpoint(DirectoryStore(tmp_path), 3).load_into({0: other})
    assert other.manifest() == state.manifest()


def test_old_ones_go_and_what_newer_ones_need_stays(tmp_path: Path) -> None:
    rule = DiskTierConfig(keep_last=1)
    state = make_state(1)
    save(tmp_path, state, 1, rule=rule)
    with torch.no_grad():
        state.model.deep.add_(1)
    save(tmp_path, state, 2, rule=rule, incremental=True)
    store = DirectoryStore(tmp_path)
    assert steps_in(store) == [2]
    assert store.list("step-0000000001/") == ["step-0000000001/part-s0-w0-g1.safetensors"]
    verify_blocks(open_checkpoint(store, 2))
    save(tmp_path, state, 3, rule=rule)
    assert store.list("step-") == [manifest_name(3), "step-0000000003/part-s0-w0-g1.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "step-0000000003"]


def test_pointers_and_pins(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    rule = DiskTierConfig(keep_last=1, keep_best=1, keep_every=4)
    state = make_state(1)
    write_pins(store, {"first": 1})
    for step, accuracy in enumerate([0.1, 0.5, 0.4, 0.2, 0.3, float("nan")], 1):
        advance(state, step)
        save(tmp_path, state, step, rule=rule, metrics={"accuracy": accuracy})
    assert steps_in(store) == [1, 2, 4, 6]
    assert (read_pointer(store, LATEST), read_pointer(store, BEST)) == (6, 2)
    assert read_pins(store) == {"first": 1}
    (tmp_path / LATEST).unlink()
    assert read_pointer(store, LATEST) is None
    assert newest_complete(store).step == 6  # type: ignore[union-attr]
    assert verify_store(store) == []


@pytest.mark.parametrize("times", mostly_longer([20, 80], lambda times: times == 20))
def test_every_flip_and_truncation_is_found(tmp_path: Path, times: int) -> None:
    """So many flips and truncations of each file, spread evenly over it."""
    whole = tmp_path / "whole"
    state = make_state(1, TINY)
    save(whole, state, 1, workers=1, metrics={"accuracy": 1.0})
    with torch.no_grad():
        state.model.bias.add_(1)
    save(whole, state, 2, workers=1, incremental=True, metrics={"accuracy": 2.0})
    store = DirectoryStore(whole)
    write_pins(store, {"mine": 1})
    assert verify_store(store) == []
    drawn = random.Random(7)
    files = sorted(p for p in whole.rglob("*") if p.is_file())
    assert len(files) == 7
    for path in files:
        data = path.read_bytes()
        for _ in range(times):
            byte, bit = drawn.randrange(len(data)), drawn.randrange(8)
            flip(path, byte, bit)
            assert verify_store(store), f"bit {bit} of byte {byte} of {path.name}"
            flip(path, byte, bit)
        for _ in range(times):
            size = drawn.randrange(len(data))
            os.truncate(path, size)
            assert verify_store(store), f"{path.name} cut to {size} of {len(data)} bytes"
            path.write_bytes(data)
    assert verify_store(store) == []


def test_a_reader_refuses_flips_in_what_it_loads(tmp_path: Path) -> None:
    state = make_state(1, TINY)
    manifest = save(tmp_path, state, 1)
    path = tmp_path / manifest.files[0].name
    drawn = random.Random(3)
    store = DirectoryStore(tmp_path)
    for _ in range(100):
        byte = drawn.randrange(path.stat().st_size)
        flip(path, byte, 0)
        with pytest.raises(CheckpointCorrupt, match=r"part-s0-w0-g1.safetensors"):
            checkpoint = open_checkpoint(store, 1)
            checkpoint.check_files()
            checkpoint.load_into({0: make_state(2, TINY)})
        flip(path, byte, 0)


def test_the_next_older_whole_one_is_used_and_the_bad_one_set_aside(tmp_path: Path) -> None:
    state = make_state(1)
    for step in (1, 2, 3):
        advance(state, step)
        manifest = save(tmp_path, state, step)
        if step == 2:
            two = state.manifest()
    flip(tmp_path / manifest.files[0].name, manifest.files[0].data_at + 5 * BLOCK_BYTES, 3)
    told: list[tuple[int, Why]] = []
    store = DirectoryStore(tmp_path)
    found = newest_complete(store, told=lambda *what: told.append(what))
    assert found is not None and found.step == 2 and found.manifest.state == two
    ((step, why),) = told
    assert step == 3 and "block 5 (" in why.reason and "damaged-1-manifest.json" in why.reason
    assert steps_in(store) == [1, 2]
    assert len(store.list("step-0000000003/")) == 2  # nothing was deleted
    again = save(tmp_path, state, 3)  # the step is done again
    assert again.files[0].name.endswith("part-s0-w0-g1-1.safetensors")
    assert newest_complete(store).manifest == again  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d, p: p.unlink(), "is missing"),
        (lambda d, p: os.truncate(p, p.stat().st_size - 1), "truncated"),
        (lambda d, p: p.write_bytes(p.read_bytes() + b"x"), "too long"),
        (lambda d, p: shutil.copy(d / "other" / p.parent.name / p.name, p), "a part of another job"),
        (lambda d, p: shutil.copy(d / "same" / "step-0000000002" / p.name, p), "a part of step 2"),
        (lambda d, p: os.truncate(d / "same" / manifest_name(1), 100), "no whole checkpoint"),
        (lambda d, p: shutil.copy(d / "same" / manifest_name(2), d / "same" / manifest_name(1)), "belongs elsewhere"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, spoil: object, named: str) -> None:
    for job in ("same", "other"):
        for step in (1, 2):
            manifest = save(tmp_path / job, make_state(step, TINY), step, job=job)
    spoil(tmp_path, tmp_path / "same" / "step-0000000001" / Path(manifest.files[0].name).name)  # type: ignore[operator]
    store = DirectoryStore(tmp_path / "same")
    told: list[str] = []
    assert newest_complete(store, before=2, told=lambda step, why: told.append(why.reason)) is None
    assert len(told) == 1 and named in told[0]
    assert "\n" not in told[0]


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    save(tmp_path, make_state(1, TINY), 1)
    path = tmp_path / manifest_name(1)
    body = json.loads(path.read_text())["body"]
    path.write_bytes(seal("checkpoint", body, 3))
    with pytest.raises(ConfigError, match=r"format 3.*reads 1 and 2"):
        newest_complete(DirectoryStore(tmp_path))
    assert path.exists()
    assert "format 3" in verify_store(DirectoryStore(tmp_path))[0].what


def test_another_model_or_seed_is_refused_by_name(tmp_path: Path) -> None:
    state = make_state(1)
    manifest = save(tmp_path, state, 1)
    refuse_foreign(manifest, identity_of(state, job="another run of the same"))
    other = make_state(1, {**SHAPES, "wide": (300, 701), "extra": (2,)})
    with pytest.raises(ConfigError, match=r"wide is float32\[300, 700\] there, float32\[300, 701\] here") as caught:
        refuse_foreign(manifest, identity_of(other), allow_mismatch=True)
    assert "extra is missing there" in str(caught.value)
    for name, value in (("lanes", 16), ("seed", 4)):
        foreign = identity_of(state, **{name: value})
        with pytest.raises(ConfigError, match=f"{name} is {manifest.identity['numerics'][name]} there, {value} here"):
            refuse_foreign(manifest, foreign)
        refuse_foreign(manifest, foreign, allow_mismatch=True)
    refuse_foreign(manifest, identity_of(state, meta_init=False))  # a key that it does not have, at its default
    with pytest.raises(ConfigError, match="meta_init is False there, True here"):
        refuse_foreign(manifest, identity_of(state, meta_init=True))


def test_a_part_of_an_older_generation_does_not_count(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    state = make_state(1)
    stale = write_part(store, state, 1, workers=2, worker_id=1, generation=1)
    manifest = save(store, state, 1, workers=2, generation=2)
    assert stale.file is not None and stale.file[0] not in {f.name for f in manifest.files}
    save(store, state, 2)
    assert not (tmp_path / stale.file[0]).exists()  # nobody refers to it


def test_a_step_done_again_keeps_the_first_one(tmp_path: Path) -> None:
    state = make_state(1)
    first = save(tmp_path, state, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")}
    assert save(tmp_path, state, 1, generation=3) == first
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == before
    advance(state, 5)
    with pytest.raises(StoreError, match="another checkpoint of step 1"):
        save(tmp_path, state, 1, generation=4)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == before


def test_some_write_what_changed_alone_and_others_all_of_their_part(tmp_path: Path) -> None:
    """They may see a checkpoint's end at different times."""
    state = make_state(1)
    save(tmp_path, state, 1)
    manifest = save(tmp_path, state, 2, workers=2, incremental=1)
    assert manifest.base == 1 and manifest.written_bytes > 0
    verify_blocks(open_checkpoint(DirectoryStore(tmp_path), 2))
    assert {file.name.split("/")[0] for file in manifest.files} == {"step-0000000001", "step-0000000002"}


def test_blocks_whose_older_checkpoint_has_gone(tmp_path: Path) -> None:
    state = make_state(1)
    store = DirectoryStore(tmp_path)
    save(store, state, 1)
    base = base_of(store)
    shutil.rmtree(tmp_path / "step-0000000001")
    report = write_part(store, state, 2, base=base)
    assert report.written == [] and report.file is None
    with pytest.raises(BlobMissing):
        open_checkpoint(store, 1)


def test_stores_by_path_and_url(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).url == str(tmp_path)
    store = open_store(f"file://{tmp_path}")
    store.write("a/b", [b"12", memoryview(b"345")], 5)
    assert bytes(store.read("a/b", 1, 3)) == b"234" and store.size("a/b") == 5
    assert store.list() == ["a/b"] == store.list("a/") == store.list("a/b")
    store.move("a/b", "a/c")
    assert store.list() == ["a/c"]
    with pytest.raises(BlobMissing):
        store.read("a/b")
    store.delete("a/c")
    store.delete("a/c")
    assert list(tmp_path.iterdir()) == []
    assert DirectoryStore(tmp_path / "nothing").list() == []


def test_nothing_is_left_of_writers_that_were_killed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "checkpoints")
    store.drop_leftovers()
    left = [tmp_path / "checkpoints" / ".tmp-latest-1", tmp_path / "checkpoints/step-2/.tmp-part-0-1"]
    stays = tmp_path / "checkpoints/step-2/part-0"
    stays.parent.mkdir(parents=True)
    for path in (*left, stays):
        path.write_bytes(b"half a")
    store.drop_leftovers()
    assert stays.exists() and not any(path.exists() for path in left)


def test_what_a_writer_of_pointers_left_behind_goes_with_the_next_sweep(tmp_path: Path) -> None:
    """What others write there meanwhile, such as pins, stays."""
    store, state = DirectoryStore(tmp_path), make_state()
    save(store, state, 1)
    for name in (f".tmp-{LATEST}-0a", f".tmp-{BEST}-0b", ".tmp-pins-0c", "latest-notes"):
        (tmp_path / name).write_bytes(b"half")
    Shelf.read(store, None).sweep()
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("step-")}
    assert {name for name in left if "-" in name} == {".tmp-pins-0c", "latest-notes"}
    assert read_pointer(store, LATEST) == 1


def test_other_kernels_are_refused_by_name(tmp_path: Path) -> None:
    state, wide = make_state(1), Kernels("a" * 32, "a CPU by AVX512", 1)
    narrow, manifest = Kernels("b" * 32, "a CPU by AVX2", 1), replace(save(tmp_path, state, 1), numerics=wide)
    again = decode(manifest.encode(), "manifest.json")
    assert again == manifest and b'"numerics":{"fingerprint":"aaaa' in manifest.encode().replace(b" ", b"")
    refuse_kernels(again, wide)
    refuse_kernels(again, None)
    refuse_kernels(replace(manifest, numerics=None), narrow)  # of an older version
    assert b'"AVX2"' not in replace(manifest, numerics=None).encode()
    with pytest.raises(
        ConfigError, match=r"step 1 .*computes with a CPU by AVX2, it with a CPU by AVX512; .*changed=warn"
    ):
        refuse_kernels(again, narrow)
