"""Which launcher of others has started this process as one of several. Pure.

Each of them would train for itself, as N silent jobs: so it is refused in one line, before anything begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Foreign(NamedTuple):
    """This process is `rank` of `size` that `launcher` has started."""

    launcher: str
    rank: int
    size: int

    def refusal(self) -> str:
        """Why it cannot go on, and what to do."""
        return (
            f"started by {self.launcher} as process {self.rank} of {self.size}, which would be {self.size} jobs of one "
            "worker: start one process per host, with 'everstep run SCRIPT --rank N --world-size HOSTS --master-addr A "
            "--master-port P', or 'everstep run SCRIPT --listen ADDR:PORT' on one host and 'everstep agent --join "
            "ADDR:PORT' on the others"
        )


_KNOWN = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_RANK", "PMI_SIZE"),
    ("another launcher", "LOCAL_RANK", "RANK", "WORLD_SIZE"),
)
"""Launcher, the variable that gives it away, and those of rank and size."""


def foreign_launcher(environ: Mapping[str, str]) -> Foreign | None:
    """Who has started this process as one of several, as its environment says; None if nobody has."""
    for launcher, sign, rank, size in _KNOWN:
        numbers = environ.get(rank, ""), environ.get(size, "")
        if sign in environ and all(text.isdecimal() for text in numbers) and int(numbers[1]) > 1:
            return Foreign(launcher, int(numbers[0]), int(numbers[1]))
    return None
