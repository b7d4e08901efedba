"""The host that leads a job is lost, or cut off: another one takes over, by a lease in etcd or by hand.

Each host has a member of etcd, too. Most of them run in `make extended`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hosts_harness import EVERSTEP, SLOTS, HostJobs, _Head, gap_s, now_ns
from net import HIDE, Host, Net

from etcd_members import EtcdMembers, etcd_on, etcd_there
from everstep.runtime.link.address import read_address
from job_harness import LIMIT_S, Event, Job, Jobs

TAKEN: list[Event] = [{"kind": "coordinator_restarted", "count": 1}]
LEASE_S = 5
"""Machines that run tests are busy."""


class LedJobs(HostJobs):
    """Jobs whose lease is in an etcd with a member on each of the hosts."""

    def __init__(self, net: Net, jobs: Jobs, base: Path, *, apart: bool = False) -> None:
        super().__init__(net, jobs, base, apart=apart)
        self.etcd: EtcdMembers | None = None

    def start_etcd(self, *, secured: bool = False, away: bool = False) -> EtcdMembers:
        """On all hosts. secured: it wants certificates. away: at addresses of its own, and not on the first host."""
        hosts = self.net.hosts[1:] if away else self.net.hosts
        addresses = [host.second() for host in hosts] if away else []
        self.etcd = etcd_on(hosts, b"c" * 32 if secured else None, addresses)
        return self.etcd

    def led(
        self,
        *options: str,
        workers: int = 4,
        until: list[Event] = TAKEN,
        steps: int = 40,
        settings: Mapping[str, Any] | None = None,
        lane_s: float = 0.06,
        secured: bool = False,
        away: bool = False,
    ) -> _Head:
        """A job with its lease there. Without `until`, or of hosts that share no directory, it takes its time until
        `go`."""
        etcd = self.start_etcd(secured=secured, away=away)
        lease = {"control.etcd": etcd.url(), "control.lease_s": LEASE_S, **(settings or {})}
        paced: dict[str, str] = etcd.files() if secured else {}
        until = [] if self.apart else until
        if not until:
            (self._base / "go").touch()
            pace = {"events": str(self._base / "go"), "until": [{"kind": "go"}], "lane_s": lane_s}
            paced["EVERSTEP_TEST_PACE"] = json.dumps(pace)
        return self.head(*options, workers=workers, until=until, steps=steps, settings=lease, environment=paced)

    def go(self) -> None:
        """The job need not take its time any more."""
        (self._base / "go").write_text('{"kind":"go"}\n')

    def standby(self, number: int, run_dir: Path | None = None) -> _Head:
        """An agent on this host that can take over; ends as the job does. run_dir: where its files go."""
        assert self.etcd is not None
        host = self.net.hosts[number - 1]
        command = [*EVERSTEP, "agent", "--join", self.etcd.url(), "--standby", "--slots", str(SLOTS)]
        hidden = {HIDE: str(self._base / "head")} if self.apart and number > 1 else {}
        folder = run_dir or (self.own(number) if self.apart else self._base / "head" / "job")
        command += ["--run-dir", str(folder)] if self.apart else []
        process = host.start(command, self.log(host), {**self._environment, **hidden})
        return _Head(folder, " ".join(command), process)

    def takeover(self, number: int, *options: str) -> subprocess.Popen[bytes]:
        """Go on with the job from this host."""
        host = self.net.hosts[number - 1]
        command = [*EVERSTEP, "takeover", str(self._base / "head" / "job"), "--listen", f"{host.address}:0", *options]
        return host.start(command, self.log(host), self._environment)

    def said(self, number: int) -> str:
        """What the commands on this host have said."""
        return self.log(self.net.hosts[number - 1]).read_text(errors="replace")


@contextlib.contextmanager
def led(net: Net, jobs: Jobs, base: Path, *, apart: bool) -> Iterator[LedJobs]:
    """Such jobs. apart: no host but the first sees the job's directory."""
    etcd_there()
    found = LedJobs(net, jobs, base, apart=apart)
    yield found
    if found.etcd is not None:
        found.etcd.close()


