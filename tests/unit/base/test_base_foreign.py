"""Who has started a process as one of several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.base.foreign import Foreign, foreign_launcher

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (TORCHRUN, Foreign("torchrun", 1, 4)),
        (SRUN, Foreign("srun", 3, 8)),
        (MPIRUN, Foreign("mpirun", 0, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Foreign("mpirun", 1, 2)),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, Foreign("another launcher", 0, 2)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, None),  # the script of a batch
        ({"RANK": "zero", "WORLD_SIZE": "²", "LOCAL_RANK": "0"}, None),
        ({}, None),
    ],
)
def test_who_has_started_it(environ: dict[str, str], found: Foreign | None) -> None:
    assert foreign_launcher(environ) == found


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN, MPIRUN], ids=["torchrun", "srun", "mpirun"])
def test_a_script_that_is_started_several_times_is_refused_in_one_line(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, everstep\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in everstep.join(model, optimizer, [0.0] * 64, steps=2):\n    print('a step')\n"
    )
    command = [sys.executable, str(tmp_path / "train.py")]
    ended = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.count("\n") == 1 and "started by" in ended.stderr and "everstep agent" in ended.stderr
