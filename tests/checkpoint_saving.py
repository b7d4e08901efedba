"""States without training, and whole checkpoints of them, written as several workers would."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.base.cause import Cause
from everstep.base.config_keys import DiskTierConfig
from everstep.base.errors import CheckpointCorrupt, StoreError
from everstep.base.extents import WHOLE
from everstep.checkpoint.manifest import JobIdentity, Manifest
from everstep.checkpoint.manifest_writer import Extent, ManifestWriter, WriteOutcome
from everstep.checkpoint.part import Base, LiveState, PartJob, PartReport, PartWriter
from everstep.checkpoint.reader import open_checkpoint, steps_in
from everstep.checkpoint.signing import Signer
from everstep.checkpoint.store import DirectoryStore
from everstep.exact.state import ModelState
from everstep.placement.shards import divided
from everstep.protocol.driver.policy import Due

NUMERICS = {"lanes": 8, "seed": 3, "micro_batch": 4}


class Tensors(nn.Module):
    """Parameters of the given shapes, and a buffer."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


SHAPES = {"small": (7,), "wide": (300, 700), "none": (0, 3), "deep": (3, 90_000)}


def make_state(seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES, steps: int = 1) -> ModelState:
    """A model with an AdamW optimizer and a scheduler, and random numbers everywhere."""
    model = Tensors(shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = ModelState(model, optimizer, scheduler, units=[model])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    for _ in range(steps):
        advance(state, seed)
    return state


def advance(state: ModelState, seed: int) -> None:
    """One update with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in state.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    state.optimizer.step()
    state.scheduler.step()
    state.model.count.add_(1)


def identity_of(state: ModelState, job: str = "job-a", **numerics: Any) -> JobIdentity:
    rows = [e for e in state.manifest()["entries"] if e[0].startswith("model/")]
    tensors = tuple((e[0].removeprefix("model/"), e[1], tuple(e[2])) for e in rows)
    return JobIdentity("task", {**NUMERICS, **numerics}, tensors, job)


def base_of(store: DirectoryStore, step: int | None = None) -> Base:
    """What the newest checkpoint (or that of a step) has."""
    try:
        manifest = open_checkpoint(store, steps_in(store)[-1] if step is None else step).manifest
    except (CheckpointCorrupt, StoreError, IndexError):
        return Base()
    return Base(manifest.step, manifest.depth, frozenset(manifest.state["blocks"]))


def write_part(
    store: DirectoryStore,
    state: ModelState,
    step: int,
    *,
    workers: int = 1,
    worker_id: int = 0,
    generation: int = 1,
    base: Base | None = None,
    job: str = "job-a",
    limit_bytes: int = 1 << 30,
    signed: bool = False,
) -> PartReport:
    """One worker's part."""
    live = LiveState(state)
    runs = divided((("all", live.n_blocks),), dict.fromkeys(range(workers), WHOLE))[worker_id]
    reports: list[PartReport] = []
    who = PartReport(step, generation, 0, worker_id, runs)
    what = PartJob(who, worker_id == 0, limit_bytes, metadata={"job": job}, signed=signed)
    writer = PartWriter(store, what, live, lambda: base or Base(), reports.append)
    threading.Thread(target=writer.run, daemon=True).start()
    writer.before_update(60.0)
    if not writer.join(60.0):
        raise TimeoutError("the part was not written")
    return reports[0]


def save(
    directory: Path | DirectoryStore,
    state: ModelState,
    step: int,
    *,
    workers: int = 1,
    generation: int = 1,
    incremental: bool | int = False,
    rule: DiskTierConfig | None = None,
    job: str = "job-a",
    signer: Signer | None = None,
    **facts: Any,
) -> Manifest:
    """A checkpoint of an unsplit job. incremental: whether all write what changed alone, or how many of them do.

    Raises: StoreError if there is none in the end."""
    store = directory if isinstance(directory, DirectoryStore) else DirectoryStore(directory)
    base, some = base_of(store) if incremental else Base(), workers if incremental is True else int(incremental)
    ended = threading.Event()
    outcomes: list[WriteOutcome] = []

    def done(outcome: WriteOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    writer = ManifestWriter(
        store,
        identity_of(state, job),
        rule or DiskTierConfig(keep_last=1000),
        done,
        best_metric="accuracy",
        signer=signer,
    )
    try:
        due = Due(("disk",), facts.pop("reason", ""), Cause.REQUESTED)
        writer.expect(Extent(step, due, **facts), generation)
        for worker_id in range(workers):
            writer.add(
                write_part(
                    store,
                    state,
                    step,
                    workers=workers,
                    worker_id=worker_id,
                    generation=generation,
                    base=base if worker_id < some else None,
                    job=job,
                    signed=signer is not None,
                )
            )
        if not ended.wait(60.0):
            raise TimeoutError("the checkpoint was not complete in time")
    finally:
        writer.close()
    if outcomes[0].manifest is None:
        failed = outcomes[0].failed
        raise StoreError(failed.reason if failed is not None else "nobody said why")
    return outcomes[0].manifest
