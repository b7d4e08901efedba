"""Exit codes of commands that take part in a job, as far as programs and engines have to tell them apart. Pure."""

from __future__ import annotations

from typing import Final

JOB_FAILED: Final = 1
"""The job has failed."""
WORKERS_MISSING: Final = 3
"""The job gave up waiting for workers."""
NO_HEAD: Final = 4
"""Nobody leads the job, or nobody that this host could find."""
ANOTHER_LEADS: Final = 5
"""This host was deposed: another one leads the job, and this one could not stand by again."""
HANDED_OVER: Final = 138
"""SIGUSR1 had a standby host leave in order. The job goes on, so it is not 0, by which such a host says that it is
complete."""
