"""A job on a Ray cluster whose raylet is killed, and goes on on the node that comes instead; and `join` in an actor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ray_cluster
from engines_harness import Launched, clean, hold
from job_harness import LIMIT_S, same

PACKAGES = Path(sys.prefix) / "engines"
pytestmark = [
    pytest.mark.skipif(os.environ.get("EVERSTEP_TEST_ENGINES") != "all", reason="runs in make extended"),
    pytest.mark.skipif(not (PACKAGES / "ray").is_dir(), reason="needs ray (tests/install_engines.sh)"),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare"),
]


class Cluster:
    """Nodes of one slot each."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._path = folder / "cluster.json"
        self.environment = {"PYTHONPATH": str(PACKAGES), "PATH": f"{PACKAGES / 'bin'}:{os.environ['PATH']}"}
        with open(folder / "cluster.log", "wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, ray_cluster.__file__, str(self._path), str(nodes), "1"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=clean(self.environment),
                start_new_session=True,
            )
        self._log = folder / "cluster.log"
        self.facts = self._read(nodes)
        self.inside = ["nsenter", "-t", str(self.facts["pid"]), "-n"]

    def _read(self, nodes: int) -> dict[str, Any]:
        end_s = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < end_s and self._process.poll() is None, self._log.read_text()[-3000:]
            if self._path.exists():
                found: dict[str, Any] = json.loads(self._path.read_text())
                if len(found["raylets"]) >= nodes:
                    return found
            time.sleep(0.1)

    def add(self) -> None:
        """One more node."""
        assert self._process.stdin is not None
        nodes = len(self.facts["raylets"])
        self._process.stdin.write(b"add\n")
        self._process.stdin.flush()
        self.facts = self._read(nodes + 1)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path, 3)
    yield found
    found.close()


IN_AN_ACTOR = """
import ray, sys
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0)
class Trainer:
    def train(self):
        import torch, everstep
        model = torch.nn.Linear(1, 1)
        try:
            everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), [0.0] * 64, steps=2)
        except SystemExit as end:
            return f"ended with {end.code}"
        return "trained"

print(ray.get(Trainer.remote().train.remote()))
"""


def test_a_raylet_is_killed_and_another_node_comes(cluster: Cluster, tmp_path: Path, script: Path, alone: Path) -> None:
    ended = subprocess.run(
        [*cluster.inside, sys.executable, "-c", IN_AN_ACTOR, cluster.facts["address"]],
        capture_output=True,
        text=True,
        env=clean(cluster.environment),
    )
    assert ended.stdout.strip() == "ended with 2", ended.stdout + ended.stderr
    run_dir = tmp_path / "run"
    held = hold(run_dir, 4.0)
    words = ["launch", "ray", str(script), "--hosts", "3", "--run-dir", str(run_dir)]
    words += ["--address", cluster.facts["address"], "--set", "lanes=4", "--", str(run_dir)]
    job = Launched(run_dir, [*cluster.inside, sys.executable, "-P", "-m", "everstep", *words], cluster.environment)
    try:
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 3)
        head = _raylet_of(job, cluster, "10.99.0.1")
        victim = next(pid for pid in cluster.facts["raylets"] if pid != head)
        for pid in _tree(victim):
            os.kill(pid, signal.SIGKILL)
        gone = job.wait_for("worker_evicted")
        job.wait_for("step_committed", lambda e: e["time_unix_ns"] > gone["time_unix_ns"])
        cluster.add()
        job.wait_for("worker_joined", lambda e: e["time_unix_ns"] > gone["time_unix_ns"])
        held.unlink()
        assert job.end() == 0, job.account()
        same(alone, job)
    finally:
        job.close()


def _tree(pid: int) -> list[int]:
    """A process and all that it has started, as a node loses them."""
    children = [int(text) for path in Path(f"/proc/{pid}/task").glob("*/children") for text in path.read_text().split()]
    return [pid, *(found for child in children for found in _tree(child))]


def _raylet_of(job: Launched, cluster: Cluster, host: str) -> int:
    """Which raylet has started the process of worker 0, through its actor."""
    pid = next(int(e["pid"]) for e in job.of_kind("worker_joined") if e["host"] == host)
    while pid > 1 and pid not in cluster.facts["raylets"]:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
