"""Look at a task before its job starts, in a fork of its fork server: defaults, size of the data, units of the model.

Neither torch nor the user's code thus ever runs in the job's process or in the fork server itself. Exceptions of the
user's code are not reported from here: the workers meet them too, and their logs keep the traceback.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from everstep.base.config import Config
from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError
from everstep.base.stage_map import devices_of, parse_map
from everstep.cli.job import Request, effective_config
from everstep.cli.lane_digest import lane_digest
from everstep.cli.task_loading import make_task, parse_task
from everstep.protocol.converter import converter
from everstep.runtime.host.fork_server_client import EarlyForkServer, ForkEnded

_request = converter(Request)

if TYPE_CHECKING:
    from everstep.train.task import Task


@dataclass(frozen=True)
class Probe:
    """Facts about a task. `dataset_size` None: no dataset could be built. units: class names of the model's units.

    cut: [first unit, unit after the last] of each part; stage_parameters: elements by stage, shared ones counted once.
    unit_ms: time of each unit for one lane, if asked for. split_checked: the task was proven to be splittable; the
    workers need not look again. lane_digest: as the function has it, "" if no other host may come, or it
    cannot be had. notes: as in `Task.notes`.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    dataset_size: int | None = None
    units: list[str] = field(default_factory=list)
    cut: list[list[int]] = field(default_factory=list)
    stage_parameters: list[int] = field(default_factory=list)
    unit_ms: list[float] = field(default_factory=list)
    split_checked: bool = False
    lane_digest: str = ""
    notes: list[str] = field(default_factory=list)


def probe_task(task: str, request: Request, server: EarlyForkServer, *, units: bool = False) -> Probe:
    """Run `look` in a fork of `server`. units: build the model too.

    Raises: ConfigError with the line that the fork gave for the task's import, its defaults or the config.
    """
    question = {"task": task, "request": asdict(request), "units": units}
    try:
        return read_answer(server.call(f"{__name__}:answer", question))
    except ForkEnded as error:
        raise ConfigError(
            f"task {task!r}: the process that imported it and built its dataset ended ({error})"
        ) from None


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a question as JSON; runs in the fork."""
    request = _request(question["request"])
    try:
        return {"probe": asdict(look(question["task"], request, question["units"]))}
    except ConfigError as error:
        return {"error": str(error)}


def with_device(request: Request, server: EarlyForkServer) -> Request:
    """The request with the device that `device: auto` stands for: cuda where torch sees a GPU, else cpu.

    A job that goes on has its device in job.json, and another one is refused as any other change of it.

    Raises: ConfigError if torch cannot be asked.
    """
    try:
        found: str = server.call(f"{__name__}:device_here", None)
    except ForkEnded as error:
        raise ConfigError(f"device: auto: the process that asked torch ended ({error}); give cpu or cuda") from None
    return replace(request, layers=(*request.layers, ("device=auto", {"device": found})))


def device_here(_: None) -> str:
    """`cuda` or `cpu`; runs in the fork."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def read_answer(said: dict[str, Any]) -> Probe:
    """The probe in a fork's answer. Raises: ConfigError if the fork did."""
    if "error" in said:
        raise ConfigError(said["error"])
    return Probe(**said["probe"])


def look(task_text: str, request: Request, units: bool) -> Probe:
    """Import the task, and build its dataset (and model) under the effective config, in this process.

    Raises: ConfigError.
    """
    try:
        task = make_task(parse_task(task_text))
        defaults = json.loads(json.dumps(dict(task.defaults)))
        task.config = effective_config(defaults, request)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task {task_text!r}: its defaults: {error}") from None
    from everstep.data.reading import reading_of

    _check_devices(task.config)
    size: int | None = None
    dataset: Any = None
    notes: list[str] = []
    with _left_to_workers():
        dataset = task.build_dataset("train")
        size = reading_of(dataset).size
        check_metric(task)
        _check_parts(task)
        _check_shards(task)
        notes = task.notes()
    probe, digest = Probe(defaults, size, notes=notes), ""
    with _left_to_workers():
        digest = "" if is_loopback(task.config.network.address) else lane_digest(task, dataset)
    probe = replace(probe, lane_digest=digest)
    if task.config.stages > 1:
        with _left_to_workers():
            probe = _look_at_split(task, probe)
    return look_at_model(task_text, task, probe) if units else probe


