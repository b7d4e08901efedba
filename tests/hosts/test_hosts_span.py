"""A worker whose processes are on two hosts, each of which holds a part of the state: the bits of one process."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hosts_harness import HostJobs
from net import Host

from everstep.base.readable import readable
from job_harness import Event

STEPS = 12
SPANS = {"cell.fsdp": 4, "cell.hosts": 2, "hosts.min": 2}


def workers_of(host: Host) -> list[int]:
    """Pids of the processes that a host's fork server has made, as this machine calls them."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in map(int, host.pids())}
    servers = {pid for pid, said in words.items() if b"everstep.runtime.host.fork_server" in said}
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in servers}
    return sorted(pid for pid in servers if parents[pid] in servers)


def shared_bytes(host: Host) -> int:
    """Memory that the processes of a host's part have together, as the kernel counts it."""
    found: dict[int, int] = {}
    for pid in workers_of(host):
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if "everstep-cell" in os.readlink(fd):
                    about = os.stat(fd)
                    found[about.st_ino] = about.st_blocks * 512
    return sum(found.values())


def joined(count: int) -> list[Event]:
    """A pace: take time until worker 0 has joined so often."""
    return [{"kind": "worker_joined", "worker_id": 0, "count": count}]


def test_a_limb_that_dies_on_the_other_host_ends_its_worker(on_hosts: HostJobs) -> None:
    """Alone, it begins again from the newest checkpoint."""
    settings = {**SPANS, "checkpoint.disk.every_steps": 3}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, until=joined(2))
    on_hosts.agent(2, "--slots", "1")
    job.wait_for("step_committed", step=4)
    os.kill(workers_of(on_hosts.net.hosts[1])[-1], signal.SIGKILL)
    lost = job.wait_for("worker_evicted", worker_id=0)
    assert "its part on host host2 (slot 1) was lost: its rank 1 was killed by SIGKILL" in lost["reason"], job.account()
    on_hosts.check(job)


@pytest.mark.longer
def test_a_host_that_is_lost_is_replaced_by_another_while_a_second_worker_goes_on(on_hosts: HostJobs) -> None:
    healed = [{"kind": "worker_healed", "count": 1}]
    settings = {"cell.fsdp": 2, "cell.hosts": 2, "hosts.min": 3}
    job = on_hosts.head("--slots", "2", workers=2, steps=STEPS, settings=settings, until=healed)
    on_hosts.agent(2, "--slots", "1")
    on_hosts.agent(3, "--slots", "1")
    job.wait_for("step_committed", step=4)
    on_hosts.net.hosts[1].kill()
    job.wait_for("worker_evicted")
    on_hosts.agent(2, "--slots", "1")
    on_hosts.check(job)
    assert len(job.of_kind("worker_evicted")) == 1, job.account()


@pytest.mark.longer
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_an_idle_host_takes_the_place_of_a_lost_one_before_a_worker_gets_fewer(on_hosts: HostJobs, how: str) -> None:
    settings = {**SPANS, "hosts.min": 3, "on_failure": "shrink", "checkpoint.disk.every_steps": 3}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, until=joined(2))
    on_hosts.agent(2, "--slots", "1")
    on_hosts.agent(3, "--slots", "1")
    first = job.wait_for("worker_joined", worker_id=0)
    lost = next(host for host in on_hosts.net.hosts[1:] if host.name in first["hosts"])
    job.wait_for("step_committed", step=4)
    getattr(lost, how)()
    on_hosts.check(job)
    again = job.of_kind("worker_joined")[-1]
    idle = next(host.name for host in on_hosts.net.hosts[1:] if host is not lost)
    assert again["hosts"] == [first["hosts"][0]] * 2 + [idle] * 2, job.account()
    assert not job.of_kind("cell_shrunk"), job.account()


