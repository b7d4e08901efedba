"""The dashboard beside a run: `everstep run --dashboard` starts it as a process that ends with the job.

A process of its own, so that nothing that a browser asks can hold up the launcher.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from everstep.base.errors import ConfigError
from everstep.runtime.process import die_with_parent


def check_installed() -> None:
    """Raises: ConfigError if the dashboard cannot run here."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--dashboard needs {name}: pip install 'everstep[dashboard]'")


@contextlib.contextmanager
def dashboard_beside(run_dir: Path, wanted: bool) -> Iterator[str]:
    """Serve a dashboard over `run_dir` for as long as the block lasts; yields its address, "" if none is wanted."""
    if not wanted:
        yield ""
        return
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep", "dashboard", str(run_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # how it ends interests nobody
        text=True,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(parent),
    )
    try:
        address = process.stdout.readline().strip() if process.stdout is not None else ""
        yield address or f"could not be started: everstep dashboard {run_dir} says why"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
