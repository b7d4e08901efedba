"""Forks processes that upload checkpoints, and that may be killed: one import for all of them.

python upload_process.py SOURCE URL      each line on stdin, steps such as "1 2 3", starts one; its pid is answered
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from everstep.base.config_keys import TierConfig
from everstep.checkpoint.store import DirectoryStore
from everstep.checkpoint.stores.s3 import open_s3
from everstep.checkpoint.transfer import Backoff, Uploader, retention


def upload(source: str, url: str, steps: list[int]) -> None:
    """As a job does: a checkpoint is offered once the one before is there."""

    def report(kind: str, fields: dict[str, Any]) -> None:
        if kind == "checkpoint_failed":
            os.write(2, f"{fields}\n".encode())

    backoff = Backoff(initial_s=0.01, max_s=0.1, attempts=1000)
    uploader = Uploader(DirectoryStore(source), open_s3(url), report, retention(TierConfig(keep_last=3)), backoff)
    for step in steps:
        uploader.offer(step)
        while not uploader.idle:
            signal.sigtimedwait([], 0.002)
    os._exit(0 if uploader.finish(60.0) else 1)


def main() -> None:
    source, url = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            upload(source, url, [int(word) for word in line.split()])
        print(pid, flush=True)


if __name__ == "__main__":
    main()