@contextlib.contextmanager
def _left_to_workers() -> Iterator[None]:
    """Pass ConfigError on and drop other exceptions: the workers meet those too, and report them."""
    try:
        yield
    except ConfigError:
        raise
    except Exception:
        pass


def _check_devices(config: Config) -> None:
    """Raises: ConfigError naming a device of the job that this host lacks."""
    named = {config.device, *devices_of(parse_map(config.map, config.stages)).values()} - {"cpu"}
    if named:
        from everstep.train.precision import resolve_device

        for name in sorted(named):
            resolve_device(name)


def _look_at_split(task: Task, probe: Probe) -> Probe:
    """Check whether the task can be split. A model too large for one process is only cut, not run."""
    from everstep.train.composition import look_at_split
    from everstep.train.stage import chosen_cut

    if task.config.meta_init:
        chosen_cut(task.config, task, _build(task))
        return probe
    found = look_at_split(task)
    if found is None:
        return probe
    cut = [list(part) for part in found.cut]
    return replace(probe, cut=cut, unit_ms=list(found.unit_ms), split_checked=True)


def look_at_model(task_text: str, task: Task, probe: Probe) -> Probe:
    """The probe with the model's units and its cut. Raises: ConfigError if the model cannot be built."""
    from everstep.train.stage import chosen_cut

    try:
        model = _build(task)
        units = task.units(model)
        cut = chosen_cut(task.config, task, model, probe.unit_ms)
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
        raise ConfigError(f"task {task_text!r}: its model cannot be built: {why}") from error
    by_stage = []
    for stage in range(task.config.stages):
        own = [units[i] for first, last in cut[stage :: task.config.stages] for i in range(first, last)]
        by_stage.append(sum(p.numel() for p in {id(p): p for unit in own for p in unit.parameters()}.values()))
    names = [type(unit).__name__ for unit in units]
    return replace(probe, units=names, cut=[list(part) for part in cut], stage_parameters=by_stage)


def _build(task: Task) -> Any:
    """The model without memory for its tensors if possible; else with it."""
    import torch

    try:
        with torch.device("meta"):
            model = task.build_model()
        task.units(model)
        return model
    except Exception:
        return task.build_model()


def _check_parts(task: Task) -> None:
    """Raises: ConfigError if the model, optimizer or scheduler is of an unsupported kind."""
    from everstep.script.unsupported import refuse_unsupported

    model = _build(task)
    optimizer = task.build_optimizer(list(model.parameters()))
    refuse_unsupported(model, optimizer, task.build_scheduler(optimizer))


def _check_shards(task: Task) -> None:
    """Raises: ConfigError if the model cannot be cut into as many virtual shards, or they do not make it up."""
    from everstep.train.shard_check import look_at_shards
    from everstep.train.stage import cut_into_shards

    if task.config.cell.shards > 1:
        cut_into_shards(task, _build(task), task.config)
        if not task.config.meta_init:
            look_at_shards(task)


def check_metric(task: Task) -> None:
    """Raises: ConfigError if the metric of early stop is not among the task's."""
    wanted = task.config.early_stop.metric
    found = None if wanted is None else _metrics(task)
    if found is not None and wanted not in found:
        known = ", ".join(found) or "it has none"
        raise ConfigError(f"early_stop.metric: expected one of the task's metrics ({known}), got {wanted!r}")


def _metrics(task: Task) -> Collection[str] | None:
    """Names of the task's metrics, which those of one test sample show. With meta_init the model may be too large for
    one process: None then, if the task computes them itself, and the first evaluation shows them."""
    import torch

    from everstep.data.reading import first_samples
    from everstep.zoo.recipe import READY_METRICS

    if task.config.meta_init:
        known = {"everstep.train": ("loss",), "everstep.zoo": READY_METRICS}
        return known.get(task.metrics.__module__.rpartition(".")[0])
    model = task.build_model().eval()
    test = task.build_dataset("test")
    with torch.no_grad():
        return task.metrics(model, task.collate(first_samples(test, 1)))
