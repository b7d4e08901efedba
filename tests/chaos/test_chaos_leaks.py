"""Nothing is kept of generations that are over: what survivors and donors hold is bounded, however often others die.

One worker lives through it all. Whichever of the others die, alone or two at once, it settles with those that are left,
serves its state to the spare that steps in at once, and is followed by a life that comes later.
EVERSTEP_TEST_GENERATIONS says for how many generations.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from job_harness import Event, Job, Jobs
from process_resources import children, resources

GENERATIONS = int(os.environ.get("EVERSTEP_TEST_GENERATIONS", "12"))
SURVIVOR = 1
WORKERS = 3
QUIET = 3
"""How often it is looked before the first death."""
STATE_KIB = 8 * 1024

MARGINS = {"descriptors": 4, "threads": 3, "maps": 8, "segments": 2, "resident_kib": STATE_KIB}
"""What the last quarter of a run may have more than the second, at most; gradients, a third of the state each, come and
go. Half of all generations lie between the two: of what stays once in a generation there would be 6 in the short run,
48 MB of copies of the state; in the long one 100, so that it finds a descriptor that stays in one generation of 20."""
KEPT_KIB = STATE_KIB // 2
"""What the survivor may have more than before the first death, at least: a copy that stays once for good is found."""
SAMPLES, SAMPLE_S = 20, 0.03
"""The survivor's memory is the least of so many looks, which a step or two take: within a step the gradients of a lane
and of the update come and go, two thirds of the state together."""
HISTORY_KIB = 32
"""What the launcher may besides remember of a generation, for its account of the job; some 8 as it is."""


@dataclass
class Watched:
    """The processes that live as long as the job, and what they held after each round, by name."""

    pids: dict[str, int]
    held: dict[str, list[dict[str, int]]] = field(default_factory=dict)

    @staticmethod
    def of(job: Job) -> Watched:
        launcher, survivor = job.launcher_pid(), job.pid_of(SURVIVOR)
        pids = {"survivor": survivor, "launcher": launcher}
        for pid in children(launcher):
            what = Path(f"/proc/{pid}/cmdline").read_text()
            names = ("agent", "host_agent"), ("coordinator", "coordinator_main")
            pids[next((name for name, module in names if module in what), "fork server")] = pid
        assert len(pids) == 5 and survivor in children(pids["fork server"]), pids
        return Watched(pids)

    def look(self) -> None:
        """One more round is over, or has not begun."""
        for name, pid in self.pids.items():
            self.held.setdefault(name, []).append(resources(pid))
        found = self.held["survivor"][-1]
        for _ in range(SAMPLES):
            time.sleep(SAMPLE_S)
            found["resident_kib"] = min(found["resident_kib"], resources(self.pids["survivor"])["resident_kib"])

    def check(self) -> None:
        """Nothing has grown, and the survivor does not hold a copy of the state that it did not hold before."""
        for name, held in self.held.items():
            before, rounds = held[:QUIET], held[QUIET:]
            quarter = len(rounds) // 4
            second, last = rounds[quarter : 2 * quarter], rounds[-quarter:]
            for what, margin in MARGINS.items():
                allowed = max(r[what] for r in second) + margin
                if (name, what) == ("launcher", "resident_kib"):
                    allowed += HISTORY_KIB * GENERATIONS
                assert max(r[what] for r in last) <= allowed, self.account(name, what)
            kept_kib = min(r["resident_kib"] for r in last) - min(r["resident_kib"] for r in before)
            if name == "survivor":
                assert kept_kib < KEPT_KIB, self.account(name, "resident_kib")

    def account(self, name: str, what: str) -> str:
        """What a process held in the course of time."""
        return f"{what} of the {name}: {[held[what] for held in self.held[name]]}"


def kill_and_heal(job: Job, plan: Event, rng: random.Random) -> Event:
    """Kill one member or two, and wait until there are as many again, a spare beside them, and two steps are committed.

    Returns the event of the plan with them.
    """
    victims = rng.sample([i for i in plan["workers"] if i != SURVIVOR], rng.choice((1, 1, 2)))
    joined = {event["worker_id"]: event for event in job.of_kind("worker_joined")}
    lives = {i: joined[i]["incarnation"] for i in victims}
    for i in victims:
        os.kill(joined[i]["pid"], signal.SIGKILL)
    gone_ns = max(job.wait_for("worker_evicted", worker_id=i, incarnation=lives[i])["time_unix_ns"] for i in victims)
    whole = job.wait_for("generation_started", lambda e: e["time_unix_ns"] >= gone_ns and len(e["workers"]) == WORKERS)
    for i in victims:
        job.wait_for("worker_joined", worker_id=i, incarnation=lives[i] + 1)
    first = job.wait_for("step_committed", lambda e: e["generation"] >= whole["generation"])
    job.wait_for("step_committed", step=first["step"] + 1)
    return whole


@pytest.mark.longer
def test_what_survivors_hold_is_bounded(jobs: Jobs) -> None:
    rng = random.Random(7)
    steps = {"steps": 4 * GENERATIONS + 12}
    often = {"max_restarts": 10 * GENERATIONS, "backoff.initial_s": 0}
    until = [{"kind": "generation_started", "count": GENERATIONS}]
    job = jobs.start("Wide", "--spares", "1", workers=WORKERS, numerics=steps, settings=often, pace=until, lane_s=0.1)
    job.wait_for("worker_joined", worker_id=WORKERS)
    job.wait_for("step_committed", step=3)
    watched, plan = Watched.of(job), job.of_kind("generation_started")[-1]
    for step in range(4, 4 + QUIET):
        watched.look()
        job.wait_for("step_committed", step=step)
    while plan["generation"] < GENERATIONS:
        plan = kill_and_heal(job, plan, rng)
        watched.look()
    watched.check()
    jobs.check(job, "Wide", steps)
    plans = job.of_kind("generation_started")
    assert {plan["cause"] for plan in plans} - {"link"} == {"started", "killed", "joined"}, "spares stepped in at once"
    behind = [plan["reason"] for plan in plans if plan["cause"] == "link"]  # whose donor was killed at the switch
    assert all("could not follow to the switch" in reason for reason in behind), behind