@pytest.mark.longer
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_the_host_of_a_workers_head_is_lost_where_another_one_leads(on_hosts: HostJobs, how: str) -> None:
    # One that is cut off with all of the state is waited for as long, unless the other part hangs before that.
    settings = {**SPANS, "hosts.min": 2, "checkpoint.disk.every_steps": 3, "quorum_wait_s": 25}
    job = on_hosts.head("--no-local-workers", workers=1, steps=STEPS, settings=settings, until=joined(2))
    on_hosts.agent(2, "--slots", "1")
    on_hosts.agent(3, "--slots", "1")
    first = job.wait_for("worker_joined", worker_id=0)
    on_hosts.agent(1, "--slots", "1", "--host-name", "other")
    job.wait_for("step_committed", step=4)
    lost = next(host for host in on_hosts.net.hosts if host.name == first["hosts"][0])
    getattr(lost, how)()
    on_hosts.check(job)
    again = job.of_kind("worker_joined")[-1]
    assert sorted({*again["hosts"]}) == sorted(({*first["hosts"]} - {first["hosts"][0]}) | {"other"}), job.account()
    assert not job.of_kind("cell_shrunk"), job.account()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("each", "hosts", "settings"),
    [(1, 2, {"on_failure": "shrink"}), (2, 2, {"quorum_wait_s": 25}), (1, 3, {"on_failure": "shrink"})],
)
def test_a_worker_whose_host_is_not_replaced_goes_on_with_the_hosts_that_are_left(
    on_hosts: HostJobs, each: int, hosts: int, settings: dict[str, Any]
) -> None:
    """By on_failure at once, else before the job would be given up."""
    spans = {"cell.fsdp": each * hosts, "cell.hosts": hosts, "hosts.min": hosts, "checkpoint.disk.every_steps": 3}
    settings = {**spans, **settings}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, until=[{"kind": "cell_shrunk"}])
    for number in range(2, hosts + 1):
        on_hosts.agent(number, "--slots", "1")
    job.wait_for("step_committed", step=4)
    on_hosts.net.hosts[hosts - 1].kill()
    shrunk = job.wait_for("cell_shrunk")
    on_hosts.check(job)
    assert (shrunk["worker_id"], shrunk["ranks"]) == (0, each * (hosts - 1)), job.account()
    assert f"{hosts - 1} of the {hosts} hosts that each worker has are left" in shrunk["reason"], job.account()
    sizes = [len(e.get("pids", [0])) for e in job.of_kind("worker_joined")]
    assert sizes == [each * hosts, each * (hosts - 1)], job.account()


@pytest.mark.longer
def test_a_part_that_ends_with_another_is_no_restart(on_hosts: HostJobs) -> None:
    """The slot of the one that died is given up, and no other."""
    settings = {**SPANS, "max_restarts": 0, "checkpoint.disk.every_steps": 3}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, until=[{"kind": "cell_shrunk"}])
    on_hosts.agent(2, "--slots", "1")
    job.wait_for("step_committed", step=4)
    os.kill(workers_of(on_hosts.net.hosts[1])[-1], signal.SIGKILL)
    assert job.wait_for("cell_shrunk")["ranks"] == 2
    on_hosts.check(job)


@pytest.mark.longer
def test_lanes_that_the_hosts_do_not_divide(on_hosts: HostJobs) -> None:
    """Those that compute in a last round which is not full take over what the others have added up."""
    settings = {"cell.fsdp": 3, "cell.hosts": 3, "hosts.min": 3}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings)
    on_hosts.agent(2, "--slots", "1")
    on_hosts.agent(3, "--slots", "1")
    on_hosts.check(job)


@pytest.mark.longer
def test_the_head_of_a_worker_with_two_stages(on_hosts: HostJobs) -> None:
    chaos = "kill:target=worker:0,at=5,phase=backward"
    settings = {**SPANS, "stages": 2, "workers": 2}
    healed = [{"kind": "worker_healed", "count": 1}]
    job = on_hosts.head("--slots", "2", "--chaos", chaos, workers=2, steps=STEPS, settings=settings, until=healed)
    on_hosts.agent(2, "--slots", "2")
    on_hosts.check(job)


