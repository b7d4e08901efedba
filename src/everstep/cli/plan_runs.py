"""Whether jobs run a split of the devices today, and with which config.

The checks of a job's own config decide, so a plan says nothing else than `everstep run` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.cost.step_time import ParallelSplit


class HowItRuns(NamedTuple):
    """config: keys of the job that runs a split, None if none does. why_not: the reason, in words, else ""."""

    config: dict[str, Any] | None
    why_not: str = ""

    @property
    def words(self) -> str:
        """For a table: yes, where and by which keys, or no."""
        if self.config is None:
            return "no"
        keys = [key for key in self.config if key.startswith(("cell.", "zero.")) and key != "cell.shards"]
        said = ", ".join(f"{key}={str(self.config[key]).lower()}" for key in keys)
        return " ".join(["yes", *([f"({said})"] if said else []), *(["on CPUs"] if "device" in self.config else [])])

    def about(self) -> dict[str, Any]:
        """For results."""
        return {"runs": self.config is not None, "runs_with": self.config, "runs_not": self.why_not or None}


def how_it_runs(
    split: ParallelSplit, micro_batches: int = 1, dtype: str = "fp32", *, zero: Mapping[str, Any] = {}, cpu: bool = True
) -> HowItRuns:
    """The job that runs a split, on GPUs if these do, else on CPUs. zero: keys of `zero` that it has beside its stage.
    cpu: whether there may be such a job.

    Stage 3 of ZeRO is a worker of as many processes, which divide parameters, too; `cell.tp` is tensor parallelism.
    """
    lacking = _lacking(split, dtype)
    if lacking:
        return HowItRuns(None, lacking)
    config = _config_of(split, micro_batches, zero)
    why_not = _refused(config | {"device": "cuda"})
    if why_not and cpu:
        config, why_not = config | {"device": "cpu"}, _refused(config)
    return HowItRuns(None, why_not) if why_not else HowItRuns(config)


def _lacking(split: ParallelSplit, dtype: str) -> str:
    """What no config asks for, "" if there is one for all of a split."""
    for lacks, words in (
        (dtype != "fp32", "jobs keep parameters and gradients in float32; precision changes the products alone"),
        (split.cp > 1, "jobs do not divide sequences among devices (context parallelism)"),
        (split.ep > 1, "jobs do not divide experts among devices"),
        (split.recompute not in ("none", "full"), "jobs compute all activations again, or none (recompute)"),
        (split.recompute == "full" and split.pp == 1, "jobs compute activations again in stages alone (recompute)"),
        (split.sequence_parallel and split.tp == 1, "cell.sp needs cell.tp"),
    ):
        if lacks:
            return words
    return ""


def _config_of(split: ParallelSplit, micro_batches: int, zero: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the job that would run a split, without those that are as by default."""
    pool, fsdp = (1, split.dp) if split.zero == 3 else (split.dp, 1)
    config: dict[str, Any] = {
        "workers": pool * split.pp,
        "stages": split.pp,
        "lanes": split.dp * micro_batches,
        "micro_batch": split.micro_batch,
    }
    if split.pp > 1:
        config |= {"schedule": split.schedule, "chunks": split.chunks, "recompute": split.recompute == "full"}
    if fsdp > 1:
        config["cell.fsdp"] = fsdp
    if split.tp > 1:
        config |= {"cell.tp": split.tp, "cell.shards": split.tp}
    if split.sequence_parallel:
        config["cell.sp"] = True
    if split.zero in (1, 2):
        config["zero.stage"] = split.zero
    return config | {key: value for key, value in zero.items() if key != "zero.copies" or split.zero in (1, 2)}


def _refused(config: dict[str, Any]) -> str:
    """The words with which a job refuses a config, "" if it takes it."""
    try:
        load_config([("the plan", config)])
    except ConfigError as error:
        return str(error)
    return ""
