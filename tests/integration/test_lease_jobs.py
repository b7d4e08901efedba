"""Jobs on one host whose lease and journal are in a real etcd, members of which are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from etcd_members import EtcdMembers, etcd_there
from everstep.base.etcd_address import EtcdAddress
from everstep.protocol.lease.requests import Load, Loaded
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.etcd_keys import JOURNAL
from everstep.runtime.link.address import COORDINATOR_FILE, read_address
from job_harness import HERE, Jobs, healed

EVERSTEP = (sys.executable, "-P", "-m", "everstep")
NUMERICS = {"steps": 12}


@pytest.fixture
def members() -> Iterator[EtcdMembers]:
    etcd_there()
    found = EtcdMembers()
    yield found
    found.close()


@pytest.mark.longer
def test_nothing_starts_without_a_quorum(members: EtcdMembers, tmp_path: Path) -> None:
    members.wait()
    for number in (0, 2):
        members.signal(number, signal.SIGKILL)
    task = [f"{HERE / 'job_tasks.py'}:Text", "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    run = [*EVERSTEP, "run", *task, "--set", f"control.etcd={members.url()}"]
    agent = [*EVERSTEP, "agent", "--join", members.url()]
    environment = {**os.environ, "EVERSTEP_TOKEN": sha256(b"ab").hexdigest()}
    for command in (run, agent, [*agent, "--standby"]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 4, done.stderr
        assert "etcd without a quorum: 2 of 3 members do not answer" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


@pytest.mark.longer
def test_a_second_job_is_refused_and_the_next_one_is_not(members: EtcdMembers, jobs: Jobs, tmp_path: Path) -> None:
    members.wait()
    lease = {"control.etcd": members.url()}
    environment = {"EVERSTEP_TOKEN": sha256(b"cd").hexdigest()}
    token = tmp_path / "token"
    token.write_text(sha256(b"cd").hexdigest())
    first = jobs.start(
        "Text",
        workers=2,
        numerics=NUMERICS,
        settings={**lease, "security.token_file": token},
        pace=[healed(1)],
        lane_s=1.5,
        environment=environment,
    )
    first.wait_for("step_committed")
    second = jobs.start("Text", workers=1, numerics=NUMERICS, settings={**lease, "security.token_file": token})
    assert second.end() == 2
    second.wait_for_words(f"a job is still running under {members.url()}: its coordinator is at 127.0.0.1")
    stranger = jobs.start("Text", workers=1, numerics=NUMERICS, settings=lease)
    assert stranger.end() == 2
    stranger.wait_for_words("is of no job with this token")
    os.kill(first.pid_of(1), signal.SIGKILL)
    jobs.check(first, "Text", NUMERICS)
    third = jobs.start("Text", workers=1, numerics=NUMERICS, settings={**lease, "security.token_file": token})
    jobs.check(third, "Text", NUMERICS)


@pytest.mark.parametrize("doors", [(), pytest.param(("--listen", "127.0.0.1:0"), marks=pytest.mark.longer)])
def test_decisions_wait_for_etcd_and_training_goes_on(members: EtcdMembers, jobs: Jobs, doors: tuple[str, ...]) -> None:
    """One member of three is lost without notice; of a second one it takes notice, and waits. Where other hosts may
    come, this host's agent has files of its own, and brings the events of workers while nobody leads."""
    members.wait()
    lease = {"control.etcd": members.url()}
    job = jobs.start("Text", *doors, workers=3, numerics=NUMERICS, settings=lease, pace=[healed(2)], lane_s=0.2)
    job.wait_for("step_committed", lambda e: e["step"] >= 2)
    members.signal(0, signal.SIGKILL)
    step = max(e["step"] for e in job.of_kind("step_committed"))
    job.wait_for("step_committed", lambda e: e["step"] > step)
    assert not job.of_kind("coordinator_restarted")
    members.signal(1, signal.SIGSTOP)
    lost = job.wait_for("warning", lambda e: "was deposed" in e["reason"])
    job.wait_for("step_committed", lambda e: e["time_unix_ns"] > lost["time_unix_ns"])
    os.kill(job.pid_of(2), signal.SIGKILL)
    job.wait_for("warning", lambda e: "2 of 3 members do not answer" in e["reason"] and "decisions wait" in e["reason"])
    assert not job.of_kind("worker_evicted")
    members.signal(1, signal.SIGCONT)
    job.wait_for("coordinator_restarted", cause="lease")
    job.wait_for("worker_evicted", worker_id=2)
    jobs.check(job, "Text", NUMERICS)


@pytest.mark.longer
def test_a_journal_that_was_cut_off_is_not_believed(members: EtcdMembers, jobs: Jobs, tmp_path: Path) -> None:
    """Its last entries are gone, and the next coordinator finds nothing wrong with the rest: but it has seen them."""
    members.wait()
    token, prefix = sha256(b"ef").digest(), "/jobs/cut"
    (tmp_path / "token").write_text(token.hex())
    settings = {"control.etcd": members.url(prefix), "security.token_file": tmp_path / "token"}
    job = jobs.start("Text", workers=2, numerics={"steps": 2000}, settings=settings, lane_s=0.05)
    job.wait_for("step_committed")
    with closing(Etcd(EtcdAddress.parse("a test", members.url(prefix)), token, 5.0)) as etcd:
        assert etcd.announced() is not None
        found = etcd.ask(Load())
        assert isinstance(found, Loaded) and found.number > 1
        span = etcd._keys.span(f"{JOURNAL}{found.number - 1:010d}", f"{JOURNAL}:")
        etcd._keys.post("kv/deleterange", span)
    os.kill(read_address(job.run_dir / COORDINATOR_FILE).pid, signal.SIGKILL)
    job.wait_for_words("somebody has put an older one in its place")
    assert job.end() == 1
    assert not job.of_kind("coordinator_restarted")


def test_a_host_without_the_jobs_directory_takes_over(members: EtcdMembers, jobs: Jobs, tmp_path: Path) -> None:
    """Of what the host that is lost had, and of what was brought to it, nothing is missing in the end."""
    members.wait()
    go, own = tmp_path / "go", jobs.base / "own"
    go.touch()
    pace = {"events": str(go), "until": [{"kind": "go"}], "lane_s": 0.03}
    environment = {"EVERSTEP_TOKEN": sha256(b"ab").hexdigest(), "EVERSTEP_TEST_PACE": json.dumps(pace)}
    job = jobs.start(
        "Text",
        *("--listen", "127.0.0.1:0", "--slots", "1"),
        workers=2,
        numerics=NUMERICS,
        settings={"control.etcd": members.url()},
        environment=environment,
    )
    where = ["--run-dir", str(own), "--host-name", "other", "--slots", "1"]
    heir = jobs.command(["agent", "--join", members.url(), "--standby", *where], own, environment)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
    job.wait_for("step_committed", step=3)
    os.kill(job.launcher_pid(), signal.SIGKILL)
    heir.wait_for("coordinator_restarted", cause="lease")
    go.write_text('{"kind":"go"}\n')
    jobs.check(heir, "Text", NUMERICS)
    assert sum(e["kind"] == "job_completed" for e in heir.events) == 1
