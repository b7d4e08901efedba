"""Scripts that the launchers of Accelerate and DeepSpeed start are one job, on one host and on two, or refused."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from net import Net

from engines_harness import Launched, check, clean, hold, places
from job_harness import LIMIT_S, Job, same

PACKAGES = Path(sys.prefix) / "engines"
PORT = "29400"
ENVIRONMENT = {"PYTHONPATH": str(PACKAGES), "ACCELERATE_DISABLE_RICH": "1", "EVERSTEP_TOKEN": secrets.token_hex(32)}
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--dynamo_backend", "no"]
DEEPSPEED = [sys.executable, str(PACKAGES / "bin" / "deepspeed"), "--master_port", PORT]
pytestmark = [
    pytest.mark.longer,
    pytest.mark.skipif(
        not all((PACKAGES / name).is_dir() for name in ("accelerate", "deepspeed")),
        reason="needs accelerate and deepspeed (tests/install_engines.sh)",
    ),
]


@pytest.fixture
def parsing(script: Path, tmp_path: Path) -> Path:
    """The same script, whose workers take what DeepSpeed says to each of its processes for a mistake."""
    parser = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("run_dir")
args = parser.parse_args()
assert (args.local_rank < 0) == ("EVERSTEP_WORKER" in os.environ), args
run_dir, hold"""
    text = script.read_text()
    assert "\nrun_dir, hold" in text
    own = text.replace("\nrun_dir, hold", parser).replace(
        "= sys.argv[1], sys.argv[1] +", "= args.run_dir, args.run_dir +"
    )
    path = tmp_path / "parsing.py"
    path.write_text(own)
    return path


def on_two_hosts(net: Net, tmp_path: Path, script: Path, commands: Sequence[Sequence[str]]) -> Job:
    """Start them, have the worker on the second host killed, and wait until all have ended well."""
    run_dir = tmp_path / "run"
    held = hold(run_dir)
    hosts = net.hosts[:2]
    logs = [run_dir.with_suffix(".err"), tmp_path / "second"]
    each = list(zip(hosts, commands, logs, strict=True))
    started = [host.start([*words, str(script), str(run_dir)], log, clean(ENVIRONMENT)) for host, words, log in each]
    job = Job(run_dir, " ".join(commands[0]), started[0].pid)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
    victim = next(e for e in job.of_kind("worker_joined") if e["host"] != hosts[0].address)
    inject = ("chaos", "inject", str(run_dir), f"kill:target=worker:{victim['worker_id']}")
    asked = hosts[0].run(sys.executable, "-P", "-m", "everstep", *inject)
    assert asked.returncode == 0, asked.stderr
    job.wait_for("worker_healed", worker_id=victim["worker_id"])
    held.unlink()
    assert job.over(LIMIT_S), job.account()
    assert [process.wait(LIMIT_S) for process in started] == [0, 0], logs[1].read_text() + job.account()
    return job


def on_one_host(run_dir: Path, alone: Path, command: list[str]) -> None:
    held = hold(run_dir)
    job = Launched(run_dir, command, ENVIRONMENT)
    try:
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
        job.wait_for("step_committed", step=1)
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.wait_for("worker_healed", worker_id=1)
        held.unlink()
        check(job, alone)
    finally:
        job.close()
    assert len(job.of_kind("job_started")) == 1 and len(places(run_dir)) == 2


def test_accelerate_on_one_host(tmp_path: Path, script: Path, alone: Path) -> None:
    own = ["--multi_gpu", "--num_machines", "1", "--num_processes", "2", "--main_process_port", "0"]
    on_one_host(tmp_path / "run", alone, [*ACCELERATE, *own, str(script), str(tmp_path / "run")])


def test_accelerate_on_two_hosts(net: Net, tmp_path: Path, script: Path, alone: Path) -> None:
    own = ["--multi_gpu", "--num_machines", "2", "--num_processes", "2"]
    own += ["--main_process_ip", net.hosts[0].address, "--main_process_port", PORT, "--machine_rank"]
    same(alone, on_two_hosts(net, tmp_path, script, [[*ACCELERATE, *own, str(rank)] for rank in range(2)]))


def test_accelerate_on_cpus_starts_one_process_that_refuses(tmp_path: Path, script: Path) -> None:
    """On each machine: they would be as many jobs."""
    command = [*ACCELERATE, "--cpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", "1"]
    command += ["--main_process_ip", "10.0.0.1", "--main_process_port", PORT, str(script), str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, env=clean(ENVIRONMENT))
    said = [line for line in ended.stderr.splitlines() if line.startswith("everstep.join: error:")]
    assert len(said) == 1 and "--multi_gpu" in said[0], ended.stderr
    assert ended.returncode and not (tmp_path / "run").exists()


def test_deepspeed_on_one_host(tmp_path: Path, parsing: Path, alone: Path) -> None:
    """It puts --local_rank=N before the script's own arguments; workers have none of that."""
    on_one_host(tmp_path / "run", alone, [*DEEPSPEED, "--num_gpus", "2", str(parsing), str(tmp_path / "run")])


def test_deepspeed_on_two_hosts(net: Net, tmp_path: Path, parsing: Path, alone: Path) -> None:
    first, second = (host.address for host in net.hosts[:2])
    (tmp_path / "hostfile").write_text(f"{first} slots=1\n{second} slots=1\n")
    own = ["--hostfile", str(tmp_path / "hostfile"), "--no_ssh", "--master_addr", first, "--node_rank"]
    same(alone, on_two_hosts(net, tmp_path, parsing, [[*DEEPSPEED, *own, str(rank)] for rank in range(2)]))
