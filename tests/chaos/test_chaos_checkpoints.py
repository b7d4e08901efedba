"""SIGKILL at random moments of saving: what a reader accepts afterwards is whole, right, and never changes again."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from checkpoint_saving import Tensors, save
from everstep.base.config_keys import DiskTierConfig
from everstep.checkpoint.names import LATEST
from everstep.checkpoint.pointers import read_pointer
from everstep.checkpoint.reader import newest_complete, open_checkpoint, steps_in, verify_checkpoint
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.state import ModelState

KILLS = int(os.environ.get("EVERSTEP_TEST_KILLS", "20")) * 4 // 5
"""Of all kills; the others strike uploads."""
SHAPES = {f"block{k}": (256, 256) for k in range(12)}
RULE = DiskTierConfig(keep_last=2, keep_every=7)


def state_at(step: int) -> ModelState:
    """The state after a step: a function of the step alone; half of it never changes."""
    model = Tensors(SHAPES)
    with torch.no_grad():
        for k, name in enumerate(SHAPES):
            getattr(model, name).fill_(float(step * (k % 2) + k))
        model.count.fill_(step)
    return ModelState(model)


def go_on(directory: Path, generation: int, tell: Connection) -> None:
    """What a job does that is started again: continues at the newest checkpoint, and saves after every step."""
    store = DirectoryStore(directory)
    found = newest_complete(store)
    step = 0
    if found is not None:
        step = found.step
        resumed = ModelState(Tensors(SHAPES))
        found.load_into({0: resumed})
        if resumed.manifest()["digest"] != state_at(step).manifest()["digest"]:
            os._exit(3)
    while True:
        step += 1
        tell.send(step)
        save(store, state_at(step), step, workers=2, generation=generation, incremental=step % 5 > 0, rule=RULE)


def test_killed_while_saving(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    context = multiprocessing.get_context("fork")
    store = DirectoryStore(tmp_path / "checkpoints")
    accepted: dict[int, dict[str, str]] = {}
    saved = False  # one has been saved to the end, with its pointer
    for kill in range(KILLS):
        mine, theirs = context.Pipe(duplex=False)
        victim = context.Process(target=go_on, args=(store.path, kill + 1, theirs), daemon=True)
        victim.start()
        theirs.close()
        begun = drawn.randrange(1, 4)
        for _ in range(begun):
            assert mine.poll(60.0), f"seed {seed}: the saving process does nothing"
            mine.recv()
        saved = saved or begun > 1
        time.sleep(drawn.random() * 0.04)  # when, not whether: any moment will do
        assert victim.exitcode is None, f"seed {seed}: it ended by itself, {victim.exitcode}"
        os.kill(victim.pid or 0, signal.SIGKILL)
        victim.join()
        accepted = check(store, accepted, seed)
        assert read_pointer(store, LATEST) is not None or not saved, f"seed {seed}"
    assert max(accepted) > KILLS // 2


def check(store: DirectoryStore, before: dict[int, dict[str, str]], seed: int) -> dict[int, dict[str, str]]:
    """Every checkpoint is whole, of the right bits, and unchanged. Returns the hashes of their files."""
    now: dict[int, dict[str, str]] = {}
    for step in steps_in(store):
        assert verify_checkpoint(store, step) == [], f"seed {seed}"
        manifest = open_checkpoint(store, step).manifest
        assert manifest.state["digest"] == state_at(step).manifest()["digest"], f"seed {seed}: step {step}"
        files = [f.name for f in manifest.files] + [f"step-{step:010d}/manifest.json"]
        now[step] = {name: hashlib.sha256(bytes(store.read(name))).hexdigest() for name in files}
        assert before.get(step, now[step]) == now[step], f"seed {seed}: step {step} changed"
    if before:
        assert max(now) >= max(before), f"seed {seed}: step {max(before)} was accepted, and is gone"
    return now
