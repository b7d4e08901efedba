"""Another launcher (torchrun, mpirun, ...) that started this process as one of several, and this process's part in the
one job that they become. Pure.

Without this, each process would train alone, as N silent jobs. They cannot be workers either, because their launcher
ends them all when one dies. So on each host the first becomes the job or that host's agent, and the others wait for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from everstep.base.errors import ConfigError

Part = Literal["job", "agent", "waiting"]

_NUMBER = re.compile(r"[0-9]{1,7}")
_LOCAL_RANK = re.compile(r"--local[-_]rank=([0-9]{1,7})")
_TASKS = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")


class Foreign(NamedTuple):
    """This process is `rank` of `size` that `launcher` started, `local_rank` of `local_size` on this host.

    local_rank, local_size: -1 if the launcher does not say. identity: text that only this start of the launcher has on
    this host. address, port: where rank 0 expects the others, "" and 0 if unknown. store: the launcher itself keeps a
    store there.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int = -1
    local_size: int = -1
    identity: str = ""
    address: str = ""
    port: int = 0
    store: bool = False

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size

    @property
    def part(self) -> Part:
        """This process's part in the job."""
        if self.local_rank:
            return "waiting"
        return "agent" if self.rank else "job"

    @property
    def key(self) -> str:
        """Key of this start of the launcher on this host, 32 hex digits."""
        return hashlib.sha256(self.identity.encode()).hexdigest()[:32]

    def words(self) -> str:
        """Launcher and rank, for people."""
        return f"started by {self.launcher} as process {self.rank} of {self.size}"

    def check(self) -> None:
        """Raises: ConfigError if no job can be made of these processes; it says what to do instead."""
        if self.local_rank < 0 or self.local_size < 0:
            raise ConfigError(
                f"{self.words()}, which does not say how many of them are on this host (LOCAL_RANK and "
                f"LOCAL_WORLD_SIZE): {INSTEAD}"
            )
        if not (self.local_rank < self.local_size <= self.size and self.local_rank <= self.rank < self.size):
            raise ConfigError(
                f"{self.words()} and {self.local_rank} of {self.local_size} on this host, which contradict each other: "
                f"{INSTEAD}"
            )

    def script_words(self, argv: Sequence[str]) -> list[str]:
        """The script's arguments without the one that the launcher put before them (--local_rank=N of deepspeed):
        workers have their own LOCAL_RANK."""
        found = _LOCAL_RANK.fullmatch(argv[0]) if argv else None
        return list(argv[1:] if found and int(found[1]) == self.local_rank else argv)

    def refuse(self, where: str) -> ConfigError:
        """Error for a place where no process can become another. where: "a notebook", ..."""
        return ConfigError(f"{self.words()} in {where}, which would be {self.size} jobs of one worker: {INSTEAD}")


INSTEAD = (
    "start one process per host, with 'everstep run SCRIPT --rank N --world-size HOSTS --master-addr A --master-port "
    "P', or 'everstep run SCRIPT --listen ADDR:PORT' on one host and 'everstep agent --join ADDR:PORT' on the others"
)


class _Known(NamedTuple):
    """A launcher, the variable by which it is recognised, and the variables of its numbers. identity: variables that
    tell one start of it on one host from others."""

    launcher: str
    sign: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    identity: tuple[str, ...]


