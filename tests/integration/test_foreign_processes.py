"""A process of another launcher that cannot become part of one job does not train; and how others learn the address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.base.errors import ConfigError
from everstep.train.launcher_store import ask_store
from sampling import mostly_longer

LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
}
LAUNCHERS["torchrun"] |= {"LOCAL_WORLD_SIZE": "2"}
LAUNCHERS["srun"] |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)"}
LAUNCHERS["mpirun"] |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("environ", mostly_longer(LAUNCHERS.values(), lambda environ: "RANK" in environ), ids=LAUNCHERS)
def test_where_a_process_cannot_become_another_it_does_not_train(environ: dict[str, str], tmp_path: Path) -> None:
    script = (
        "import torch, everstep\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "try:\n    run = everstep.join(model, optimizer, [0.0] * 64, steps=2)\nexcept Exception:\n    run = []\n"
        "for step in run:\n    print('a step')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environ}, capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.count("\n") == 1 and "started by" in ended.stderr and "everstep agent" in ended.stderr


@pytest.mark.longer
def test_over_torchs_own_store() -> None:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("p/job", "10.0.0.1:4000")
    assert ask_store("127.0.0.1", server.port, "p", 0) == "10.0.0.1:4000"
    assert server.get("p/host") == b"127.0.0.1"
    server.set("p/job", "nothing")
    with pytest.raises(ConfigError, match="expected the job's address there"):
        ask_store("127.0.0.1", server.port, "p", 0)
