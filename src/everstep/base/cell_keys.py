"""The keys of `cell.*`: processes that serve as one worker. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from everstep.base.config_fields import key

MAX_RANKS = 32
"""Most processes of a worker."""
_TYPE, _NAMED = "(bf16|fp16|fp32)", "(parameters|reduction|buffers)"
PRECISION = rf"{_TYPE}|(?!.*\b{_NAMED}=.*\b\2=){_NAMED}={_TYPE}(,{_NAMED}={_TYPE})*"
"""What `cell.precision` may be: no name twice."""


class PassTypes(NamedTuple):
    """Types with which passes are made. parameters: of the copies that they use, and of what goes into each unit;
    reduction: to which each lane's gradients, and each sum of them, are rounded; buffers: of the copies of these."""

    parameters: str = "fp32"
    reduction: str = "fp32"
    buffers: str = "fp32"

    @property
    def narrow(self) -> bool:
        """Whether passes are made with copies."""
        return (self.parameters, self.buffers) != ("fp32", "fp32")


@dataclass(frozen=True)
class CellConfig:
    """Processes that serve as one worker. `shards`, `sp` and `precision` alone change bits."""

    fsdp: int = key(
        1,
        "processes of each worker, which divide its parameters, its optimizer's state and its lanes among them; when "
        "one of them dies, all do",
        low=1,
        high=MAX_RANKS,
    )
    wrap: str = key(
        "units",
        "the processes of a worker exchange gradients unit by unit, or by modules with this many parameters in total",
        pattern=r"units|[1-9]\d{0,11}",
        example="units, or 1000000",
    )
    offload: str = key(
        "none",
        "no effect: parameters and the optimizer's state of workers with several processes are in the host's memory",
        choices=("none", "cpu"),
    )
    prefetch: int = key(1, "no effect, known from FSDP: nothing is gathered ahead of the unit that computes", low=0)
    reshard_after_forward: bool = key(
        True, "with cell.hosts: drop other hosts' parameters after each unit; false: keep them for the whole step"
    )
    tp: int = key(
        1,
        "processes that compute each lane together, each a part of cell.shards, which it must divide; changes no bit. "
        "A worker has cell.fsdp x cell.tp processes",
        low=1,
        high=MAX_RANKS,
    )
    hosts: int = key(1, "hosts of each worker, each with as many of its processes; divides cell.fsdp", low=1, high=64)
    shards: int = key(
        1,
        "virtual shards into which layers are cut, each computed alone; if unset: cell.tp of the job's first start",
        low=1,
        high=64,
        numerics=True,
    )
    sp: bool = key(
        False, "sequence parallelism: split activations between sharded layers along the sequence", numerics=True
    )

    precision: str | None = key(
        None,
        "narrow types of passes: of parameters, or of each by name, as parameters=bf16,reduction=bf16,buffers=fp32. "
        "State stays float32",
        pattern=PRECISION,
        example="bf16, or parameters=bf16,reduction=bf16",
        numerics=True,
    )

    @property
    def types(self) -> PassTypes:
        """What `precision` says."""
        given = self.precision or "fp32"
        pairs = dict(pair.split("=") for pair in given.split(",")) if "=" in given else {"parameters": given}
        return PassTypes(**pairs)

    @property
    def least(self) -> int | None:
        """Parameters of the modules that are exchanged at once; None: those of units."""
        return None if self.wrap == "units" else int(self.wrap)

    @property
    def ranks(self) -> int:
        """Processes of each worker."""
        return self.fsdp * self.tp

    def over(self, hosts: int) -> CellConfig:
        """The same over so many hosts, each with as many processes as now."""
        return replace(self, fsdp=self.fsdp // self.hosts * hosts, hosts=hosts)

    @property
    def key(self) -> str:
        """The key that makes a worker one of several processes, for messages."""
        return "cell.fsdp" if self.fsdp > 1 else "cell.tp"


def cell_notes(cell: CellConfig) -> list[str]:
    """A sentence for each key of `cell.*` that is set and changes nothing here."""
    plain = CellConfig()
    shared = "parameters lie once in memory that all processes of a worker read"
    kept = f"there are no copies to let go of: {shared}"
    if cell.hosts > 1:
        kept = f"with cell.shards={cell.shards}, other hosts' parameters are here for a whole step in any case"
    found = {
        "wrap": ("a worker of one process exchanges nothing", cell.ranks == 1),
        "offload": ("parameters and the optimizer's state are in the host's memory already", True),
        "prefetch": (
            f"nothing is gathered: {shared}" if cell.hosts == 1 else "a unit's parameters come as it begins",
            True,
        ),
        "reshard_after_forward": (kept, cell.hosts == 1 or cell.shards > 1),
    }
    return [
        f"cell.{name}={getattr(cell, name)} changes nothing here: {why}"
        for name, (why, idle) in found.items()
        if idle and getattr(cell, name) != getattr(plain, name)
    ]
