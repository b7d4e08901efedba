"""What the loss, the drain and the return of a host cost: three network-namespace hosts, two workers each. Needs root.

    python bench/hosts.py [--runs 3] [--steps 1500] [--only killed,crashed,...] [--lease 2] [--out FILE]

Fewer steps make a short run, for a look at whether all of it works: a job has to last longer than what is done to it.

- killed: from SIGKILL to all processes of a host to the next committed step; crashed: its link goes down first;
  cut: its link goes down, and its processes live.
- head: the host that leads is killed, its two workers and one of three members of etcd with it; to the next step.
  head-alone: it has no workers, so that nothing has to be decided; to the takeover, and the longest gap meanwhile.
- drained: the longest gap between steps after `everstep drain DIR --host NAME`.
- returned: hosts have room for three workers each, so that the lost host's workers move to the others; from the start
  of its agent to the first step of a generation in which two of its workers take part, and the longest gap meanwhile.
- torchrun, torchrun-tuned: a small model under torchrun on the same hosts, a checkpoint after every step; from SIGKILL
  to all processes of the third host to the next step. Tuned: short last calls, keep-alives and monitoring.

Gaps stand beside an ordinary step, the median before the fault. `bits`: whether `everstep verify` finds every run equal
to one worker on one host.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import BENCH, Event, environment, machine, read_events, spread, write_report
from recovery_peers import commits, gap_end, ordinary_step_s, until

sys.path += [str(BENCH.parent / "tests" / "hosts"), str(BENCH.parent / "tests")]
from net import Net, why_not

from etcd_members import etcd_on  # the same hosts as in the tests

PORT, LIMIT_S = 29400, 240.0
TASK = f"{BENCH.parent / 'tests' / 'job_tasks.py'}:Text"
EVERSTEP = [sys.executable, "-P", "-m", "everstep"]
TARGETS = {
    "killed": {"next_step_s": 1.5},
    "crashed": {"next_step_s": 2.5},
    "cut": {"next_step_s": 2.5},
    "head": {"next_step_s": 4.0},
    "head-alone": {"longest_gap_over_step_s": 0.3},
    "drained": {"longest_gap_over_step_s": 0.3},
    "returned": {"used_again_s": 45.0, "longest_gap_over_step_s": 0.3},
    "torchrun": {},
    "torchrun-tuned": {},
}
TUNED = ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"]
TUNED += ["--monitor-interval", "0.1"]


class Run:
    """One job on three hosts, the head on the first.

    lease_s: where it is not 0, the head's lease is in an etcd with a member on each host, and the others stand by.
    """

    def __init__(
        self, folder: Path, name: str, steps: int, slots: int = 2, local: bool = True, lease_s: float = 0.0
    ) -> None:
        self.run_dir = folder / name
        self.net = Net(3)
        self.workers = 6 if local else 4
        self._slots = slots
        self._log = self.run_dir.with_suffix(".log")
        self._environment = environment(EVERSTEP_TOKEN=secrets.token_hex(32))
        head = self.net.hosts[0]
        self.etcd = etcd_on(self.net.hosts) if lease_s else None
        command = [*EVERSTEP, "run", TASK, "--run-dir", str(self.run_dir), "--workers", str(self.workers), "--json"]
        command += ["--listen", f"{head.address}:{PORT}", "--slots", str(slots), "--set", f"steps={steps}"]
        command += ["--set", "hosts.min=3"] if local else ["--set", "hosts.min=2", "--no-local-workers"]
        if self.etcd is not None:
            command += ["--set", f"control.etcd={self.etcd.url()}", "--set", f"control.lease_s={lease_s}"]
        self.process = head.start(command, self._log, self._environment)
        self.agents = [self.agent(number) for number in (2, 3)]

    def agent(self, number: int) -> subprocess.Popen[bytes]:
        """Start a host's agent."""
        found = ["--join", f"{self.net.hosts[0].address}:{PORT}"]
        if self.etcd is not None:
            found = ["--join", self.etcd.url(), "--standby"]
        command = [*EVERSTEP, "agent", *found, "--slots", str(self._slots)]
        return self.net.hosts[number - 1].start(command, self._log, self._environment)

    def events(self) -> list[Event]:
        """What has been told so far."""
        return read_events(self.run_dir) if self.run_dir.exists() else []

    def steps_ns(self) -> list[int]:
        """When steps were committed."""
        return [e["time_unix_ns"] for e in self.events() if e["kind"] == "step_committed"]

    def wait(self, what: str, seen: Callable[[list[Event]], Any]) -> Any:
        """Until `seen` finds something in the events."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.process.poll() is None:
            found = seen(self.events())
            if found:
                return found
            time.sleep(0.05)
        raise SystemExit(f"{self.run_dir}: no {what}\n{self._log.read_text()[-2000:]}")

    def spread_out(self) -> int:
        """Until each host has two of six members, and steps go on. Returns when that was seen, in Unix nanoseconds."""
        at = self.wait("even hosts", lambda events: _members_on(events, 3, 2, self.workers))
        self.wait(
            "steps", lambda events: sum(e["kind"] == "step_committed" and e["time_unix_ns"] > at for e in events) > 9
        )
        return time.time_ns()

    def ordinary_s(self, before_ns: int) -> float:
        """The median of the last steps before that moment."""
        times = [t for t in self.steps_ns() if t <= before_ns][-10:]
        return statistics.median((b - a) / 1e9 for a, b in itertools.pairwise(times))

    def longest_gap_s(self, from_ns: int, to_ns: int) -> float:
        """Between steps in that time."""
        times = self.steps_ns()
        begin = max((t for t in times if t <= from_ns), default=from_ns)
        inside = [begin, *(t for t in times if from_ns < t <= to_ns)]
        return max(((b - a) / 1e9 for a, b in itertools.pairwise(inside)), default=0.0)

    def end(self) -> Path:
        """Wait for it."""
        if self.process.wait(LIMIT_S):
            raise SystemExit(f"{self.run_dir} failed\n{self._log.read_text()[-2000:]}")
        return self.run_dir

    def close(self) -> None:
        """Remove its hosts."""
        self.net.close()
        if self.etcd is not None:
            self.etcd.close()


def _members_on(events: list[Event], host: int, least: int, workers: int) -> int:
    """When a generation began in which so many members are on this host, if the newest has all workers; else 0."""
    where = {e["worker_id"]: e["host"] for e in events if e["kind"] == "worker_joined"}
    plans = [e for e in events if e["kind"] == "generation_started"]
    if not plans or len(plans[-1]["workers"]) < workers:
        return 0
    there = sum(where.get(i) == f"host{host}" for i in plans[-1]["workers"])
    return int(plans[-1]["time_unix_ns"]) if there >= least else 0


def struck(run: Run, how: str) -> dict[str, float]:
    """From the fault to the next step."""
    at = run.spread_out()
    host = run.net.hosts[2]
    ordinary_s = run.ordinary_s(at)
    begin = time.time_ns()
    {"killed": host.kill, "crashed": host.crash, "cut": host.cut}[how]()
    plan = run.wait(
        "plan", lambda es: [e for e in es if e["kind"] == "generation_started" and e["time_unix_ns"] > begin]
    )
    after = run.wait("step", lambda es: [t for t in run.steps_ns() if t > plan[0]["time_unix_ns"]])
    return {"next_step_s": (after[0] - begin) / 1e9, "ordinary_s": ordinary_s}


def head_lost(run: Run) -> dict[str, float]:
    """The host that leads is killed, and what else is on it."""
    at = run.spread_out()
    ordinary_s = run.ordinary_s(at)
    begin = time.time_ns()
    run.net.hosts[0].kill()
    run.process = run.agents[0]
    later = run.wait(
        "head", lambda es: [e for e in es if e["kind"] == "coordinator_restarted" and e["time_unix_ns"] > begin]
    )
    found = {"taken_over_s": (later[0]["time_unix_ns"] - begin) / 1e9, "ordinary_s": ordinary_s}
    if run.workers == 4:
        time.sleep(3.0)
        gap_s = run.longest_gap_s(begin, time.time_ns())
        return {**found, "longest_gap_over_step_s": gap_s - ordinary_s}
    plan = run.wait(
        "plan", lambda es: [e for e in es if e["kind"] == "generation_started" and e["time_unix_ns"] > begin]
    )
    after = run.wait("step", lambda es: [t for t in run.steps_ns() if t > plan[0]["time_unix_ns"]])
    return {**found, "next_step_s": (after[0] - begin) / 1e9}


def drained(run: Run) -> dict[str, float]:
    """The longest gap while a host hands over."""
    at = run.spread_out()
    ordinary_s = run.ordinary_s(at)
    begin = time.time_ns()
    subprocess.run(
        ["ip", "netns", "exec", run.net.hosts[0].namespace, *EVERSTEP, "drain", str(run.run_dir), "--host", "host3"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    run.wait("plan", lambda es: [e for e in es if e["kind"] == "generation_started" and e["time_unix_ns"] > begin])
    time.sleep(3.0)
    gap_s = run.longest_gap_s(begin, time.time_ns())
    return {"longest_gap_over_step_s": gap_s - ordinary_s, "ordinary_s": ordinary_s}


def returned(run: Run) -> dict[str, float]:
    """From the start of its agent until a lost host computes again."""
    run.spread_out()
    run.net.hosts[2].kill()
    lost = time.time_ns()
    run.wait("others", lambda es: [e for e in es if e["kind"] == "worker_healed" and e["time_unix_ns"] > lost][1:])
    time.sleep(1.0)
    begin = time.time_ns()
    ordinary_s = run.ordinary_s(begin)
    run.agent(3)
    at = run.wait("return", lambda events: _members_on(events, 3, 2, run.workers))
    step = run.wait("step", lambda events: [t for t in run.steps_ns() if t > at])
    time.sleep(2.0)
    gap_s = run.longest_gap_s(begin, time.time_ns())
    used_s = (step[0] - begin) / 1e9
    return {"used_again_s": used_s, "longest_gap_over_step_s": gap_s - ordinary_s, "ordinary_s": ordinary_s}


@contextlib.contextmanager
def named_hosts() -> Iterator[Net]:
    """Hosts that can resolve their names, as torchrun wants."""
    net = Net(3)
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in net.hosts)]
    folders = [Path("/etc/netns", host.namespace) for host in net.hosts]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield net
    finally:
        net.close()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def torchrun(folder: Path, options: Sequence[str]) -> dict[str, float]:
    """The same fault, under torchrun."""
    (folder / "pids").mkdir(parents=True)
    with named_hosts() as net:
        first = net.hosts[0].address
        for host in net.hosts:
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "2"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", "hosts"]
            command += ["--local-addr", host.address, "--max-restarts", "5", *options]
            command += [str(BENCH / "torchrun_peer.py"), str(folder), "transformer-tiny", "12", "1000000"]
            fair = environment(GLOO_SOCKET_IFNAME="eth0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            host.start(command, folder / f"{host.name}.log", fair)
        try:
            until(lambda: len(commits([folder / "commits"])) > 30, "torchrun's steps")
            begin = time.time_ns()
            net.hosts[2].kill()
            end = until(lambda: gap_end(commits([folder / "commits"]), begin), "torchrun's restart")
        except TimeoutError as error:
            raise SystemExit(f"{error}\n{(folder / 'host1.log').read_text()[-2000:]}") from None
        return {"next_step_s": (end - begin) / 1e9, "ordinary_s": ordinary_step_s(commits([folder / "commits"]), begin)}


def ours(folder: Path, what: str, number: int, steps: int, lease_s: float) -> tuple[dict[str, float], bool]:
    """What is measured of one job, and whether it ended as one worker on one host does."""
    single = folder / f"single-{steps}"
    if not single.exists():
        command = [*EVERSTEP, "run", TASK, "--workers", "1", "--steps", str(steps), "--run-dir", str(single)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
    led = what.startswith("head")
    slots = 3 if what == "returned" else 2
    run = Run(folder, f"{what}-{number}", steps, slots, local=what != "head-alone", lease_s=lease_s if led else 0.0)
    try:
        measured = {"drained": drained, "returned": returned, "head": head_lost, "head-alone": head_lost}.get(what)
        found = measured(run) if measured else struck(run, what)
        ended = run.end()
    finally:
        run.close()
    alike = subprocess.run([*EVERSTEP, "verify", str(ended), str(single)], stdout=subprocess.DEVNULL)
    return found, alike.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500, help="of a job; 5/3 of them where a host returns")
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--lease", type=float, default=2.0, help="of the head, in seconds")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    why = why_not()
    if why:
        print(f"cannot measure hosts: {why}", file=sys.stderr)
        return 1
    report: dict[str, Any] = {"machine": machine(), "targets": TARGETS, "lease_s": arguments.lease}
    bits = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what in arguments.only.split(","):
            found: list[dict[str, float]] = []
            for n in range(arguments.runs):
                if what.startswith("torchrun"):
                    found.append(torchrun(folder / f"{what}-{n}", TUNED if what == "torchrun-tuned" else []))
                else:
                    steps = arguments.steps * 5 // 3 if what == "returned" else arguments.steps
                    one, alike = ours(folder, what, n, steps, arguments.lease)
                    found.append(one)
                    bits &= alike
                print(f"{what}: {found[-1]}", file=sys.stderr, flush=True)
            report[what] = {name: spread([f[name] for f in found]) for name in found[0]}
    report["bits"] = bits
    write_report(report, arguments.out)
    return 0 if bits else 1


if __name__ == "__main__":
    sys.exit(main())
