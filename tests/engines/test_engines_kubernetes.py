"""What `everstep launch k8s` prints, done as kubelet and the Job's controller would: pods on hosts that are network
namespaces, each with its container's command as process 1, its hook before it is stopped, and the Job's reading of how
it ended. The manifest is taken to the letter but for where the claim is mounted.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from net import Host, Net

from engines_harness import clean, hold
from etcd_members import etcd_on, etcd_there
from job_harness import LIMIT_S, Job, same
from kubelet import expanded

pytestmark = pytest.mark.longer
NAME = "everstep-train"
FAILS = """
import torch, everstep
model = torch.nn.Linear(1, 1)
for step in everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), [0.0] * 64, steps=2, rehearse=False):
    raise ValueError("no good")
"""


class Pod:
    """The container of one index on a host."""

    def __init__(self, spec: dict[str, Any], token: str, host: Host, index: int, log: Path) -> None:
        self.host = host
        self.index = index
        self._grace_s = spec["terminationGracePeriodSeconds"]
        (self._container,) = spec["containers"]
        values = {"status.podIP": host.address, "token": token}
        found = [(one["name"], *one["valueFrom"].values()) for one in self._container["env"]]
        named = {name: values.get(ref.get("fieldPath", ref.get("key")), "") for name, ref in found}
        self._environment = clean({**named, "JOB_COMPLETION_INDEX": str(index)})
        self._process = host.start(expanded(self._container["command"], self._environment), log, self._environment)
        self._pidfd = os.pidfd_open(self._process.pid)

    def stop(self) -> int:
        """What kubelet does to one that is to go: the hook, SIGTERM when that is over, SIGKILL when its time is up.
        Returns the exit code, or 128 and the signal."""
        end_s = time.monotonic() + self._grace_s
        with subprocess.Popen(self._inside(*self._container["lifecycle"]["preStop"]["exec"]["command"])) as hook:
            try:
                hook.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                hook.kill()
        if not self.over(0.0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.first(), signal.SIGTERM)
        if not self.over(max(2.0, end_s - time.monotonic())):
            os.kill(self.first(), signal.SIGKILL)
        return self.code()

    def execute(self, *command: str) -> None:
        """What `kubectl exec` does."""
        ended = subprocess.run(self._inside(*command), capture_output=True, text=True, timeout=LIMIT_S)
        assert ended.returncode == 0, ended.stderr

    def over(self, timeout_s: float = LIMIT_S) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def code(self) -> int:
        """Of a container that ends by itself."""
        assert self.over()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def first(self) -> int:
        """Its process 1, as this machine calls it."""
        return int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()[0])

    def _inside(self, *command: str) -> list[str]:
        first = self.first()
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        enter = ["nsenter", "-t", str(first), "-n", "-m", "-p", "-u", "-i", f"--wdns={os.getcwd()}"]
        return [*enter, "env", "-i", *variables, *command]


class Pods(Job):
    """The Job, with one pod on each of the first hosts."""

    def __init__(self, net: Net, folder: Path, script: Path, *more: str) -> None:
        claim, self._own = folder / "claim", "--disk" in more
        self.command = [sys.executable, "-P", "-m", "everstep"]
        words = [*self.command, "launch", "k8s", str(script), "--hosts", "3", "--image", "i"]
        words += [] if self._own else ["--claim", "c"]
        words += ["--print", "--python", sys.executable, "--set", "lanes=4", "--set", "hang_limit_s=120"]
        made = subprocess.run([*words, *more, "--", f"/runs/{NAME}"], capture_output=True, text=True, env=clean())
        assert made.returncode == 0, made.stderr
        service, job, *_ = yaml.safe_load_all(made.stdout.replace("/runs/", f"{claim}/"))
        claim.mkdir()
        self._names(net, service["metadata"]["name"])
        self._net, self._folder = net, folder
        self._spec = job["spec"]
        self._token = secrets.token_hex(32)
        self.pods: dict[int, Pod] = {}
        super().__init__(claim / NAME, made.stdout, 0)

    def _names(self, net: Net, service: str) -> None:
        """What the headless service says; pod 0 stays on the first host here."""
        for host in net.hosts:
            with open(f"/etc/netns/{host.namespace}/hosts", "a") as file:
                file.write(f"{net.hosts[0].address} {NAME}-0.{service}\n")

    def start(self, index: int, number: int, token: str = "") -> Pod:
        """The pod of an index, on a host (from 1)."""
        log = self._folder / f"pod-{index}.log"
        text, claim = json.dumps(self._spec["template"]["spec"]), str(self._folder / "claim")
        spec = json.loads(text.replace(claim, f"{claim}-{index}") if self._own else text)
        self.pods[index] = Pod(spec, token or self._token, self._net.hosts[number - 1], index, log)
        return self.pods[index]

    def reading(self, code: int) -> str:
        """What the Job makes of a container's exit code: done, Ignore, FailJob, or counted."""
        for rule in self._spec["podFailurePolicy"]["rules"] if code else ():
            codes = rule.get("onExitCodes")
            if codes is not None and codes["operator"] == "In" and code in codes["values"]:
                return str(rule["action"])
        return "counted" if code else "done"

    def over(self, timeout_s: float = 0.0) -> bool:
        time.sleep(timeout_s)
        return False

    def full(self, count: int, after: int = 0) -> int:
        """Wait for a generation of so many; returns its number."""
        found = self.wait_for("generation_started", lambda e: len(e["workers"]) == count and e["generation"] > after)
        return int(found["generation"])

    def full_again(self) -> None:
        """Wait for a generation of all three, once the job that was stopped has begun again."""
        stopped_ns = self.of_kind("job_failed")[-1]["time_unix_ns"]
        self.wait_for("generation_started", lambda e: len(e["workers"]) == 3 and e["time_unix_ns"] > stopped_ns)

    def at(self, index: int) -> None:
        """From here on look at the disk of this pod's."""
        self.run_dir = self._folder / f"claim-{index}" / NAME

    def leads(self, index: int) -> bool:
        """Whether the pod of this index has taken over."""
        return "leads the job in" in (self._folder / f"pod-{index}.log").read_text()

    def steps(self) -> list[int]:
        return [int(event["step"]) for event in self.of_kind("step_committed")]

    def scale(self, workers: int) -> None:
        self.pods[0].execute(*self.command, "scale", str(self.run_dir), "--workers", str(workers))

    def account(self) -> str:
        logs = [path.read_text(errors="replace")[-2000:] for path in sorted(self._folder.glob("pod-*.log"))]
        return "\n".join([*logs, super().account()])


