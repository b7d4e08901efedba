"""`micro_batch: auto`: the largest lane that fits, found before a job starts. The global batch stays as it is.

A lane fits if what `everstep plan memory` counts has room, and a forward and a backward pass of it really end, in a
fork of the job's fork server. Both numbers decide the bits, so a job that goes on keeps those of its job.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.base.config import Config
from everstep.base.errors import ConfigError
from everstep.cli.job import Request, effective_config, read_job
from everstep.cli.probe import probe_task
from everstep.cli.task_loading import make_task, parse_task
from everstep.cost.memory import GB, WORKER_BYTES, Model, Split, most_nodes, of_ours
from everstep.protocol.converter import converter
from everstep.runtime.host.fork_server_client import EarlyForkServer, ForkEnded
from everstep.runtime.link.address import JOB_FILE
from everstep.runtime.process import available_bytes

_request = converter(Request)

if TYPE_CHECKING:
    from everstep.train.task import Task

KEY, SOURCE = "micro_batch", "micro_batch=auto"
ROOM = 0.8
"""Share of the free memory that a worker may be counted to need."""


class AutoLane(NamedTuple):
    """Samples of a lane, lanes, and what to tell the user."""

    micro_batch: int
    lanes: int
    words: str


def take_auto(
    layers: Sequence[tuple[str, dict[str, Any]]], name: str = KEY
) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """The layers without `NAME: auto`, and whether that is what they say last."""
    said = [layer[name] for _, layer in layers if name in layer]
    if not said or not _is_auto(said[-1]):
        return [*layers], False
    return [(source, {key: value for key, value in layer.items() if key != name}) for source, layer in layers], True


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def choose_lane(task: str, request: Request, server: EarlyForkServer, before: Path | None) -> AutoLane:
    """The lane with which a job starts: that of the job or the checkpoint with which it goes on, else the largest that
    fits. before: run directory that it may go on in, None if it starts over.

    Raises: ConfigError, one line: what is set does not go with it, or no lane fits; as `_kept`.
    """
    asked, request = request, replace(request, batch_size=None)  # the batch need not be a multiple of lanes yet unknown
    config = effective_config(probe_task(task, request, server).defaults, request)
    _refuse(config, request)
    batch = config.lanes * config.micro_batch if asked.batch_size is None else asked.batch_size
    if batch < config.workers:
        raise ConfigError(
            f"--batch-size: expected at least one sample for each of {config.workers} workers, got {batch}"
        )
    kept = _kept(config, before)
    if kept is not None and kept.lanes * kept.micro_batch == batch:
        return kept
    sizes = lane_sizes(batch, config.workers)
    question = {"task": task, "request": asdict(request), "batch": batch, "sizes": sizes}
    try:
        counted = _asked(server, question)
    except ForkEnded as error:
        raise ConfigError(f"micro_batch: auto: the process that counted task {task!r} ended ({error})") from None
    fitting = [size for size, count in zip(sizes, counted["bytes"], strict=True) if count <= counted["room"]]

    def ends(size: int) -> bool:
        try:
            return bool(_asked(server, question | {"try": size})["ends"])
        except ForkEnded:
            return False

    size = largest(fitting, ends)
    if size is None:
        raise ConfigError(
            f"micro_batch: auto: no lane of a batch of {batch} fits: the smallest, of {sizes[0]}, needs "
            f"{counted['bytes'][0] / GB:.3g} of {counted['room'] / GB:.3g} GB: use fewer workers per device, or a "
            "smaller model"
        )
    needs = counted["bytes"][sizes.index(size)]
    words = (
        f"{SOURCE}: {size} samples per lane, {batch // size} lanes: {needs / GB:.3g} of {counted['room'] / GB:.3g} GB "
        f"per worker, of {', '.join(map(str, sizes))}"
    )
    return AutoLane(size, batch // size, words)


def _kept(config: Config, before: Path | None) -> AutoLane | None:
    """The lane of the job in this directory, else of the checkpoint to start from; None if there is neither.

    Raises: ConfigError, CheckpointCorrupt, StoreError if that cannot be read.
    """
    if before is not None and (before / JOB_FILE).exists():
        numbers: Mapping[str, Any] = vars(read_job(before).config)
        where = f"the job in {before}"
    elif config.resume_from is not None:
        from everstep.cli.checkpoints_exchange import choose, find_place

        rule = config.checkpoint.object
        found = choose(find_place(config.resume_from, rule.endpoint, rule.region))
        numbers, where = found.manifest.identity["numerics"], f"the checkpoint {found.name}"
    else:
        return None
    size, lanes = numbers.get(KEY), numbers.get("lanes")
    if not isinstance(size, int) or not isinstance(lanes, int):
        return None
    return AutoLane(size, lanes, f"{SOURCE}: {size} samples per lane, as {where} has them")


def with_lane(request: Request, chosen: AutoLane) -> Request:
    """The request with the lane that was chosen."""
    return replace(request, layers=(*request.layers, (SOURCE, {"lanes": chosen.lanes, KEY: chosen.micro_batch})))


def lane_sizes(batch: int, workers: int) -> list[int]:
    """Samples of a lane that divide the batch and leave each worker a lane, the smallest first."""
    return [size for size in range(1, batch // workers + 1) if batch % size == 0]


def largest(sizes: Sequence[int], ends: Callable[[int], bool]) -> int | None:
    """The largest of these sizes with which a lane ends, None if there is none."""
    return next((size for size in reversed(sizes) if ends(size)), None)


def _refuse(config: Config, request: Request) -> None:
    """Raises: ConfigError naming a key with which the lane cannot be chosen."""
    reasons = {
        "lanes": ("lanes" in request.explicit, config.lanes, "it chooses the number of lanes, too"),
        "accumulate": (config.accumulate > 1, config.accumulate, "it chooses the number of lanes, too"),
        "stages": (config.stages > 1, config.stages, "it looks at one lane of the whole model"),
        "cell.fsdp": (config.cell.fsdp > 1, config.cell.fsdp, "it looks at one lane of the whole model"),
        "cell.tp": (config.cell.tp > 1, config.cell.tp, "it looks at one process"),
        "batch": (config.batch != "constant", config.batch, "it keeps the global batch"),
        "hosts.min": (config.hosts.min > 1, config.hosts.min, "it looks at the devices of this host alone"),
    }
    for name, (refused, value, why) in reasons.items():
        if refused:
            raise ConfigError(f"micro_batch: auto does not go with {name}={value}: {why}; give a number")


def _asked(server: EarlyForkServer, question: dict[str, Any]) -> dict[str, Any]:
    """The answer of a fork. Raises: ConfigError if it says so; ForkEnded."""
    said: dict[str, Any] = server.call(f"{__name__}:answer", question)
    if "error" in said:
        raise ConfigError(said["error"])
    return said


# ---- in the fork


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a worker by size of its lanes, and its room; with `try`, whether a lane of that size ends."""
    try:
        task = make_task(parse_task(question["task"]))
        request = _request(question["request"])
        config = task.config = effective_config(dict(task.defaults), request)
        if "try" in question:
            from everstep.train.trial_lane import lane_ends

            return {"ends": lane_ends(task, question["try"])}
        return {
            "bytes": [_bytes(task, question["batch"], size) for size in question["sizes"]],
            "room": round(_room(config)),
        }
    except ConfigError as error:
        return {"error": f"micro_batch: auto: {error}"}


def _bytes(task: Task, batch: int, size: int) -> int:
    """As `everstep plan memory` counts. Raises: ConfigError if activations cannot be counted."""
    from everstep.train.counted import count_task

    found, config = count_task(task, size), task.config
    lacking = [one for one in found.assumed if one.startswith("no activations")]
    if lacking:
        raise ConfigError(f"expected a model that can be counted, got {lacking[0]}: give a number")
    workers, lanes = config.workers, batch // size
    sizes = (found.parameters, found.parameter_bytes, found.optimizer_bytes, found.buffer_bytes, found.activation_bytes)
    nodes, offload = most_nodes(workers, lanes), config.zero.offload is not None
    split = Split(workers, lanes, nodes, config.zero.copies, offload)
    return round(of_ours(Model(*sizes, WORKER_BYTES, *found.undivided), split, config.zero.stage).total)


def _room(config: Config) -> float:
    """Bytes of each worker: of the memory of this host, or of its devices."""
    if config.device == "cpu":
        return ROOM * available_bytes() / config.workers
    import torch

    devices = 1 if ":" in config.device else torch.cuda.device_count()
    whole = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return ROOM * whole / -(-config.workers // devices)
