"""What a fault does from outside of the process that it strikes, which is stopped or may be gone by then."""

from __future__ import annotations

import subprocess

from everstep.runtime.process import OUTLIVES_WORKERS


def run_beside(script: str) -> None:
    """Run a shell script that outlives the caller.

    Its name tells the fork server, which ends what dead workers leave running, to let this one be.
    """
    subprocess.run(
        [OUTLIVES_WORKERS, "-c", f"({script}) >/dev/null 2>&1 &"],
        executable="/bin/sh",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