_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_KNOWN = (
    _Known(
        *("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", *_MEETING),
    ),
    _Known(
        *("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ()),
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_NODEID"),
    ),
    _Known(
        *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *(("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", *_MEETING),
    ),
    _Known(
        *("mpirun", "PMI_RANK", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
        ("PMI_PORT", *_MEETING),
    ),
    *(
        _Known(name, rank, rank, size, ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), _MEETING)
        for name, rank, size in (
            ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
            ("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
            ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
        )
    ),
    _Known(
        *("another launcher", "RANK", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
        ("GROUP_RANK", "NODE_RANK", "CROSS_RANK", *_MEETING),
    ),
)
WORKER_MARK = "EVERSTEP_WORKER"
"""Environment variable of a worker, whose RANK and the like come from a plan."""
_ITS_OWN = re.compile(
    r"TORCHELASTIC_\w+|(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|LOCAL_SIZE|CROSS_(RANK|SIZE)|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)"
    r"|MV2_COMM_WORLD_\w+|FLUX_(TASK_(RANK|LOCAL_ID)|JOB_SIZE)|HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)"
    r"|SLURM_(PROCID|LOCALID|STEP_NUM_TASKS|STEP_TASKS_PER_NODE)|OMPI_COMM_WORLD_\w+|PMIX?_\w+|MPI_LOCALN?RANK\w*"
)


def foreign_launcher(environ: Mapping[str, str]) -> Foreign | None:
    """The launcher that started this process as one of several, by its environment; None if there is none.

    Raises: ConfigError if a variable is no number where one is expected: the process may then be one of several.
    """
    for known in _KNOWN:
        if not {known.sign, known.rank, known.size} <= environ.keys() or (
            known is _KNOWN[-1] and WORKER_MARK in environ
        ):
            continue
        rank, size = (_number(environ, name) for name in (known.rank, known.size))
        if size in (0, 1):
            continue
        if rank < 0 or size < 0:
            came = ", ".join(f"{name}={environ[name][:40]!r}" for name in (known.rank, known.size))
            raise ConfigError(
                f"expected numbers in the environment, as {known.launcher} sets them, got {came}: {INSTEAD}"
            )
        local_rank = max((_number(environ, name) for name in known.local_rank), default=-1)
        local_size = max((_number(environ, name) for name in known.local_size), default=-1)
        if known.launcher == "srun":
            tasks, node = environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environ, "SLURM_NODEID")
            local_size = _tasks_on(tasks, node)
        identity = " ".join([known.launcher, *(f"{name}={environ.get(name, '')}" for name in known.identity)])
        store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = max(0, _number(environ, "MASTER_PORT"))
        address = environ.get("MASTER_ADDR", "")
        return Foreign(known.launcher, rank, size, local_rank, local_size, identity, address, port, store)
    return None


def check_numbered(environ: Mapping[str, str]) -> None:
    """Raises: ConfigError in the one process that accelerate started although several were asked for. On CPUs
    accelerate leaves the others to mpirun or other machines, and tells no process its rank."""
    if "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ and "RANK" not in environ:
        raise ConfigError(
            "accelerate started several processes, but did not tell this one its rank: use 'everstep run SCRIPT "
            f"--workers N', 'accelerate launch --multi_gpu', or {INSTEAD}"
        )


LAUNCHED_MARK = "EVERSTEP_LAUNCHED"
"""Environment variable of a job that a foreign launcher has started."""


def passed_on(environ: Mapping[str, str]) -> bool:
    """Whether a launcher passes on what this process prints, so that a terminal it seems to have is the launcher's own
    (mpirun gives its processes one)."""
    return LAUNCHED_MARK in environ or any(name.startswith("OMPI_COMM_WORLD_") for name in environ)


def left_alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the launcher's variables about one process, for other processes."""
    return {name: value for name, value in environ.items() if not _ITS_OWN.fullmatch(name)}


def _number(environ: Mapping[str, str], name: str) -> int:
    """Number in a variable; -1 if there is none."""
    text = environ.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else -1


def _tasks_on(text: str, node: int) -> int:
    """Number of tasks on this node, from Slurm's list such as "2(x3),1"; -1 if unknown."""
    for item in text.split(","):
        found = _TASKS.fullmatch(item)
        if found is None or node < 0:
            return -1
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1])
    return -1


def first_host(names: str) -> str:
    """First host of a list as Slurm writes it ("n[07-09,12],m3"); "" for any other text."""
    found = re.fullmatch(r"([\w.-]+)(?:\[(\d+)[-,\d]*\]([\w.-]*))?(?:,.*)?", names)
    return "" if found is None else f"{found[1]}{found[2] or ''}{found[3] or ''}"


def derived_ports(key: str) -> list[int]:
    """Ports that all processes of one start try in this order if the launcher names none."""
    first = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 8000
    return [20_000 + (first + 997 * k) % 8000 for k in range(8)]
