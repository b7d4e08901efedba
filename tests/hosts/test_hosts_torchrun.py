"""torchrun on two hosts: what it starts there becomes one job with an agent on the second."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from hosts_harness import PORT
from net import Net

from engines_harness import hold, places, reference, write_script
from job_harness import LIMIT_S, Job, same


@pytest.fixture
def named(net: Net) -> Iterator[Net]:
    """Hosts that can resolve their names, as torchrun wants."""
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in net.hosts)]
    folders = [Path("/etc/netns", host.namespace) for host in net.hosts]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")
    yield net
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.longer
def test_torchrun_on_two_hosts_is_one_job(named: Net, tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", write_script(tmp_path)
    alone, held = reference(tmp_path, script), hold(run_dir)
    environment = {"EVERSTEP_TOKEN": secrets.token_hex(32)}
    first, second = named.hosts[:2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--max-restarts", "0", "--master-addr", first.address, "--master-port", str(PORT)]
    log = run_dir.with_suffix(".err")
    others = second.start([*command, "--node-rank", "1", str(script), str(run_dir)], tmp_path / "second", environment)
    head = first.start([*command, "--node-rank", "0", str(script), str(run_dir)], log, environment)
    job = Job(run_dir, "torchrun on two hosts", head.pid)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 4)
    where = [e["host"] for e in job.of_kind("worker_joined")]
    assert sorted(where) == [first.address] * 2 + [f"{second.name}-2"] * 2
    victim = next(e for e in job.of_kind("worker_joined") if e["host"] != first.address)
    inject = ("-P", "-m", "everstep", "chaos", "inject", str(run_dir), f"kill:target=worker:{victim['worker_id']}")
    asked = first.run(sys.executable, *inject)
    assert asked.returncode == 0, asked.stderr
    job.wait_for("worker_healed", worker_id=victim["worker_id"])
    held.unlink()
    assert job.over(LIMIT_S), job.account()
    assert (head.wait(), others.wait(LIMIT_S)) == (0, 0), (tmp_path / "second").read_text() + job.account()
    same(alone, job)
    assert [place["GROUP_RANK"] for place in places(run_dir)] == ["0", "0", "1", "1"]
    (address,) = {place["MASTER_ADDR"] for place in places(run_dir)}
    rank0 = next(e["host"] for e in job.of_kind("worker_joined") if e["worker_id"] == 0)
    assert address == (first.address if rank0 == first.address else second.address)


@pytest.mark.longer
def test_a_launcher_that_names_an_address_alone(net: Net, tmp_path: Path) -> None:
    """One process per host, told what most launchers tell; the port is derived, and tried."""
    run_dir, script = tmp_path / "run", write_script(tmp_path)
    alone = reference(tmp_path, script)
    first, second = net.hosts[:2]
    processes = []
    for rank, host in ((1, second), (0, first)):
        numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        environment = {name: str(number) for name, number in numbers.items()}
        environment |= {"EVERSTEP_TOKEN": sha256(b"ab").hexdigest(), "MASTER_ADDR": first.address}
        log = run_dir.with_suffix(".err") if rank == 0 else tmp_path / "second"
        processes.append(host.start([sys.executable, str(script), str(run_dir)], log, environment))
    job = Job(run_dir, "two processes", processes[1].pid)
    assert job.over(LIMIT_S), job.account()
    assert [process.wait(LIMIT_S) for process in processes] == [0, 0], (tmp_path / "second").read_text() + job.account()
    same(alone, job)
    assert {e["host"] for e in job.of_kind("worker_joined")} == {first.address, f"{second.name}-1"}
