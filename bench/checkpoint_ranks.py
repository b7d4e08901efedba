"""The workers of `bench/checkpoint.py`: one state, saved and restored by Everstep and by DCP in the same processes."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from everstep.base.config_keys import CheckpointConfig, DiskTierConfig
from everstep.base.plan import Member, Plan, Seat
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.manifest import JobIdentity
from everstep.checkpoint.manifest_writer import Extent
from everstep.exact.state import ModelState
from everstep.protocol.driver.policy import Due

WIDTH = 1024
COMPUTE_S = 2.0
"""Between a snapshot and the update that follows: a step of two seconds."""
REST_S = 0.5
"""After a snapshot is complete: the next one does not follow at once, and an older one is deleted meanwhile."""


def make_model(size_mb: float, frozen: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers whose parameters and AdamW state have this size together, the optimizer's filled. frozen: this share of
    the parameters is trained no more."""
    layers = max(1, round(size_mb * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    width = WIDTH if size_mb * 1e6 >= 12 * WIDTH * WIDTH else int((size_mb * 1e6 / 12) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update(model, optimizer)
    for layer in model[: round(layers * frozen)]:
        layer.weight.requires_grad_(False)
    return model, optimizer


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update; every trained block changes."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def compute(seconds: float) -> None:
    """Forward and backward passes, as far as processors go; nothing that is saved changes."""
    a = torch.randn(256, 256)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        a = torch.tanh(a @ a)


def plan_of(workers: int) -> Plan:
    members = tuple(Member(i, 0, "bench", os.getpid()) for i in range(workers))
    return Plan(1, "bench", members, tuple(Seat(i, 0, "active", (i,)) for i in range(workers)), workers)


class Rank:
    """One process: rank of `workers`. queues: for reports to rank 0, one per rank."""

    def __init__(self, rank: int, workers: int, port: int, folder: Path, reports: Any) -> None:
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=workers)
        self.rank, self.workers, self.folder, self.reports = rank, workers, folder, reports
        self.told: list[dict[str, Any]] = []

    def everstep(self, model: nn.Module, optimizer: torch.optim.Optimizer, name: str, keep: int = 1) -> None:
        """Begin with an empty directory."""
        self.state = ModelState(model, optimizer, units=list(model))
        self.state.live_tensors()  # as the session does, once the optimizer has its state
        config = CheckpointConfig(disk=DiskTierConfig(keep_last=keep))
        rows = tuple((n, "float32", tuple(p.shape)) for n, p in model.named_parameters())
        self.told = []
        self.checkpointer = Checkpointer(
            self.folder / name,
            config,
            JobIdentity("bench", {}, rows, name),
            self.rank,
            send=self.reports.put,
            events=lambda kind, fields: self.told.append({"kind": kind, **fields}),
        )
        if self.rank == 0:
            threading.Thread(target=self._forward, args=(self.checkpointer,), daemon=True).start()

    def _forward(self, checkpointer: Checkpointer) -> None:
        while (data := self.reports.get()) is not None:
            checkpointer.report(data)

    def end_everstep(self) -> None:
        dist.barrier()
        if self.rank == 0:
            self.reports.put(None)
        self.checkpointer.close()
        dist.barrier()

    def save(self, step: int) -> float:
        """Seconds that training stands still at the beginning."""
        began = time.perf_counter()
        self.checkpointer.start(Extent(step, Due(("disk",), "bench")), {0: self.state}, plan_of(self.workers))
        return time.perf_counter() - began

    def wait_saved(self) -> None:
        """Until the checkpoint is complete, at all ranks."""
        self.checkpointer.drain(120.0)
        dist.barrier()


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


class _Peak:
    """The largest anonymous memory while it is open."""

    def __enter__(self) -> _Peak:
        self.before = self.peak = _rss_mb()
        self._open = True
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while self._open:
            self.peak = max(self.peak, _rss_mb())
            time.sleep(0.005)

    def __exit__(self, *exc: object) -> None:
        self._open = False
        self._thread.join()


def stalls_everstep(rank: Rank, size_mb: float, repeats: int) -> dict[str, Any]:
    """Per snapshot, with computing between: the stall, processor time, duration; and memory."""
    model, optimizer = make_model(size_mb)
    rank.everstep(model, optimizer, f"ours-{size_mb:g}")
    stalls, busy = [], 0.0
    for step in range(1, repeats + 1):
        dist.barrier()
        stall = rank.save(step)
        compute(COMPUTE_S)
        stall += rank.checkpointer.before_update()
        update(model, optimizer)
        stalls.append(stall)
        rank.wait_saved()
        compute(REST_S)
    quiet, extra_mb = [], 0.0
    for step in range(repeats + 1, repeats + 3):  # nothing beside it: how fast it is
        dist.barrier()
        cpu, began = _cpu_s(), time.perf_counter()
        with _Peak() as peak:
            rank.save(step)
            rank.wait_saved()
        quiet.append(time.perf_counter() - began)
        extra_mb = max(extra_mb, peak.peak - peak.before)
        busy = _cpu_s() - cpu
        update(model, optimizer)
    rank.end_everstep()
    return {"stalls_s": stalls, "quiet_s": quiet, "cpu_s": busy, "extra_mb": extra_mb}


def stalls_dcp(rank: Rank, size_mb: float, repeats: int, kind: str) -> dict[str, Any]:
    """The same with `torch.distributed.checkpoint.async_save`. kind: `default`, or `staged` (staging is asynchronous;
    the update waits for it)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    model, optimizer = make_model(size_mb)
    stager = DefaultStager(StagingOptions(False, False, True, False)) if kind == "staged" else None
    stalls = []
    for step in range(1, repeats + 1):
        dist.barrier()
        target = rank.folder / f"dcp-{kind}-{step % 2}"
        began = time.perf_counter()
        what = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        done = dcp.async_save(what, checkpoint_id=target, async_stager=stager)
        stall = time.perf_counter() - began
        compute(COMPUTE_S)
        began = time.perf_counter()
        staged = getattr(done, "staging_completion", None)
        if staged is not None:
            staged.result()
        stall += time.perf_counter() - began
        update(model, optimizer)
        (getattr(done, "upload_completion", None) or done).result()
        stalls.append(stall)
    dist.barrier()
    return {"stalls_s": stalls}


def save_dcp(rank: Rank, size_mb: float, repeats: int) -> dict[str, Any]:
    """dcp.save: duration and processor time."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = make_model(size_mb)
    times, cpus = [], []
    for _step in range(repeats):
        if rank.rank == 0:
            shutil.rmtree(rank.folder / "dcp", ignore_errors=True)
        dist.barrier()
        cpu, began = _cpu_s(), time.perf_counter()
        what = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(what, checkpoint_id=rank.folder / "dcp")
        dist.barrier()
        times.append(time.perf_counter() - began)
        cpus.append(_cpu_s() - cpu)
        update(model, optimizer)
    return {"quiet_s": times, "cpu_s": statistics.median(cpus)}


def save_once(rank: Rank, size_mb: float) -> dict[str, Any]:
    """One checkpoint of each kind, for `restores`."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = make_model(size_mb)
    rank.everstep(model, optimizer, "restored")
    rank.save(7)
    rank.checkpointer.before_update()
    rank.wait_saved()
    rank.end_everstep()
    what = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(what, checkpoint_id=rank.folder / "restored-dcp")
    return {}


def restores(rank: Rank, size_mb: float, repeats: int) -> dict[str, Any]:
    """Every rank restores its whole state, and verifies it, as a job does when it starts."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = make_model(size_mb)
    rank.everstep(model, optimizer, "restored")
    ours, theirs = [], []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        rank.checkpointer.load(7, {0: rank.state})
        dist.barrier()
        ours.append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        what = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(what, checkpoint_id=rank.folder / "restored-dcp")
        optimizer.load_state_dict(what["optimizer"])
        dist.barrier()
        theirs.append(time.perf_counter() - began)
    rank.end_everstep()
    return {"ours_s": ours, "dcp_s": theirs}


def incremental(rank: Rank, size_mb: float) -> dict[str, Any]:
    """Bytes of a second checkpoint when 90 % of the parameters are frozen."""
    model, optimizer = make_model(size_mb, frozen=0.9)
    rank.everstep(model, optimizer, "incremental", keep=3)
    for step in (1, 2):
        rank.save(step)
        rank.checkpointer.before_update()
        rank.wait_saved()
        update(model, optimizer)
    rank.end_everstep()
    return {"written": [e["written_bytes"] for e in rank.told if e["kind"] == "checkpoint_completed"]}


DUTIES: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f for f in (stalls_everstep, stalls_dcp, save_dcp, save_once, restores, incremental)
}


def work(rank: int, workers: int, port: int, folder: Path, reports: Any, results: Any, duty: str, args: Any) -> None:
    """The body of one process."""
    here = Rank(rank, workers, port, folder, reports)
    try:
        results.put((rank, DUTIES[duty](here, *args)))
    except BaseException:
        results.put((rank, None))
        raise
    dist.barrier()
    dist.destroy_process_group()
