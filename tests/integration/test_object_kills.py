"""SIGKILL at random moments of uploading: what the store then accepts is complete and right, and never changes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep.checkpoint.manifest import JobIdentity
from everstep.checkpoint.manifest_writer import write_whole
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.object_store import ObjectStore
from everstep.checkpoint.reader import newest_complete, open_checkpoint, steps_in, verify_blocks
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.stores.s3 import open_s3
from everstep.exact.state import ModelState
from exchange_cases import write_unchanged
from object_server import ObjectServer, Proxy

KILLS = int(os.environ.get("EVERSTEP_TEST_KILLS", "20")) // 5
LIMIT_S = 120.0
HERE = Path(__file__).parents[1]


def checkpoints(path: Path, count: int) -> DirectoryStore:
    """Steps 1 to count, 10 MB each (so that their parts go up in parts too); every third refers to the one before."""
    store = DirectoryStore(path)
    before = None
    for step in range(1, count + 1):
        if step % 3 == 0 and before is not None:
            write_unchanged(store, before, step)
            continue
        torch.manual_seed(step)
        write_whole(store, ModelState(nn.Linear(1600, 1600)), JobIdentity("task", {}), step=step)
        before = open_checkpoint(store, step)
    return store


@pytest.fixture
def uploaders(
    object_server: ObjectServer, tmp_path: Path
) -> Iterator[tuple[Proxy, ObjectStore, subprocess.Popen[str]]]:
    url = f"s3://{object_server.bucket()}/job"
    with Proxy(object_server.endpoint, mode="slow", bytes_per_s=60e6) as proxy:
        environment = {**os.environ, **object_server.environment}
        os.environ |= object_server.environment
        command = [sys.executable, str(HERE / "upload_process.py"), str(tmp_path / "disk"), url]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "AWS_ENDPOINT_URL": proxy.endpoint},
        ) as process:
            yield proxy, open_s3(url), process
            assert process.stdin is not None
            process.stdin.close()
    for name in object_server.environment:
        os.environ.pop(name, None)


def start(process: subprocess.Popen[str], steps: list[int]) -> int:
    """A new uploader's pid."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(" ".join(map(str, steps)) + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def gone(pid: int, timeout_s: float) -> bool:
    """Whether it ends in time."""
    deadline = time.monotonic() + timeout_s
    while os.path.exists(f"/proc/{pid}"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.longer
@pytest.mark.timeout(300 + 60 * KILLS)  # each kill is followed by a check of all that is there
def test_what_is_accepted_is_whole_whenever_the_uploader_dies(
    uploaders: tuple[Proxy, ObjectStore, subprocess.Popen[str]], tmp_path: Path
) -> None:
    proxy, store, process = uploaders
    count = max(6, KILLS * 3 // 2)
    source = checkpoints(tmp_path / "disk", count)
    rng = random.Random(7)
    accepted: dict[str, bytes] = {}
    died = 0
    while died < KILLS:
        there = steps_in(store)
        following = [step for step in range(1, count + 1) if not there or step > there[-1]]
        if not following:
            break  # all are up: the kills came late
        at = proxy.passed_bytes + rng.randrange(0, 16_000_000)
        pid = start(process, following[:3])
        while proxy.passed_bytes < at and os.path.exists(f"/proc/{pid}"):
            time.sleep(0.001)
        if os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGKILL)
            died += 1
        assert gone(pid, LIMIT_S)
        check_store(store, source, accepted)
    assert died >= KILLS * 3 // 4
    left = [step for step in range(1, count + 1) if step > max(steps_in(store), default=0)]
    assert gone(start(process, left), LIMIT_S)
    check_store(store, source, accepted)
    assert steps_in(store)[-1] == count


def check_store(store: ObjectStore, source: DirectoryStore, accepted: dict[str, bytes]) -> None:
    """Everything that is accepted is that of the source, whole, and as it was the last time."""
    told: list[str] = []
    newest = newest_complete(store, told=lambda step, why: told.append(why.reason))
    assert told == [], "the store accepted something that is not whole"
    assert (newest.step if newest else None) == max(steps_in(store), default=None)
    for step in steps_in(store):
        found = open_checkpoint(store, step)
        assert found.manifest == open_checkpoint(source, step).manifest
        verify_blocks(found)
        for name in (manifest_name(step), *(file.name for file in found.manifest.files)):
            data = bytes(store.read(name))
            assert accepted.setdefault(name, data) == data, f"{name} has changed"
