"""Whatever is saved, pinned and pruned in whatever order: no checkpoint that is kept ever becomes unreadable."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_saving import Tensors, save
from everstep.base.config_keys import DiskTierConfig
from everstep.checkpoint.pointers import read_pins, write_pins
from everstep.checkpoint.reader import newest_complete, open_checkpoint, set_aside, steps_in, verify_checkpoint
from everstep.checkpoint.retention import apply
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.state import ModelState
from sampling import examples

BLOCKS = 5
rules = st.builds(
    DiskTierConfig,
    keep_last=st.integers(1, 3),
    keep_every=st.none() | st.integers(2, 4),
    keep_best=st.integers(0, 2),
)
saves = st.tuples(
    st.just("save"), st.sets(st.integers(0, BLOCKS - 1)), st.integers(1, 3), st.booleans(), rules, st.floats(0, 1)
)
others = st.tuples(st.sampled_from(["prune", "pin", "unpin", "aside"]), st.integers(0, 9), rules)


@given(st.lists(st.one_of(saves, saves, saves, others), min_size=2, max_size=12))
@settings(max_examples=examples(20), deadline=None)
def test_kept_checkpoints_stay_whole(operations: list[tuple]) -> None:  # type: ignore[type-arg]
    model = Tensors({f"block{k}": (256, 256) for k in range(BLOCKS)})
    state = ModelState(model)
    written: dict[int, str] = {}
    step = 0
    with tempfile.TemporaryDirectory() as directory:
        store = DirectoryStore(directory)
        for operation in operations:
            if operation[0] == "save":
                _, changed, workers, incremental, rule, score = operation
                step += 1
                with torch.no_grad():
                    for k in changed:
                        getattr(model, f"block{k}").fill_(1 / (1 + step % 3))  # old contents come back, too
                manifest = save(
                    store,
                    state,
                    step,
                    workers=workers,
                    incremental=incremental,
                    rule=rule,
                    metrics={"accuracy": score},
                )
                written[step] = manifest.state["digest"]
            else:
                other(store, *operation)
            check_all(store, written)
        newest = newest_complete(store)
        if steps_in(store):
            assert newest is not None and newest.step == steps_in(store)[-1]


def other(store: DirectoryStore, what: str, which: int, rule: DiskTierConfig) -> None:
    """Something that a user or a reader does in between."""
    steps = steps_in(store)
    chosen = steps[which % len(steps)] if steps else None
    if what == "prune":
        apply(store, rule)
    elif what == "pin" and chosen is not None:
        write_pins(store, {**read_pins(store), f"pin{which}": chosen})
    elif what == "unpin":
        write_pins(store, {})
    elif what == "aside" and chosen is not None:
        set_aside(store, chosen)


def check_all(store: DirectoryStore, written: dict[int, str]) -> None:
    """Every checkpoint that there is can be read, and is what was written."""
    pins = set(read_pins(store).values())
    steps = steps_in(store)
    for step in steps:
        assert verify_checkpoint(store, step) == []
        assert open_checkpoint(store, step).manifest.state["digest"] == written[step]
    for pin in pins:
        folder = Path(store.url) / f"step-{pin:010d}"
        assert pin in steps or list(folder.glob("damaged-*"))
