"""Jobs that upload their checkpoints: whatever the store does, training goes on; another job begins with them; what is
kept."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.object_store import ObjectOptions
from everstep.checkpoint.pointers import write_pins
from everstep.checkpoint.reader import steps_in
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.stores.s3 import open_s3
from everstep.cli.ledger import audit_run
from everstep.protocol.driver.policy import best_of
from job_harness import Event, Job, Jobs
from object_server import KEY, SECRET, ObjectServer, Proxy

ENDLESS = [{"kind": "job_completed"}]


def uploaded(job: Job, after: int) -> int:
    """The first step beyond this one that reaches the store."""

    def later(event: Event) -> bool:
        return event.get("tier") == "object" and event["step"] > after

    return int(job.wait_for("checkpoint_completed", later)["step"])


@pytest.mark.longer
def test_a_store_that_fails_meanwhile_and_a_job_that_begins_with_what_it_holds(
    jobs: Jobs, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = object_server.bucket()
    url = f"s3://{bucket}/job"
    settings: dict[str, Any] = {"checkpoint.disk.every_steps": 2, "checkpoint.object.url": url}
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    with Proxy(object_server.endpoint) as proxy:
        settings["checkpoint.object.endpoint"] = proxy.endpoint
        numerics = {"steps": 400}
        job = jobs.start("Pictures", workers=2, numerics=numerics, settings=settings, pace=ENDLESS, environment=keys)
        first = uploaded(job, 0)
        proxy.set("refuse")
        failed = job.wait_for("checkpoint_failed", lambda event: "cannot use s3://" in event["reason"], tier="object")
        assert failed["cause"] == "store"
        assert failed["step"] >= first, job.account()
        job.wait_for("step_committed", lambda event: event["step"] > failed["step"] + 8)  # nobody waits for it
        proxy.set("slow", bytes_per_s=200e3)
        second = uploaded(job, failed["step"])
        proxy.set("pass")
        os.kill(job.launcher_pid(), signal.SIGTERM)
        assert job.end() == 143
        there = steps_in(open_s3(url, ObjectOptions(object_server.endpoint, request_timeout_s=20.0)))
        assert there[-1] >= second
        resumed = {"checkpoint.object.endpoint": proxy.endpoint}
        numerics = {"steps": there[-1] + 6}
        again = jobs.start(
            "Pictures", "--resume-from", url, workers=1, numerics=numerics, settings=resumed, environment=keys
        )
        assert again.end() == 0, again.account()
    assert again.of_kind("job_started")[0]["step"] == there[-1] and audit_run(again.run_dir).clean
    digests = [(d / "final" / "digest.json").read_text() for d in (again.run_dir, jobs.reference("Pictures", numerics))]
    assert digests[0] == digests[1], again.account()


@pytest.mark.longer
def test_a_bucket_that_is_not_there_is_said_before_the_start(
    jobs: Jobs, object_server: ObjectServer, tmp_path: Path
) -> None:
    environment = {
        "AWS_ENDPOINT_URL": object_server.endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    settings = {"checkpoint.object.url": "s3://everstep-no-such-bucket/x"}
    job = jobs.start("Pictures", workers=1, settings=settings, environment=environment)
    assert job.end() == 2, job.account()
    said = job.run_dir.with_suffix(".err").read_text().splitlines()
    assert len(said) == 1 and "there is no bucket 'everstep-no-such-bucket'" in said[0], said
    assert not (job.run_dir / manifest_name(1)).exists()


@pytest.mark.longer
def test_what_each_tier_takes_and_keeps(jobs: Jobs, tmp_path: Path) -> None:
    places = {"disk": tmp_path / "disk", "object": tmp_path / "object"}
    for place, step in zip(places.values(), (3, 8), strict=True):
        place.mkdir()
        write_pins(DirectoryStore(place), {"early": step})
    settings = {
        "checkpoint.best_metric": "accuracy",
        "checkpoint.disk.path": places["disk"],
        "checkpoint.disk.every_steps": 3,
        "checkpoint.disk.every_minutes": 1e-4,  # so after each step, once the one before is written
        "checkpoint.disk.keep_last": 1,
        "checkpoint.disk.keep_every": 12,
        "checkpoint.disk.keep_best": 2,
        "checkpoint.object.url": f"file://{places['object']}",
        "checkpoint.object.every_steps": 8,
        "checkpoint.object.keep_last": 1,
        "eval_every": 4,
        "verify_every": 0,
    }
    job = jobs.start("Pictures", workers=2, numerics={"steps": 24}, settings=settings, lane_s=0.01, pace=ENDLESS)
    assert job.end() == 0, job.account()
    done = job.of_kind("checkpoint_completed")
    of_disk = {e["step"]: e["reason"] for e in done if e["tier"] == "disk"}
    scores = {e["step"]: e["metrics"]["accuracy"] for e in job.of_kind("evaluated")}
    judged = {step: scores[step] for step in of_disk if step in scores}
    best = set(best_of(judged, judged, "max")[:2])
    assert any("minutes" in reason for reason in of_disk.values()) and "the best so far" in of_disk.values(), of_disk
    assert steps_in(DirectoryStore(places["disk"])) == sorted({3, 12, 24} & {*of_disk} | best), job.account()
    uploaded = {e["step"] for e in done if e["tier"] == "object"}
    assert steps_in(DirectoryStore(places["object"])) == sorted({8, 24} & uploaded), job.account()
    assert 24 in of_disk and 24 in uploaded and len(of_disk) > 4, job.account()  # a slow disk skips some
