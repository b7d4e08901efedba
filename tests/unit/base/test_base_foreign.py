"""Who has started a process as one of several, and which part of the one job each of them has."""

from __future__ import annotations

import pytest

from everstep.base.errors import ConfigError
from everstep.base.foreign import Foreign, check_numbered, derived_ports, first_host, foreign_launcher, left_alone

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7"}
SRUN |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
MPIRUN |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
DEEPSPEED = {"LOCAL_RANK": "0", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "found", "part"),
    [
        (TORCHRUN, ("torchrun", 1, 4, 1, 2), "waiting"),
        ({**TORCHRUN, "RANK": "2", "LOCAL_RANK": "0"}, ("torchrun", 2, 4, 0, 2), "agent"),
        ({**TORCHRUN, **SRUN, "RANK": "0", "LOCAL_RANK": "0"}, ("torchrun", 0, 4, 0, 2), "job"),
        (SRUN, ("srun", 3, 8, 1, 2), "waiting"),
        ({**SRUN, "SLURM_NODEID": "4", "SLURM_LOCALID": "0", "SLURM_PROCID": "7"}, ("srun", 7, 8, 0, 1), "agent"),
        (MPIRUN, ("mpirun", 0, 2, 0, 2), "job"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ("mpirun", 1, 2, 1, 2),
            "waiting",
        ),
        (DEEPSPEED, ("another launcher", 2, 4, 0, 2), "agent"),
    ],
)
def test_who_has_started_it(environ: dict[str, str], found: tuple[object, ...], part: str) -> None:
    foreign = foreign_launcher(environ)
    assert foreign is not None and foreign[:5] == found and foreign.part == part
    foreign.check()
    assert foreign_launcher(left_alone(environ)) is None


@pytest.mark.parametrize(
    "environ",
    [
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # the script of a batch
        {"RANK": "-1", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "h"},
        {"RANK": "3"},
        {"EVERSTEP_WORKER": "1", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        {},
    ],
)
def test_who_stands_alone(environ: dict[str, str]) -> None:
    assert foreign_launcher(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, "does not say how many of them are on this host"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}, "started by flux as process 0 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}, "does not say how many of them"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "which contradict each other"),
        ({**TORCHRUN, "RANK": "0"}, "which contradict each other"),
        ({**TORCHRUN, "RANK": "4"}, "which contradict each other"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "does not say how many"),
        ({**SRUN, "SLURM_NODEID": "7"}, "does not say how many"),
    ],
)
def test_what_cannot_become_one_job_is_refused(environ: dict[str, str], words: str) -> None:
    foreign = foreign_launcher(environ)
    assert foreign is not None
    with pytest.raises(ConfigError, match=words) as caught:
        foreign.check()
    assert "everstep agent --join" in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "size"), [("zero", "²"), ("1", "9" * 5000), ("-1", "2"), ("0", ""), ("abc", "xyz"), ("1.0", "2")]
)
def test_numbers_that_are_none_are_refused(rank: str, size: str) -> None:
    with pytest.raises(ConfigError, match="expected numbers in the environment") as caught:
        foreign_launcher({"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_what_a_launcher_says_to_a_script_is_not_the_scripts() -> None:
    found = foreign_launcher(DEEPSPEED)
    assert found is not None
    assert found.script_words(["--local_rank=0", "data", "--local_rank=0"]) == ["data", "--local_rank=0"]
    assert found.script_words(["--local-rank=0"]) == found.script_words([]) == []
    for kept in (
        ["--local_rank=1", "data"],
        ["data", "--local_rank=0"],
        ["--local_rank", "0"],
        ["--local_rank=\u0660"],
    ):
        assert found.script_words(kept) == kept


def test_one_of_several_that_is_not_told_which_is_refused() -> None:
    """What accelerate starts on a CPU, on each of its machines."""
    alone = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}
    several = {**alone, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for environ in (alone, {"MASTER_ADDR": "10.0.0.1"}, {**several, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}):
        check_numbered(environ)
    with pytest.raises(ConfigError, match=r"accelerate started several.*--multi_gpu.*everstep agent --join"):
        check_numbered(several)


def test_one_start_on_one_host_has_one_key() -> None:
    def key(**more: str) -> str:
        found = foreign_launcher({**TORCHRUN, "MASTER_ADDR": "h", "MASTER_PORT": "5", "GROUP_RANK": "0", **more})
        assert found is not None
        return found.key

    assert key() == key(RANK="0", LOCAL_RANK="0")
    others = [key(GROUP_RANK="1"), key(TORCHELASTIC_RESTART_COUNT="1"), key(MASTER_PORT="6")]
    assert len({key(), *others}) == 4


def test_what_a_launcher_does_not_say_stays_in_the_environment() -> None:
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SIZE": "9", "EVERSTEP_TOKEN": "ab", "CUDA_VISIBLE_DEVICES": "1"}
    assert left_alone({**TORCHRUN, **SRUN, **MPIRUN, **kept, "MASTER_ADDR": "h"}) == {
        **kept,
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "1",
    }


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("n[07-09,12],m3", "n07"),
        ("node-a.example.org", "node-a.example.org"),
        ("n[3,5]-ib", "n3-ib"),
        ("a,b", "a"),
        ("$(reboot)", ""),
        ("", ""),
    ],
)
def test_the_first_of_slurms_hosts(names: str, first: str) -> None:
    assert first_host(names) == first


def test_all_try_the_same_ports() -> None:
    ports = derived_ports("a")
    assert ports == derived_ports("a") != derived_ports("b")
    assert len(set(ports)) == 8 and all(20_000 <= port < 28_000 for port in ports)


def test_names_are_for_people() -> None:
    assert Foreign("srun", 3, 8).words() == "started by srun as process 3 of 8"
