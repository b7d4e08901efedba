"""A checkpoint of stages is that of the whole job: written under one cut, read under any other."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint_saving import NUMERICS
from everstep.base.config_keys import CheckpointConfig
from everstep.base.plan import Member, Plan, Seat
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.manifest import JobIdentity
from everstep.checkpoint.manifest_writer import Extent
from everstep.checkpoint.reader import open_checkpoint, verify_blocks
from everstep.exact.state import ModelState, Share
from everstep.protocol.driver.policy import Due

UNITS = 4
DISK = Due(("disk",), "x")


def build(seed: int) -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(UNITS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def whole(seed: int) -> ModelState:
    model, optimizer = build(seed)
    return ModelState(model, optimizer, units=list(model))


def stage(seed: int, first: int, last: int) -> ModelState:
    """The state of units first to last - 1."""
    model, optimizer = copy.deepcopy(build(seed))
    own = {id(p): k for k, p in enumerate(optimizer.param_groups[0]["params"]) if first <= k // 2 < last}
    optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if id(p) in own]
    for parameter in [p for p in optimizer.state if id(p) not in own]:
        del optimizer.state[parameter]
    for k in range(UNITS):
        if not first <= k < last:
            del model._modules[str(k)]
    share = Share(tuple(range(first, last)), UNITS, {}, (tuple(own.values()),))
    return ModelState(model, optimizer, units=list(model), share=share)


def plan_of(pools: list[list[int]]) -> Plan:
    seats = tuple(
        Seat(i, k, "active" if i == pool[0] else "standby", (0, 1) if i == pool[0] else ())
        for k, pool in enumerate(pools)
        for i in pool
    )
    ids = sorted({i for pool in pools for i in pool})
    return Plan(3, "test", tuple(Member(i, 0, "here") for i in ids), seats, 2, stages=len(pools))


def save(directory: Path, cuts: list[int], pools: list[list[int]], step: int) -> None:
    """cuts: where each stage begins, and the end."""
    plan, ended, workers = plan_of(pools), threading.Event(), {}
    told: list[tuple[str, dict[str, Any]]] = []

    def tell(kind: str, fields: dict[str, Any]) -> None:
        told.append((kind, fields))
        ended.set()

    for i in plan.worker_ids:
        workers[i] = Checkpointer(
            directory,
            CheckpointConfig(),
            JobIdentity("task", NUMERICS),
            i,
            send=lambda data: workers[plan.leader(0)].report(data),
            events=tell,
        )
    for i, worker in workers.items():
        mine = {k: stage(step, cuts[k], cuts[k + 1]) for k, pool in enumerate(pools) if i in pool}
        worker.start(Extent(step, DISK, b"r"), mine, plan)
    assert ended.wait(60.0)
    for worker in workers.values():
        worker.close()
    assert told[0][0] == "checkpoint_completed", told


def test_written_by_stages_read_by_others(tmp_path: Path) -> None:
    save(tmp_path, [0, 3, 4], [[0, 2], [1]], 1)
    save(tmp_path, [0, 1, 2, 4], [[1], [1, 5], [5]], 2)  # two workers for three stages
    for step in (1, 2):
        expected = whole(step).manifest()
        found = open_checkpoint(
            Checkpointer(tmp_path, CheckpointConfig(), JobIdentity("", {}), 0, send=print).store, step
        )
        assert found.manifest.state == expected
        verify_blocks(found)
        loaded = whole(9)
        found.load_into({0: loaded})
        assert loaded.manifest() == expected
        parts = {0: stage(9, 0, 2), 1: stage(9, 2, 4)}
        found.load_into(parts)
        assert parts[0].manifest() == stage(step, 0, 2).manifest()
        assert parts[1].manifest() == stage(step, 2, 4).manifest()
