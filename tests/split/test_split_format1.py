"""Checkpoints of format 1 are loaded into any cut of the model, with the bits that they were written with."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.checkpoint.reader import open_checkpoint, steps_in
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.topology import merge, model_digest, state_digest
from format1_checkpoints import KEPT, replicas, unpack


@pytest.mark.parametrize("cut", [((0, 4),), ((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4))], ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_any_topology_loads_them(tmp_path: Path, name: str, cut: tuple[tuple[int, int], ...]) -> None:
    store = DirectoryStore(unpack(name, tmp_path))
    step = steps_in(store)[-1]
    states = {k: replica.state for k, replica in replicas(name, cut).items()}
    open_checkpoint(store, step).load_into(states)
    kept = KEPT[name]["checkpoints"][str(step)]
    whole = merge([state.manifest() for state in states.values()])
    assert model_digest(whole) == kept["model"]
    assert state_digest(whole, step) == kept["state"]
