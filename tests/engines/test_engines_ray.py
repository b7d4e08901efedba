"""Jobs on Ray clusters: a raylet is killed, and the job goes on on the node that comes instead, added by a person or by
Ray's own autoscaler; one begins before all nodes are there. And `join` in an actor.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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
    pytest.mark.longer,
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
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
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


class Autoscaled:
    """A cluster of two nodes of one slot, to which its autoscaler adds others when there is need and the gate is open;
    it lets in whoever has its token."""

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory(
            prefix="ev", dir="/tmp", ignore_cleanup_errors=True
        )  # a short name: Ray's sockets are below it
        self._folder = folder = Path(self._kept.name)
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "token").write_text("5" * 64)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        packages = {"PYTHONPATH": f"{PACKAGES}:{Path(ray_cluster.__file__).parent}"}
        self.stranger = {**packages, "PATH": f"{PACKAGES / 'bin'}:{os.environ['PATH']}"}
        self.environment = {**self.stranger, **token}
        self.log = folder / "cluster.log"

    def start(self) -> None:
        with open(self.log, "wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, Path(ray_cluster.__file__).with_name("ray_autoscaled.py"), self._folder, "2"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=clean(self.environment),
            )
        end_s = time.monotonic() + LIMIT_S
        while not (self._folder / "up").exists():
            assert time.monotonic() < end_s and self._process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)

    @property
    def inside(self) -> list[str]:
        """What starts a command there."""
        assert self._process is not None
        first = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()[0]
        return ["nsenter", "-t", first, "-n", "-p", "-m", f"--wdns={self._folder}"]

    def gate(self, *, opened: bool) -> None:
        """Whether nodes come that the autoscaler asks for."""
        path = self._folder / "gate"
        if opened:
            path.touch()
        else:
            path.unlink()

    def pid(self, inside: int) -> int:
        """As this machine calls a process there."""
        space = os.readlink(f"/proc/{self.inside[2]}/ns/pid")
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                known = next(x for x in (path / "status").read_text().splitlines() if x.startswith("NSpid:")).split()
                if int(known[-1]) == inside and os.readlink(path / "ns" / "pid") == space:
                    return int(path.name)
        raise AssertionError(f"no process {inside} there")

    def launch(self, script: Path, run_dir: Path) -> list[str]:
        words = ["launch", "ray", str(script), "--hosts", "3", "--run-dir", str(run_dir), "--set", "hang_limit_s=120"]
        words += ["--address", "10.99.0.1:6379", "--set", "lanes=4", "--", str(run_dir)]
        return [*self.inside, sys.executable, "-P", "-m", "everstep", *words]

    def kill_node_of(self, joined: dict[str, Any]) -> None:
        """The node of a worker, as its coming was told."""
        pid = self.pid(int(joined["pid"]))
        while Path(f"/proc/{pid}/comm").read_text().strip() != "raylet":
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            assert pid > 1, "it is no child of a raylet"
        for found in _tree(pid):
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(found, signal.SIGKILL)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # what it has started goes with its namespace
            self._process.wait()
        self._kept.cleanup()


@pytest.fixture
def autoscaled() -> Iterator[Autoscaled]:
    found = Autoscaled()
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.mark.timeout(900)
def test_the_autoscaler_starts_a_node_and_replaces_one(
    autoscaled: Autoscaled, tmp_path: Path, script: Path, alone: Path
) -> None:
    """The job begins on the nodes that there are, grows with each that comes, and never waits for one."""
    run_dir = tmp_path / "run"
    held = hold(run_dir, 8.0)
    command = autoscaled.launch(script, run_dir)
    refused = subprocess.run(command, capture_output=True, text=True, env=clean(autoscaled.stranger))
    assert refused.returncode == 2 and "set RAY_AUTH_MODE=token" in refused.stderr, refused.stderr
    job = Launched(run_dir, command, autoscaled.environment)
    try:
        two = job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
        job.wait_for("step_committed", lambda e: e["time_unix_ns"] > two["time_unix_ns"])
        assert "some nodes are missing" in job.said
        autoscaled.gate(opened=True)
        full = job.wait_for("generation_started", lambda e: len(e["workers"]) == 3)
        autoscaled.gate(opened=False)
        victim = [e for e in job.of_kind("worker_joined") if e["host"] != "10.99.0.1"][-1]
        autoscaled.kill_node_of(victim)
        gone = job.wait_for("worker_evicted", worker_id=victim["worker_id"])
        job.wait_for("step_committed", lambda e: e["time_unix_ns"] > gone["time_unix_ns"])
        autoscaled.gate(opened=True)
        job.wait_for("generation_started", lambda e: e["generation"] > full["generation"] and len(e["workers"]) == 3)
        held.unlink()
        assert job.end() == 0, job.account()
        same(alone, job)
    finally:
        job.close()


@pytest.mark.timeout(900)
def test_the_node_of_the_job_itself_is_replaced(
    autoscaled: Autoscaled, tmp_path: Path, script: Path, alone: Path
) -> None:
    """The job goes on from its newest checkpoint on the node that comes, and the other hosts begin anew with it."""
    autoscaled.gate(opened=True)
    run_dir = tmp_path / "run"
    held = hold(run_dir, 2.0)
    job = Launched(run_dir, autoscaled.launch(script, run_dir), autoscaled.environment)
    try:
        saved = job.wait_for("checkpoint_completed")
        autoscaled.kill_node_of([e for e in job.of_kind("worker_joined") if e["host"] == "10.99.0.1"][-1])
        job.wait_for("job_started", lambda e: e["time_unix_ns"] > saved["time_unix_ns"])
        held.unlink()
        assert job.end() == 0, job.account()
        assert (run_dir / "final" / "digest.json").read_text() == (alone / "final" / "digest.json").read_text()
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