@pytest.fixture
def pods(net: Net, tmp_path: Path, script: Path) -> Iterator[Pods]:
    yield Pods(net, tmp_path, script)


def test_a_pod_that_is_to_go_hands_over_and_a_quota_is_followed(pods: Pods, alone: Path) -> None:
    """Of an agent: evicted, then replaced; the quota shrinks, grows to one host more than there were, whose pod is
    taken away again; another host is drained."""
    held = hold(pods.run_dir, 6.0)
    first, second, third = (pods.start(index, index + 1) for index in range(3))
    generation = pods.full(3)
    assert pods.reading(third.stop()) == "Ignore", pods.account()
    generation = pods.full(2, generation)
    third = pods.start(2, 4)
    generation = pods.full(3, generation)
    pods.scale(2)
    generation = pods.full(2, generation)
    more = pods.start(3, 3)
    pods.scale(4)
    generation = pods.full(4, generation)
    assert pods.reading(more.stop()) == "Ignore", pods.account()
    generation = pods.full(3, generation)
    first.execute(*pods.command, "drain", str(pods.run_dir), "--host", "host-1")
    assert pods.reading(second.code()) == "done", pods.account()
    held.unlink()
    assert [pod.code() for pod in (first, third)] == [0, 0], pods.account()
    assert not pods.of_kind("worker_evicted"), "all left in order"
    assert pods.steps() == list(range(1, 13)), "each step is done once"
    same(alone, pods)


def test_the_jobs_own_pod_is_to_go(pods: Pods, alone: Path) -> None:
    """It takes a checkpoint; the next one goes on from there, with the agents that have waited."""
    held = hold(pods.run_dir, 4.0)
    own, *agents = (pods.start(index, index + 1) for index in range(3))
    pods.full(3)
    pods.wait_for("step_committed")
    assert pods.reading(own.stop()) == "Ignore", pods.account()
    assert not any(pod.over(0.0) for pod in agents), pods.account()
    own = pods.start(0, 1)
    pods.full_again()
    held.unlink()
    assert [pod.code() for pod in (own, *agents)] == [0, 0, 0], pods.account()
    assert pods.steps() == list(range(1, 13)), "each step is done once"
    same(alone, pods)