@pytest.fixture
def led_jobs(net: Net, jobs: Jobs, tmp_path: Path) -> Iterator[LedJobs]:
    with led(net, jobs, tmp_path, apart=False) as found:
        yield found


@pytest.fixture
def led_apart(net: Net, jobs: Jobs, tmp_path: Path) -> Iterator[LedJobs]:
    with led(net, jobs, tmp_path, apart=True) as found:
        yield found


def leader(jobs: LedJobs, heirs: Mapping[int, Job]) -> int:
    """On which of these hosts the job is led now."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        for number, heir in heirs.items():
            assert not heir.over(0.02), heir.account() + jobs.said(number)
            if "leads the job" in jobs.said(number):
                return number
    raise AssertionError("".join(jobs.said(number) for number in heirs))


def looked_at(run_dir: Path, *command: str) -> dict[str, Any]:
    """What a command says of a directory."""
    done = subprocess.run([*EVERSTEP, *command, str(run_dir), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def regrouped(job: Job, after_ns: int) -> list[Event]:
    """Generations that began after this moment; under load workers may have joined one by one before."""
    return [e for e in job.of_kind("generation_started") if e["time_unix_ns"] > after_ns]


def committed_between(job: Job, first_ns: int, last_ns: int) -> int:
    """How many steps."""
    return sum(first_ns < e["time_unix_ns"] < last_ns for e in job.of_kind("step_committed"))


@pytest.mark.parametrize(
    ("how", "local", "secured"),
    [
        pytest.param("kill", False, True, marks=pytest.mark.longer),
        ("kill", True, False),
        pytest.param("crash", True, False, marks=pytest.mark.longer),
    ],
)
def test_the_host_that_leads_is_lost(led_jobs: LedJobs, how: str, local: bool, secured: bool) -> None:
    """local: it runs workers, too; else nothing has to be decided, and training goes on meanwhile. secured: etcd is
    spoken to over TLS, with certificates."""
    workers = 6 if local else 4
    job = led_jobs.led(*([] if local else ["--no-local-workers"]), workers=workers, secured=secured)
    heirs = [led_jobs.standby(2), led_jobs.standby(3)]
    job.wait_for("generation_started", lambda e: len(e["workers"]) == workers)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    struck_ns = now_ns()
    getattr(led_jobs.net.hosts[0], how)()
    taken = heirs[0].wait_for("coordinator_restarted", lambda e: e["time_unix_ns"] > struck_ns)
    assert taken["host"] in [host.address for host in led_jobs.net.hosts[1:]]
    after_s = (taken["time_unix_ns"] - struck_ns) / 1e9
    assert after_s < LEASE_S + 8.0, f"{after_s:.2f} s\n{heirs[0].account()}"  # on a busy machine
    for heir in heirs:
        led_jobs.check(heir)
    if local:
        assert {e["cause"] for e in heirs[0].of_kind("worker_evicted")} <= {"silent", "host_lost", "link"}
    else:
        assert not heirs[0].of_kind("worker_evicted")
        assert committed_between(heirs[0], struck_ns, taken["time_unix_ns"]), heirs[0].account()
        assert not regrouped(heirs[0], struck_ns), heirs[0].account()
    said = [led_jobs.said(2), led_jobs.said(3)]
    assert sum("leads the job" in words for words in said) == 1, said
    print(f"taken over after {after_s:.2f} s; longest gap between steps {gap_s(heirs[0], struck_ns):.2f} s")


@pytest.mark.longer
def test_the_host_that_leads_is_cut_off_and_comes_back(led_jobs: LedJobs) -> None:
    """It decides nothing any more, and is one that stands by when it can be reached again."""
    back: list[Event] = [*TAKEN, {"kind": "generation_started", "workers": list(range(6)), "count": 2}]
    job = led_jobs.led(workers=6, until=back, steps=80)
    heirs = [led_jobs.standby(2), led_jobs.standby(3)]
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    led_jobs.net.hosts[0].cut()
    job.wait_for("coordinator_restarted")
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    led_jobs.net.hosts[0].heal()
    for one in (job, *heirs):
        led_jobs.check(one)


@pytest.mark.longer
def test_cells_outlive_the_host_that_leads(led_jobs: LedJobs) -> None:
    """One of them was made smaller before: the new coordinator knows that from the journal."""
    chaos = "kill:target=worker:1/1,at=3,phase=forward"
    settings = {"cell.fsdp": 2, "max_restarts": 0}
    job = led_jobs.led("--no-local-workers", "--chaos", chaos, workers=2, settings=settings)
    heirs = [led_jobs.standby(2), led_jobs.standby(3)]
    shrunk = job.wait_for("cell_shrunk")
    job.wait_for("worker_joined", lambda e: e["worker_id"] == 1 and "pids" not in e)
    job.wait_for("step_committed", lambda e: e["step"] > shrunk["step"] + 1)
    led_jobs.net.hosts[0].kill()
    heirs[0].wait_for("coordinator_restarted")
    for heir in heirs:
        led_jobs.check(heir)
    told = looked_at(heirs[0].run_dir, "status")
    assert [len(worker["cell"]) for worker in told["workers"]] == [2, 1], told["workers"]


@pytest.mark.longer
@pytest.mark.parametrize("how", ["kill", "cut"])
@pytest.mark.parametrize("local", [True, False])
def test_a_worker_over_two_hosts_outlives_the_host_that_leads(led_jobs: LedJobs, how: str, local: bool) -> None:
    """local: that has the worker's head, too, and the worker begins again over the two that are left, from a
    checkpoint; else the worker goes on, and a process of it that dies later ends it, as the new coordinator knows
    its parts."""
    settings = {"cell.fsdp": 4, "cell.hosts": 2, "checkpoint.disk.every_steps": 3}
    options = [] if local else ["--no-local-workers"]
    job = led_jobs.led(*options, workers=1, steps=60, settings=settings, until=[], lane_s=0.3)
    heirs = [led_jobs.standby(2), led_jobs.standby(3)]
    first = job.wait_for("worker_joined", worker_id=0)
    assert ("host1" in first["hosts"]) == local, job.account()
    job.wait_for("step_committed", lambda e: e["step"] >= 4)
    getattr(led_jobs.net.hosts[0], how)()
    taken = heirs[0].wait_for("coordinator_restarted")
    if not local:
        later = heirs[0].wait_for("step_committed", lambda e: e["time_unix_ns"] > taken["time_unix_ns"])
        heirs[0].wait_for("step_committed", lambda e: e["step"] > later["step"] + 1)
        assert not heirs[0].of_kind("worker_evicted"), heirs[0].account()
        os.kill(max(lives(led_jobs.net.hosts[2])), signal.SIGKILL)  # the fork server began before its children
    heirs[0].wait_for("worker_joined", lambda e: e["time_unix_ns"] > taken["time_unix_ns"])
    led_jobs.go()
    for heir in heirs:
        led_jobs.check(heir)
    joined = heirs[0].of_kind("worker_joined")
    assert [e["worker_id"] for e in joined] == [0, 0], heirs[0].account()
    assert sorted({*joined[-1]["hosts"]}) == ["host2", "host3"], heirs[0].account()


@pytest.mark.longer
def test_a_person_takes_over(led_jobs: LedJobs) -> None:
    """Without etcd; and not as long as there is somebody to take over from."""
    job = led_jobs.head("--no-local-workers", workers=4, until=TAKEN)
    agents = [led_jobs.agent(2, "--run-dir", str(job.run_dir)), led_jobs.agent(3)]
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    assert led_jobs.takeover(2).wait(120) == 2
    assert "a job is still running" in led_jobs.said(2)
    led_jobs.net.hosts[0].kill()
    process = led_jobs.takeover(3)
    led_jobs.check(_Head(job.run_dir, "takeover", process))
    assert [agent.wait(120) for agent in agents] == [0, 0]
    assert not job.of_kind("worker_evicted")


@pytest.mark.longer
def test_a_host_that_does_not_see_the_directory_takes_over(led_apart: LedJobs) -> None:
    """It has a directory of its own, and what it lacks others bring once more. All that listens on it does so at ports
    that a firewall lets through."""
    ports = {"network.ports": "29500-29509"}
    job = led_apart.led(workers=6, settings={"checkpoint.disk.every_steps": 4, **ports}, lane_s=0.2)
    heirs = {number: led_apart.standby(number) for number in (2, 3)}
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    step = max((e["step"] for e in job.of_kind("step_committed")), default=0)
    job.wait_for("step_committed", lambda e: e["step"] >= step + 5)
    struck_ns = now_ns()
    led_apart.net.hosts[0].kill()
    number = leader(led_apart, heirs)
    heir = heirs[number]
    taken = heir.wait_for("coordinator_restarted")
    heir.wait_for("step_committed", lambda e: e["time_unix_ns"] > taken["time_unix_ns"])
    assert looked_at(heir.run_dir, "status")["state"] in ("running", "recovering")
    places = json.loads((heir.run_dir / "host" / "hosts.json").read_text())
    found = [read_address(heir.run_dir / "coordinator.json").port]
    found += [int(place["address"].rpartition(":")[2]) for place in places.values() if place["address"]]
    assert len(found) > 1 and all(29500 <= port <= 29509 for port in found), found
    led_apart.go()
    led_apart.check(heir)
    assert heirs[5 - number].end() == 0, led_apart.said(5 - number)
    assert looked_at(heir.run_dir, "ledger")["complete"] is True
    assert looked_at(heir.run_dir, "status")["state"] == "completed"
    done = subprocess.run([*EVERSTEP, "report", str(heir.run_dir)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = [e["kind"] for e in heir.events]
    assert kinds.count("job_started") == kinds.count("job_completed") == kinds.count("coordinator_restarted") == 1
    print(f"taken over after {(taken['time_unix_ns'] - struck_ns) / 1e9:.2f} s")


@pytest.mark.longer
def test_a_host_that_knows_the_lost_head_alone_hears_of_the_next_one(led_apart: LedJobs) -> None:
    """It was told no other address, does not speak with etcd, and nothing answers it where the head was; but the other
    hosts know the next head. Its workers stay members."""
    job = led_apart.led("--no-local-workers", workers=4, lane_s=0.3)
    heir, agent = led_apart.standby(2), led_apart.agent(3)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    job.wait_for("step_committed", lambda e: e["step"] >= 3)
    led_apart.net.hosts[2].drop_to(led_apart.net.hosts[0])
    struck_ns = now_ns()
    job.kill()
    taken = heir.wait_for("coordinator_restarted", lambda e: e["time_unix_ns"] > struck_ns)
    heir.wait_for("step_committed", lambda e: e["time_unix_ns"] > taken["time_unix_ns"] + 5 * 10**9)
    led_apart.go()
    led_apart.check(heir)
    assert agent.wait(120) == 0, led_apart.said(3)
    assert not heir.of_kind("worker_evicted"), heir.account()
    assert not regrouped(heir, struck_ns), heir.account()


@pytest.mark.longer
def test_hosts_that_lead_are_lost_one_after_the_other_and_come_back(led_apart: LedJobs) -> None:
    """The first comes back with a directory that is of before, which is set aside. Their members of etcd go on."""
    job = led_apart.led(workers=6, settings={"checkpoint.disk.every_steps": 4}, lane_s=0.5)
    heirs = {number: led_apart.standby(number) for number in (2, 3)}
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    job.wait_for("step_committed", lambda e: e["step"] >= 5)
    job.kill()
    second = leader(led_apart, heirs)
    less = heirs[second].wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    back = led_apart.standby(1, job.run_dir)
    whole = lambda e: e["generation"] > less["generation"] and len(e["workers"]) == 6  # noqa: E731
    again = heirs[second].wait_for("generation_started", whole)
    heirs[second].wait_for("step_committed", lambda e: e["generation"] >= again["generation"])
    assert "from an earlier time of this job" in led_apart.said(1)
    assert (job.run_dir / "previous-1" / "events.jsonl").is_file()
    heirs[second].kill()
    left = {1: back, 5 - second: heirs[5 - second]}
    third = leader(led_apart, left)
    led_apart.go()
    led_apart.check(left.pop(third))
    assert [heir.end() for heir in left.values()] == [0]


@pytest.mark.longer
def test_a_host_that_was_cut_off_sets_aside_what_is_of_before_and_takes_part_again(led_apart: LedJobs) -> None:
    """By itself: it becomes one that stands by, and leads again when the one that took over is lost."""
    job = led_apart.led(workers=6, lane_s=0.6, steps=120)  # on a busy machine a host needs a minute to come back
    heirs: dict[int, Job] = {number: led_apart.standby(number) for number in (2, 3)}
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    job.wait_for("step_committed", lambda e: e["step"] >= 3)
    led_apart.net.hosts[0].cut()
    number = leader(led_apart, heirs)
    less = heirs[number].wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    led_apart.net.hosts[0].heal()
    job.wait_for_words("another host leads the job")
    job.wait_for_words("stands by for the job in")
    heirs[number].wait_for(
        "generation_started", lambda e: e["generation"] > less["generation"] and len(e["workers"]) == 6
    )
    assert (job.run_dir / "previous-1" / "events.jsonl").is_file()
    led_apart.go()
    led_apart.check(heirs[number])
    assert [job.end(), heirs[5 - number].end()] == [0, 0], job.account()


def lives(host: Host) -> set[int]:
    """Processes of a host that are workers, or their fork server."""
    found = set()
    for pid in host.pids():
        with contextlib.suppress(OSError):
            if b"everstep.runtime.host.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.add(pid)
    return found


@pytest.mark.longer
@pytest.mark.parametrize("apart", [True, False])
def test_a_host_that_is_cut_off_from_etcd_alone_keeps_its_workers(
    net: Net, jobs: Jobs, tmp_path: Path, apart: bool
) -> None:
    """Its workers hear of the next head from the other hosts, which they reach, or read in the shared directory where
    it is, and outlive that their host becomes one that stands by."""
    with led(net, jobs, tmp_path, apart=apart) as found:
        job = found.led(workers=6, lane_s=0.3, steps=120, away=True, until=[])
        heirs: dict[int, Job] = {number: found.standby(number) for number in (2, 3)}
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
        job.wait_for("step_committed", lambda e: e["step"] >= 3)
        first, before = net.hosts[0], lives(net.hosts[0])
        members = [address.rpartition(":")[0] for address in (found.etcd.addresses if found.etcd else [])]
        struck_ns = now_ns()
        for address in members:
            first.drop_to(address)
        number = leader(found, heirs)
        taken = heirs[number].wait_for("coordinator_restarted")
        heirs[number].wait_for("step_committed", lambda e: e["time_unix_ns"] > taken["time_unix_ns"] + 12 * 10**9)
        for address in members:
            first.undrop_to(address)
        if apart:
            job.wait_for_words("another host leads the job")
            job.wait_for_words("stands by for the job in")
        assert len(before) > SLOTS and lives(first) == before  # and the fork server
        found.go()
        found.check(heirs[number])
        assert [job.end(), heirs[5 - number].end()] == [0, 0], job.account()
        assert not regrouped(heirs[number], struck_ns), heirs[number].account()
        assert not heirs[number].of_kind("worker_evicted"), heirs[number].account()
        assert apart or not list(job.run_dir.glob("previous-*"))


@pytest.mark.longer
def test_a_host_that_etcd_does_not_answer_until_the_end_tells_no_end_of_its_own(led_apart: LedJobs) -> None:
    """It takes part in a job that another host leads, and hears of that from this one alone: rows and weights are
    there."""
    job = led_apart.led(workers=6, lane_s=0.3, steps=60, away=True)
    heirs: dict[int, Job] = {number: led_apart.standby(number) for number in (2, 3)}
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 6)
    job.wait_for("step_committed", lambda e: e["step"] >= 3)
    for address in led_apart.etcd.addresses if led_apart.etcd else []:
        led_apart.net.hosts[0].drop_to(address.rpartition(":")[0])
    number = leader(led_apart, heirs)
    job.wait_for_words("another host leads the job, in a directory of its own: its steps are not shown here")
    led_apart.go()
    led_apart.check(heirs[number])
    assert [job.end(), heirs[5 - number].end()] == [0, 0], job.account()
    job.wait_for_words("the job has ended on another host")
    assert not job.of_kind("job_completed") and "lacks the rows" not in job.account()