@pytest.mark.longer
@pytest.mark.parametrize("reshard", [True, False])
def test_batch_norm_and_evaluation(on_hosts: HostJobs, *, reshard: bool) -> None:
    settings = {**SPANS, "cell.reshard_after_forward": reshard, "verify_every": 3, "eval_every": 4}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, task="Pictures")
    on_hosts.agent(2, "--slots", "1")
    on_hosts.check(job)


@pytest.mark.longer
def test_narrow_copies_of_what_comes_from_the_other_host(on_hosts: HostJobs) -> None:
    narrow = {"cell.precision": "parameters=bf16,reduction=bf16,buffers=bf16"}
    settings = {**SPANS, **narrow}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, task="Pictures")
    on_hosts.agent(2, "--slots", "1")
    on_hosts.jobs.check(job, "Pictures", {"steps": STEPS, **narrow})


@pytest.mark.longer
def test_a_last_round_that_only_one_host_computes(on_hosts: HostJobs) -> None:
    """It adds to what both have made in the first one."""
    settings = {**SPANS, "lanes": 6}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, task="Matrices")
    on_hosts.agent(2, "--slots", "1")
    on_hosts.jobs.check(job, "Matrices", {"steps": STEPS, "lanes": 6})


@pytest.mark.longer
def test_shards_are_computed_within_each_host(on_hosts: HostJobs) -> None:
    settings = {"cell.fsdp": 2, "cell.tp": 2, "cell.hosts": 2, "hosts.min": 2}
    job = on_hosts.head("--slots", "1", workers=1, steps=STEPS, settings=settings, task="Sharded")
    on_hosts.agent(2, "--slots", "1")
    on_hosts.jobs.check(job, "Sharded", {"steps": STEPS, "cell.shards": 2})


@pytest.mark.longer
def test_a_coordinator_that_dies_knows_the_parts_again(on_hosts: HostJobs) -> None:
    """And a limb that stands still on the other host is noticed."""
    chaos = "kill:target=coordinator,at=3"
    settings = {**SPANS, "hang_limit_s": 3, "checkpoint.disk.every_steps": 3}
    job = on_hosts.head("--slots", "1", "--chaos", chaos, workers=1, steps=STEPS, settings=settings, until=joined(2))
    on_hosts.agent(2, "--slots", "1")
    job.wait_for("coordinator_restarted")
    job.wait_for("step_committed", step=6)
    os.kill(workers_of(on_hosts.net.hosts[1])[-1], signal.SIGSTOP)
    lost = job.wait_for("worker_evicted", worker_id=0)
    assert lost["cause"] == "hung" and "its part on host host2" in lost["reason"], job.account()
    on_hosts.check(job)


@pytest.mark.longer
def test_no_host_holds_the_model(on_hosts: HostJobs) -> None:
    """One host would have parameters, twice as much of the optimizer's, a step's sums, and eight boxes of a unit. The
    parameters are made on both, module by module."""
    settings = {**SPANS, "meta_init": True}
    job = on_hosts.head("--slots", "1", workers=1, steps=6, settings=settings, task="Matrices")
    on_hosts.agent(2, "--slots", "1")
    job.wait_for("step_committed", step=1)
    most = [0, 0]
    while not job.of_kind("step_committed") or job.of_kind("step_committed")[-1]["step"] < 5:
        most = [max(before, shared_bytes(host)) for before, host in zip(most, on_hosts.net.hosts, strict=False)]
        readable([], 0.02)
    on_hosts.jobs.check(job, "Matrices", {"steps": 6, "meta_init": True})
    whole = 4 * 4 * (64 * 512 + 12 * 512 * 512) + 8 * 4 * 512 * 512
    assert most[0] < 0.8 * whole and most[1] < 0.7 * whole, [one / whole for one in most]
