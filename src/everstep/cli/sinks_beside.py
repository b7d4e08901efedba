"""The sinks of a running job: one process each, which reads the run directory and ends after the job's last event.

Processes of their own, so that nothing that a library or a network does can hold up the job or another sink.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from everstep.runtime.process import own_command

_LAST_WORDS_S = 15.0


@contextlib.contextmanager
def sinks_beside(run_dir: Path, names: Sequence[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Publish the job to these sinks for as long as the block lasts, and what it left to tell after it.

    tell: a line for the user, for a sink that not everything has reached.
    """
    processes: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    try:
        for name in names:
            log = run_dir / "logs" / f"sink-{name}.log"
            try:
                processes.append((name, log, _start(run_dir, name, log)))
            except OSError as error:
                tell(f"{name} could not be started: {error.strerror or error}; everstep publish {run_dir} --to {name}")
        yield
    finally:
        for _, _, process in processes:
            if process.stdin is not None:
                process.stdin.close()  # it ends when it has told the rest
        end_s = time.monotonic() + _LAST_WORDS_S
        for name, log, process in processes:
            try:
                code = process.wait(max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                tell(f"not everything has reached {name}: everstep publish {run_dir} --to {name} does the rest ({log})")


def _start(run_dir: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(exist_ok=True)
    command = own_command("everstep", "publish", str(run_dir), "--to", name, "--beside")
    with open(log, "ab") as output:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
