"""What all tiers share: one thread per process, golden files that can be rewritten, GPU tests that say why not."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from job_harness import Jobs
    from object_server import ObjectServer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: what is started here must hear it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # likewise, of nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the golden texts of tests/traces anew")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden texts are to be written instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Starts jobs, and keeps the undisturbed runs that they are compared with."""
    from job_harness import Jobs

    all_processes = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None
    found = Jobs(tmp_path_factory.mktemp("jobs"), all_processes)
    yield found
    found.close()


@pytest.fixture(scope="module")
def reference(jobs: Jobs, script: str) -> Path:
    """Run directory of the module's `script`, undisturbed, on one worker."""
    job = jobs.start(script, workers=1)
    assert job.end() == 0, job.account()
    return job.run_dir


@pytest.fixture(scope="module")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """An S3 server, started when the first test asks for it (Ceph RGW takes 15 s, moto one)."""
    from object_server import running_object_server

    with running_object_server(tmp_path_factory.mktemp("object-server")) as server:
        yield server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "object_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.object_server)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))


def pytest_collection_finish() -> None:
    """What has been imported is no garbage, and is two million objects: no collection goes through them again."""
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.set_threshold(50_000)  # tests leave few cycles: to look for them as often as usual takes an eighth of the time


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None or shutil.which("nvidia-smi") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
