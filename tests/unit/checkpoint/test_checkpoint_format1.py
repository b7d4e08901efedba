"""Checkpoints of format 1: verified, loaded, exported and continued with the bits that they were written with."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from everstep.base.cause import Cause
from everstep.base.config_keys import DiskTierConfig
from everstep.checkpoint.interchange import read_weights
from everstep.checkpoint.manifest import Form, JobIdentity, State
from everstep.checkpoint.manifest_writer import Extent, ManifestWriter
from everstep.checkpoint.part import Base, LiveState, PartJob, PartReport, PartWriter
from everstep.checkpoint.reader import open_checkpoint, steps_in, verify_store
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.digest import named_digest
from everstep.exact.image import BLOCK_BYTES
from everstep.exact.topology import model_digest, same_state, state_digest
from everstep.protocol.driver.policy import Due
from format1_checkpoints import KEPT, replicas, unpack

CASES = [(name, int(step)) for name, kept in KEPT.items() for step in kept["checkpoints"]]


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "checkpoint-format.md").read_text()
    fields = [field.name for form in (Form, State) for field in msgspec.structs.fields(form)]
    assert [name for name in fields if f"`{name}`" not in text] == []


@pytest.mark.parametrize(("name", "step"), CASES)
def test_they_are_what_they_were(tmp_path: Path, name: str, step: int) -> None:
    store = DirectoryStore(unpack(name, tmp_path))
    assert verify_store(store) == []
    checkpoint, kept = open_checkpoint(store, step), KEPT[name]["checkpoints"][str(step)]
    assert checkpoint.manifest.state["format"] == 1
    assert checkpoint.manifest.depth == (step - 1 if name == "deltas" else 0)
    assert state_digest(checkpoint.manifest.state, step) == kept["state"]
    assert model_digest(checkpoint.manifest.state) == kept["model"]
    weights = read_weights(checkpoint, optimizer=True)
    assert weights.optimizer is not None
    states = {f"{n}/{key}": t for n, state in weights.optimizer["state"].items() for key, t in state.items()}
    assert named_digest(weights.model.items()) == kept["exported_model"]
    assert named_digest(states.items()) == kept["exported_optimizer"]


def test_the_next_ones_continue_them(tmp_path: Path) -> None:
    """What is the same in both formats is not written again, and stays for as long as it is needed."""
    store = DirectoryStore(unpack("deltas", tmp_path))
    replica = replicas("deltas", ((0, 4),))[0]
    old = open_checkpoint(store, 3)
    old.load_into({0: replica.state})
    identity = JobIdentity(**{key: old.manifest.identity[key] for key in ("task", "numerics", "job")})
    done = threading.Event()
    writer = ManifestWriter(store, identity, DiskTierConfig(keep_last=1), lambda outcome: done.set())
    live, base = LiveState(replica.state), Base(3, old.manifest.depth, frozenset(old.manifest.state["blocks"]))
    writer.expect(Extent(4, Due(("disk",), "", Cause.REQUESTED)), 1)
    part = PartWriter(
        store, PartJob(PartReport(4, 1, 0, 0, ((0, live.n_blocks),)), True, 0), live, lambda: base, writer.add
    )
    part.run()
    assert done.wait(60.0)
    writer.close()
    assert steps_in(store) == [4] and verify_store(store) == []
    found = open_checkpoint(store, 4).manifest
    assert (found.state["format"], found.base, found.depth) == (2, 3, 3)
    shared = set(old.manifest.state["blocks"]) & set(found.state["blocks"])
    assert shared and found.written_bytes == (found.n_blocks - len(shared)) * BLOCK_BYTES
    assert same_state(found.state, old.manifest.state) and not same_state(found.state, {**found.state, "blocks": []})