def test_with_etcd_the_jobs_own_pod_is_lost_and_stands_by(net: Net, tmp_path: Path, script: Path, alone: Path) -> None:
    """The claim is that of all pods. Another pod that stands by is to go, and hands over."""
    etcd_there()
    with contextlib.closing(etcd_on(net.hosts[1:])) as members:
        pods = Pods(net, tmp_path, script, "--set", f"control.etcd={members.url()}")
        held = hold(pods.run_dir, 1.0)
        for index in range(3):
            pods.start(index, index + 1)
        generation = pods.full(3)
        os.kill(pods.pods[0].first(), signal.SIGKILL)
        assert pods.reading(pods.pods[0].code()) == "counted", pods.account()
        gone = pods.wait_for("worker_evicted")
        pods.start(0, 1)
        generation = pods.full(3, generation)
        (other,) = (pod for index, pod in pods.pods.items() if index and not pods.leads(index))
        assert pods.reading(other.stop()) == "Ignore", pods.account()
        pods.full(2, generation)
        held.unlink()
        codes = [pod.code() for pod in pods.pods.values() if pod is not other]
    assert codes == [0, 0], pods.account()
    assert [e["worker_id"] for e in pods.of_kind("worker_evicted")] == [gone["worker_id"]], "the other left in order"
    same(alone, pods)


def test_with_etcd_the_jobs_own_pod_is_to_go_and_another_one_leads(
    net: Net, tmp_path: Path, script: Path, alone: Path
) -> None:
    """Each has a disk of its own, and that of the next pod 0 is empty."""
    etcd_there()
    with contextlib.closing(etcd_on(net.hosts[1:])) as members:
        pods = Pods(net, tmp_path, script, "--set", f"control.etcd={members.url()}", "--disk", "1Gi")
        (tmp_path / "claim-0").mkdir()
        held = hold(tmp_path / "claim-0" / NAME, 4.0)
        for index in range(3):
            pods.start(index, index + 1)
        pods.at(0)
        pods.full(3)
        pods.wait_for("step_committed")
        assert pods.reading(pods.pods[0].stop()) == "Ignore", pods.account()
        (leads,) = (index for index in (1, 2) if pods.leads(index))
        shutil.rmtree(tmp_path / "claim-0" / NAME)
        pods.at(leads)
        generation = max(int(e["generation"]) for e in pods.of_kind("generation_started"))
        pods.start(0, 1)
        pods.full(3, generation)
        held.unlink()
        assert [pod.code() for pod in pods.pods.values()] == [0, 0, 0], pods.account()
    assert not pods.of_kind("job_failed") and len(pods.of_kind("job_started")) == 1
    assert not pods.of_kind("worker_evicted"), "its worker left in order, too"
    same(alone, pods)


def test_a_job_is_suspended_and_goes_on(pods: Pods, alone: Path) -> None:
    """All pods are to go at the same moment."""
    held = hold(pods.run_dir, 4.0)
    for index in range(3):
        pods.start(index, index + 1)
    pods.full(3)
    pods.wait_for("step_committed")
    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(Pod.stop, pods.pods.values()))
    assert "FailJob" not in map(pods.reading, codes), pods.account()
    for index in range(3):
        pods.start(index, index + 1)
    pods.full_again()
    held.unlink()
    assert [pod.code() for pod in pods.pods.values()] == [0, 0, 0], pods.account()
    assert pods.steps() == list(range(1, 13)), "each step is done once"
    same(alone, pods)


def test_what_the_job_makes_of_how_a_pod_ends(pods: Pods, net: Net) -> None:
    """All ends where that of the job's own is final; a refused one costs its index alone; a killed one is counted."""
    stranger = pods.start(1, 2, token="0" * 64)
    pods.start(0, 1)
    assert pods.reading(stranger.code()) == "FailIndex", pods.account()
    killed, told = pods.start(1, 2), pods.start(2, 3)
    pods.full(3)
    os.kill(_agent_on(net.hosts[1]), signal.SIGKILL)
    assert pods.reading(killed.code()) == "counted", pods.account()
    os.kill(told.first(), signal.SIGTERM)
    assert pods.reading(told.code()) == "counted", pods.account()


def test_a_job_that_fails_is_not_begun_again(net: Net, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    pods = Pods(net, tmp_path, script, "--set", "max_restarts=0", "--set", "quorum_wait_s=60")
    own, agent = pods.start(0, 1), pods.start(1, 2)
    assert [pods.reading(own.code()), pods.reading(agent.code())] == ["FailJob", "counted"], pods.account()


def _agent_on(host: Host) -> int:
    """The pid of a host's agent: the shell of its pod has started it."""
    (first,) = (pod for pod in host.pids() if _words(pod)[:2] == [b"/bin/sh", b"-c"])
    (found,) = map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())
    return found


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
