"""What the loss, the drain and the return of a host cost: three network-namespace hosts, two workers each. Needs root.

    python bench/hosts.py [--runs 3] [--only killed,crashed,drained,returned] [--out FILE]

- killed: from SIGKILL to all processes of a host to the next committed step; crashed: its link goes down first;
  cut: its link goes down, and its processes live.
- drained: the longest gap between steps after `everstep drain DIR --host NAME`.
- returned: hosts have room for three workers each, so that the lost host's workers move to the others; from the start
  of its agent to the first step of a generation in which two of its workers take part, and the longest gap meanwhile.

Gaps stand beside an ordinary step, the median before the fault. `bits`: whether `everstep verify` finds every run equal
to one worker on one host.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import BENCH, Event, environment, machine, read_events, spread, write_report

sys.path.insert(0, str(BENCH.parent / "tests" / "hosts"))
from net import Net, why_not  # the same hosts as in the tests

PORT, WORKERS, LIMIT_S = 29400, 6, 240.0
TASK = f"{BENCH.parent / 'tests' / 'job_tasks.py'}:Text"
EVERSTEP = [sys.executable, "-P", "-m", "everstep"]
TARGETS = {
    "killed": {"next_step_s": 1.5},
    "crashed": {"next_step_s": 2.5},
    "cut": {"next_step_s": 2.5},
    "drained": {"longest_gap_over_step_s": 0.3},
    "returned": {"used_again_s": 45.0, "longest_gap_over_step_s": 0.3},
}


class Run:
    """One job on three hosts, the head on the first."""

    def __init__(self, folder: Path, name: str, steps: int, slots: int) -> None:
        self.run_dir = folder / name
        self.net = Net(3)
        self._slots = slots
        self._log = self.run_dir.with_suffix(".log")
        self._environment = environment(EVERSTEP_TOKEN=secrets.token_hex(32))
        head = self.net.hosts[0]
        command = [*EVERSTEP, "run", TASK, "--run-dir", str(self.run_dir), "--workers", str(WORKERS), "--json"]
        command += ["--listen", f"{head.address}:{PORT}", "--slots", str(slots)]
        command += ["--set", f"steps={steps}", "--set", "transport=sockets"]
        self.process = head.start(command, self._log, self._environment)
        for number in (2, 3):
            self.agent(number)

    def agent(self, number: int) -> None:
        """Start a host's agent."""
        command = [*EVERSTEP, "agent", "--join", f"{self.net.hosts[0].address}:{PORT}", "--slots", str(self._slots)]
        self.net.hosts[number - 1].start(command, self._log, self._environment)

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
        at = self.wait("even hosts", lambda events: _members_on(events, 3, 2))
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
        """Wait for it, and remove its hosts."""
        try:
            if self.process.wait(LIMIT_S):
                raise SystemExit(f"{self.run_dir} failed\n{self._log.read_text()[-2000:]}")
        finally:
            self.net.close()
        return self.run_dir


def _members_on(events: list[Event], host: int, least: int) -> int:
    """When a generation began in which so many members are on this host, if the newest is one of six; else 0."""
    where = {e["worker_id"]: e["host"] for e in events if e["kind"] == "worker_joined"}
    plans = [e for e in events if e["kind"] == "generation_started"]
    if not plans or len(plans[-1]["workers"]) < WORKERS:
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
    at = run.wait("return", lambda events: _members_on(events, 3, 2))
    step = run.wait("step", lambda events: [t for t in run.steps_ns() if t > at])
    time.sleep(2.0)
    gap_s = run.longest_gap_s(begin, time.time_ns())
    used_s = (step[0] - begin) / 1e9
    return {"used_again_s": used_s, "longest_gap_over_step_s": gap_s - ordinary_s, "ordinary_s": ordinary_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--out")
    arguments = parser.parse_args()
    why = why_not()
    if why:
        print(f"cannot measure hosts: {why}", file=sys.stderr)
        return 1
    report: dict[str, Any] = {"machine": machine(), "targets": TARGETS}
    bits = True
    with tempfile.TemporaryDirectory() as folder:
        for what in arguments.only.split(","):
            steps = 2500 if what == "returned" else 1500
            single = Path(folder) / f"single-{steps}"
            if not single.exists():
                command = [*EVERSTEP, "run", TASK, "--workers", "1", "--steps", str(steps), "--run-dir", str(single)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
            found: list[dict[str, float]] = []
            for n in range(arguments.runs):
                run = Run(Path(folder), f"{what}-{n}", steps, 3 if what == "returned" else 2)
                try:
                    measured = {"drained": drained, "returned": returned}.get(what)
                    found.append(measured(run) if measured else struck(run, what))
                    ended = run.end()
                finally:
                    run.net.close()
                alike = subprocess.run([*EVERSTEP, "verify", str(ended), str(single)], stdout=subprocess.DEVNULL)
                bits &= alike.returncode == 0
            report[what] = {name: spread([f[name] for f in found]) for name in found[0]}
    report["bits"] = bits
    write_report(report, arguments.out)
    return 0 if bits else 1


if __name__ == "__main__":
    sys.exit(main())
