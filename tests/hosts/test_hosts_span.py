"""A worker whose processes are on two hosts, each of which holds a part of the state: the bits of one process."""

from __future__ import annotations

from hosts_harness import HostJobs

SPANS = {"cell.fsdp": 4, "cell.hosts": 2, "hosts.min": 2}


def test_two_processes_on_each_of_two_hosts(on_hosts: HostJobs) -> None:
    job = on_hosts.head("--slots", "1", workers=1, settings=SPANS)
    on_hosts.agent(2, "--slots", "1")
    on_hosts.check(job)
