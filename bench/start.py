"""How long a job takes to its first step, beside torchrun: from the command to the first update, N times in turn.

    python bench/start.py [--workers 2] [--times 5]     JSON, seconds

Both train the same small network. `everstep run` includes the rehearsal of the script in "rehearsed", and leaves it
out in "unrehearsed"; under torchrun the network is a DistributedDataParallel on gloo. The first round, which may read
torch from the disk, is not counted. A job that is started again has been rehearsed, so it is as fast as "unrehearsed".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAD = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 16), torch.arange(256) % 2)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
"""
OURS = """
import everstep

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in everstep.join(model, optimizer, data, lanes=8, micro_batch=4, steps=4):
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
"""
THEIRS = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=32 // dist.get_world_size(), sampler=DistributedSampler(data)):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    break
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.time_ns()))
dist.destroy_process_group()
"""


def run(command: list[str]) -> int:
    """Run a command to its end; returns when it began, in ns. Raises: SystemExit with its output if it fails."""
    began_ns = time.time_ns()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return began_ns


def ours(folder: Path, workers: int, name: str, *more: str) -> float:
    """Seconds to the first step of a job."""
    run_dir = folder / name
    command = [sys.executable, "-P", "-m", "everstep", "run", str(folder / "ours.py"), "--workers", str(workers)]
    began_ns = run([*command, "--run-dir", str(run_dir), *more])
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return float(next(e["time_unix_ns"] for e in events if e["kind"] == "step_committed") - began_ns) / 1e9


def theirs(folder: Path, workers: int) -> float:
    """Seconds to the first step under torchrun."""
    first = folder / "first"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    began_ns = run([*command, str(folder / "theirs.py"), str(first)])
    return float(int(first.read_text()) - began_ns) / 1e9


def main() -> None:
    given = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given.add_argument("--workers", type=int, default=2)
    given.add_argument("--times", type=int, default=5)
    asked = given.parse_args()
    found: dict[str, list[float]] = {"rehearsed": [], "unrehearsed": [], "torchrun": []}
    with tempfile.TemporaryDirectory(prefix="everstep-start-") as name:
        folder = Path(name)
        (folder / "ours.py").write_text(HEAD + OURS)
        (folder / "theirs.py").write_text(HEAD + THEIRS)
        for number in range(asked.times + 1):
            took = {
                "rehearsed": ours(folder, asked.workers, f"a{number}"),
                "unrehearsed": ours(folder, asked.workers, f"b{number}", "--set", "rehearse=false"),
                "torchrun": theirs(folder, asked.workers),
            }
            for kind, seconds in took.items():
                found[kind] += [seconds] if number else []
    medians = {kind: round(statistics.median(times), 2) for kind, times in found.items()}
    print(json.dumps({"workers": asked.workers, "median_s": medians, "all_s": found, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
