"""A script as people write it, started by the launchers of others, and what it should end with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.cli.ledger import audit_run
from job_harness import LIMIT_S, Job, same

if TYPE_CHECKING:
    from net import Host

_ON_HOST = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; mount --bind "$1" /etc/hosts; shift; exec "$@"'
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
SCRIPT = """
import contextlib, json, os, sys, time
import torch
import everstep

run_dir, hold, lane_s = sys.argv[1], sys.argv[1] + ".hold", 0.0
with contextlib.suppress(OSError), open(hold) as file:
    lane_s = float(file.read())
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = [(torch.sin(torch.arange(8.0) * (i + 1)), torch.tensor(float(i % 7))) for i in range(64)]
run = everstep.join(
    model, optimizer, data, lanes=4, micro_batch=2, steps=12, seed=5, run_dir=run_dir, rehearse=False,
    checkpoint={"disk": {"every_steps": 4}}, backoff={"initial_s": 0.05},
)
for step in run:
    if step.number == 1:
        place = {name: os.environ[name] for name in PLACE}
        with open(f"{run_dir}/place-{os.environ['RANK']}.json", "w") as file:
            json.dump(place, file)
    for x, y in step:
        begin = time.monotonic()
        while os.path.exists(hold) and time.monotonic() < begin + lane_s:
            time.sleep(0.02)
        step.backward(torch.nn.functional.mse_loss(model(x)[:, 0], y))
""".replace("PLACE", repr(PLACE))


def write_script(folder: Path) -> Path:
    """The script, in a file of its own."""
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def hold(run_dir: Path, lane_s: float = 0.2) -> Path:
    """While this is there, lanes take so many seconds longer."""
    path = run_dir.with_name(run_dir.name + ".hold")
    path.write_text(str(lane_s))
    return path


class Launched(Job):
    """A launcher and the job that its processes have become."""

    def __init__(
        self, run_dir: Path, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> None:
        words = [str(word) for word in command]
        with open(run_dir.with_suffix(".err"), "ab") as out:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=clean(environment),
                cwd=run_dir.parent,
                start_new_session=True,
            )
        super().__init__(run_dir, " ".join(words), self.process.pid)

    def end(self) -> int:
        assert self.over(LIMIT_S), self.account()
        return self.process.wait()

    @property
    def said(self) -> str:
        """All that launcher and job have said."""
        return self.run_dir.with_suffix(".err").read_text(errors="replace")


def booted(host: Host) -> list[str]:
    """What starts a command on a host as a daemon of it, in a shell's words too; unlike `ip netns exec` this leaves the
    cgroups to be seen that slurmd looks for. It ends with `Host.kill`."""
    inside = [
        "nsenter",
        f"--net=/run/netns/{host.namespace}",
        "unshare",
        "--mount",
        "--uts",
        "--ipc",
        "--pid",
        "--fork",
    ]
    return [
        *inside,
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        _ON_HOST,
        host.name,
        f"/etc/netns/{host.namespace}/hosts",
    ]


def clean(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of somebody who has started nothing yet."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    return {**kept, "OMP_NUM_THREADS": "1", "TERM": "dumb", **(more or {})}


def reference(folder: Path, script: Path) -> Path:
    """The run directory of the same script on one worker, undisturbed."""
    run_dir = folder / "alone"
    command = [sys.executable, "-P", "-m", "everstep", "run", str(script), "--set", "lanes=4", "--workers", "1"]
    command += ["--run-dir", str(run_dir), "--", str(run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=clean(), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert audit_run(run_dir).clean, "what only the script says of seed and sizes is known to the ledger"
    return run_dir


def check(job: Job, alone: Path) -> None:
    """Wait for the end: done, and bitwise what one worker makes."""
    code = job.end()
    assert code == 0, f"ended with {code}\n{job.account()}"
    same(alone, job)


def places(run_dir: Path) -> list[dict[str, Any]]:
    """What the workers of step 1 found in their environments, by rank."""
    found = [json.loads(path.read_text()) for path in run_dir.glob("place-*.json")]
    return sorted(found, key=lambda place: int(place["RANK"]))
