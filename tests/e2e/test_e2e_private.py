"""What a job holds is for its owner alone: modes of all that it writes, another user of the host, pages and metrics."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cli import LIMIT_S, Running, environment, everstep

pytest.importorskip("prometheus_client", reason="the extra [dashboard] is not installed")
pytest.importorskip("uvicorn", reason="the extra [dashboard] is not installed")

NOBODY = 65534
SINKS = "[tensorboard]" if importlib.util.find_spec("tensorboard") else "[]"
STRANGER = """
import encodings.idna, fcntl, json, os, sys, urllib.error, urllib.request
paths, addresses, nobody = json.loads(sys.argv[1])
if nobody:
    os.setgroups([]); os.setgid(nobody); os.setuid(nobody)
got = []
for path in paths:
    try:
        fd = os.open(path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except PermissionError:
        continue
    except OSError as error:
        got.append(f"{path}: {error}")
        continue
    got.append(path)
for address in addresses:
    try:
        got.append(f"{address}: {urllib.request.urlopen(address, timeout=60).status}")
    except urllib.error.HTTPError as error:
        if error.code != 401:
            got.append(f"{address}: {error}")
print(json.dumps(got))
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that every user can enter, and a umask that closes nothing."""
    before = os.umask(0)
    with tempfile.TemporaryDirectory(prefix="everstep-private-") as name:
        os.chmod(name, 0o777)
        yield Path(name)
    os.umask(before)


def wide(top: Path) -> list[str]:
    """All that others may do anything with; the modes of what is closed are exact."""
    found = []
    for path in [top, *top.rglob("*")]:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue  # the job goes on
        if stat.S_IMODE(mode) != (0o700 if stat.S_ISDIR(mode) else 0o600):
            found.append(f"{path}: {stat.filemode(mode)}")
    return found


def processes(pid: int) -> list[int]:
    """A process and all below it that go on."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                found += processes(int(child))
    return found


def held_open(pids: list[int]) -> tuple[set[str], set[str]]:
    """Files with names that these processes write to, and the names of their unix sockets."""
    files, inodes = set(), set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target, info = os.readlink(fd), Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text()
            except FileNotFoundError:
                continue
            inodes |= set(re.findall(r"socket:\[(\d+)\]", target))
            flags = int(info.split("flags:")[1].split()[0], 8)
            if flags & os.O_ACCMODE != os.O_RDONLY and target.startswith("/") and os.path.isfile(target):
                files.add(target)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[1].startswith("rw-s") and os.path.isfile(fields[5]):
                files.add(fields[5])
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return files, {row[7] for row in table if len(row) > 7 and row[6] in inodes}


def strangers_take(paths: list[str], addresses: list[str], nobody: int) -> list[str]:
    argument = json.dumps([paths, addresses, nobody])
    command = [sys.executable, "-c", STRANGER, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    took: list[str] = json.loads(done.stdout)
    return took


def read(address: str, token: str = "") -> int:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


def said(job: Running, what: str) -> str:
    """The address that `run` printed for what it serves."""
    (found,) = re.findall(rf"^{what} (http://\S+)", "".join(job.errors), re.MULTILINE)
    return str(found)


def test_a_job_is_its_owners_alone(base: Path, small_task: str) -> None:
    run_dir, hold = base / "runs" / "mine", base / "hold"
    hold.touch()
    options = ["--workers", "2", "--run-dir", run_dir, "--steps", "40", "--dashboard", "--metrics"]
    for setting in ("checkpoint.disk.every_steps=2", "metrics.interval_s=0.1", "logs.max_mb=0.001", f"sinks={SINKS}"):
        options += ["--set", setting]
    with Running(small_task, *options, E2E_LANE_S="1", E2E_HOLD=str(hold)) as job:
        job.wait_for(lambda event: event["kind"] == "checkpoint_completed")
        page, metrics = said(job, "dashboard"), said(job, "metrics")
        assert wide(run_dir.parent) == []
        pids = processes(job.process.pid)
        files, sockets = held_open(pids)
        assert any(name.startswith(str(run_dir)) for name in files) and len(pids) > 5
        assert (wide_files(files), sockets) == ([], set())
        check_servers(run_dir, page, metrics)
        paths = [*map(str, [run_dir, *run_dir.rglob("*")]), *(f"/proc/{pid}/fd" for pid in pids)]
        addresses = [f"{page.partition('?')[0]}{path}" for path in ("", "api/stream", "metrics")]
        addresses.append(metrics.partition("?")[0])
        if os.geteuid() == 0:
            assert strangers_take(paths, addresses, NOBODY) == []
        took = strangers_take([str(run_dir / "lock")], addresses, 0)  # who owns it, without the token
        assert took == [str(run_dir / "lock")]
        hold.unlink()
        code, _, errors = job.end()
        assert code == 0 and f"to look again: everstep dashboard {run_dir}" in errors, errors
    assert wide(run_dir.parent) == []


def wide_files(names: set[str]) -> list[str]:
    """Those that others may open."""
    return [name for name in names if os.stat(name).st_mode & 0o077]


def check_servers(run_dir: Path, page: str, metrics: str) -> None:
    """Each wants its token, which it printed; that of the metrics lies in the run directory."""
    for address in (page, metrics):
        bare, _, token = address.partition("?token=")
        assert (read(bare), read(bare, token), read(bare, token + "x")) == (401, 200, 401)
    assert metrics.endswith(f"/metrics?token={(run_dir / 'metrics-token').read_text()}")
    assert read(metrics) == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_the_stranger_takes_what_is_open(base: Path) -> None:
    (base / "open").touch()
    (base / "closed").touch(0o600)
    paths = [str(base / "open"), str(base / "closed")]
    assert strangers_take(paths, [], NOBODY) == paths[:1]


@pytest.mark.longer
def test_what_is_made_of_a_job_is_closed_and_an_old_one_is_closed_again(base: Path, small_task: str) -> None:
    run_dir, other = base / "job", base / "other"
    done = everstep("run", small_task, "--run-dir", run_dir, "--steps", "2")
    assert done.returncode == 0, done.stderr
    for argv in (["report", run_dir], ["checkpoints", "export", run_dir, "--format", "dcp", "--to", other / "model"]):
        done = everstep(*argv)
        assert done.returncode == 0, done.stderr
    assert (wide(run_dir), wide(other)) == ([], [])
    for path in [run_dir, *run_dir.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    with open(run_dir / "lock", "rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        again = everstep("run", small_task, "--run-dir", run_dir, "--steps", "2")
    assert (again.returncode, "has finished" in again.stdout) == (0, True), again.stderr
    assert wide(run_dir) == []


@pytest.mark.longer
def test_a_script_by_itself_writes_privately(base: Path) -> None:
    script = base / "train.py"
    script.write_text(
        "import torch, everstep\n"
        "model = torch.nn.Linear(2, 1)\n"
        "data = [(torch.ones(2), torch.ones(1))] * 8\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in everstep.join(model, optimizer, data, lanes=2, micro_batch=2, steps=2, run_dir='run'):\n"
        "    for x, y in step:\n"
        "        step.backward(torch.nn.functional.mse_loss(model(x), y))\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=base, env=environment())
    assert done.returncode == 0, done.stderr
    assert (base / "run" / "final" / "model.safetensors").exists()
    assert wide(base / "run") == []
