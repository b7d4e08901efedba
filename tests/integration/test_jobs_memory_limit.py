"""A model that fits because its members divide gradients and the optimizer's state: it trains under a limit at which a
model of half the parameters is killed in DistributedDataParallel."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.observe.events import read_events
from everstep.runtime.process import pinned_environment

WORKERS = 4
LIMIT_BYTES = 1750 << 20
DDP_WIDTH, OUR_WIDTH = 1118, 1582  # ten and twenty million parameters
LIMIT_S = 300

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
"""
OURS = (
    MODEL
    + """
import everstep

data = torch.utils.data.TensorDataset(torch.randn(64, width), torch.randn(64, width))
run = everstep.join(model, optimizer, data, lanes=4, micro_batch=1, steps=1000)
for step in run:
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
"""
)
DDP = (
    MODEL
    + """
import torch.distributed as dist

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
for _ in range(1000):
    x = torch.randn(1, width)
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", flush=True)
"""
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group of this one, with the limit."""
    rows = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, kinds, path in rows if kinds == "memory"), None)
    if own is None:
        pytest.skip("needs control groups of version 1 with memory, to limit a job's in one of its own")
    group = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"everstep-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group of its own, to limit a job's memory ({error})")
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    with contextlib.suppress(OSError):  # where swap is counted
        (group / "memory.memsw.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def start(group: Path, *argv: str, **environment: str) -> subprocess.Popen[bytes]:
    inside = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", inside, "sh", sys.executable, *argv]
    return subprocess.Popen(
        command, env=pinned_environment(1) | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_twice_the_model_trains_where_ddp_is_killed(limited: Path, tmp_path: Path) -> None:
    for name, text, width in (("ddp", DDP, DDP_WIDTH), ("ours", OURS, OUR_WIDTH)):
        (tmp_path / f"{name}.py").write_text(f"width = {width}\n{text}")
    shared = {"WORLD_SIZE": str(WORKERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(limited, str(tmp_path / "ddp.py"), **shared, RANK=str(k)) for k in range(WORKERS)]
    until = time.monotonic() + LIMIT_S
    while all(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    killed = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.communicate()
    assert -signal.SIGKILL in killed, f"DDP went on under the limit, or ended otherwise: {killed}"
    keys = ("zero.stage=2", "zero.copies=1", "checkpoint.enabled=false")
    options = [
        "--run-dir",
        str(tmp_path / "job"),
        "--workers",
        str(WORKERS),
        *(x for key in keys for x in ("--set", key)),
    ]
    job = start(limited, "-P", "-m", "everstep", "run", str(tmp_path / "ours.py"), *options)
    until = time.monotonic() + LIMIT_S
    committed: list[int] = []
    while len(committed) < 5 and job.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
        path = tmp_path / "job" / "events.jsonl"
        events = read_events(path) if path.exists() else []
        committed = [event["step"] for event in events if event["kind"] == "step_committed"]
        evicted = [event["reason"] for event in events if event["kind"] == "worker_evicted"]
        assert not evicted, evicted
    job.kill()
    said = job.communicate()[0].decode(errors="replace")
    assert committed[:5] == [1, 2, 3, 4, 5], said[-3000:]
