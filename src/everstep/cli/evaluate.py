"""`everstep eval`: the task's own metrics of trained weights, on its test split."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from everstep.base.config import Config
from everstep.base.errors import ConfigError, EverstepError, TaskError
from everstep.checkpoint.names import step_of
from everstep.cli.checkpoints_exchange import choose, find_place, origin_words, required_key
from everstep.cli.completing import complete_task
from everstep.cli.job import Request, effective_config, read_job
from everstep.cli.signed import require_signature, vouched
from everstep.cli.task_loading import make_task, parse_task
from everstep.cli.verify import find_weights, read_weights
from everstep.report.words import number_text
from everstep.runtime.link.address import JOB_FILE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from everstep.checkpoint.reader import Checkpoint
    from everstep.train.task import Task


class WeightsGiven(NamedTuple):
    """Where weights come from. give: puts them into a model, tensor by tensor. on_disk: tensors by name that lie on a
    disk, and take no memory of their own."""

    give: Callable[[nn.Module], None]
    on_disk: Callable[[], Mapping[str, Tensor]]


@click.command()
@click.argument("task", shell_complete=complete_task)
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR_OR_CHECKPOINT",
    help="Weights: a run directory, a checkpoint or a safetensors file.",
)
@require_signature
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(task: str, source: Path, key_file: str | None, as_json: bool) -> int:
    """Evaluate trained weights of TASK on its test split.

    With --require-signature the weights come from a checkpoint, because final/ has no signature: the checkpoint that
    --from names, else the newest.
    """
    key = required_key(key_file)
    with _weights(source, key, shown=not as_json) as (name, weights):
        metrics, samples = evaluate_task(task, source, weights)
    if as_json:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        told = {"task": task, "from": name, "split": "test", "samples": samples, "metrics": finite}
        print(json.dumps({**told, "verified": key is not None}))
        return 0
    print(f"{name}: {samples} test samples" + (", weights with a valid signature" if key is not None else ""))
    for name, value in metrics.items():
        print(f"{name:<16} {number_text(value)}")
    return 0


@contextmanager
def _weights(source: Path, key: str | None, *, shown: bool) -> Iterator[tuple[str, WeightsGiven]]:
    """(name of the weights, what gives a model them); before that it tells the user who signed them."""
    if key is None and not _is_checkpoint(source):
        path = find_weights(source)
        _tell(f"{path}: a safetensors file has no signature", shown)
        read_weights(path)
        yield str(path), WeightsGiven(lambda model: _load(model, _mapped(path)), partial(_mapped, path))
        return
    place = find_place(str(source))
    found = choose(place)
    _tell(f"{found.name}: {origin_words(found)}", shown)
    with vouched(found, place.store, key) as checkpoint:
        yield found.name, WeightsGiven(partial(_from_checkpoint, checkpoint), partial(_put_aside, checkpoint))


def _tell(words: str, shown: bool) -> None:
    if shown:
        print(words, flush=True)


def _is_checkpoint(source: Path) -> bool:
    """Whether the path is a checkpoint, or a directory of nothing but checkpoints."""
    named = step_of(source.name) is not None and not (source / "model.safetensors").is_file()
    return named or (source.is_dir() and not (source / "final").exists() and any(source.glob("step-*")))


def evaluate_task(text: str, source: Path, weights: WeightsGiven) -> tuple[dict[str, float], int]:
    """Metrics by name, and the number of samples behind them.

    Raises: ConfigError if the weights do not fit the task's model; TaskError if the task raises.
    """
    import torch

    from everstep.data.batch import aligned, to_device
    from everstep.data.reading import by_index
    from everstep.train.evaluation import evaluate
    from everstep.train.precision import prepare_torch
    from everstep.train.stage import cut_into_shards
    from everstep.train.task import calling, samples_evaluated_at_once

    spec = parse_task(text)
    if spec.kind == "script":
        raise ConfigError(f"task {text!r} is a script: only a Task can be evaluated from outside")
    task = make_task(spec)
    task.config = _config(task, source)
    device = prepare_torch(task.config)
    try:
        if task.config.meta_init and device.type == "cpu":
            model = _by_unit(task, weights.on_disk())
        else:
            model = calling(task, "build_model").to(device)
            weights.give(model)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    cut_into_shards(task, model, task.config)
    batch_size = samples_evaluated_at_once(task)
    dataset = by_index(calling(task, "build_dataset", "test"), batch_size, task.config.seed)
    size = len(dataset)
    if not size:
        raise ConfigError(f"task {text!r}: its test split is empty")

    def load(chunk: int) -> Any:
        indices = range(chunk * batch_size, min(size, (chunk + 1) * batch_size))
        return aligned(calling(task, "collate", [dataset[i] for i in indices]))

    model.eval()
    try:
        with torch.no_grad():
            metrics = evaluate(
                lambda batch: calling(task, "metrics", model, to_device(batch, device)),
                -(-size // batch_size),
                load,
                gather=lambda data: {0: data},
                members=lambda: (0, (0,)),
                seed=task.config.seed,
            )
    except EverstepError:
        raise
    except Exception as error:
        raise TaskError(f"evaluating {text!r} raised {type(error).__name__}: {error}") from error
    return metrics, size


def _config(task: Task, source: Path) -> Config:
    """Config of the job that the weights come from; else the task's own defaults."""
    for folder in (source, *source.parents[:2]):
        if (folder / JOB_FILE).is_file():
            return read_job(folder).config
    return effective_config(task.defaults, Request(()), script=True)


def _by_unit(task: Task, read: Mapping[str, Tensor]) -> nn.Module:
    """The task's model, whose parameters are these on a disk, and in memory while their unit computes."""
    import torch

    from everstep.exact.layout import aligned_like
    from everstep.exact.shard_guard import OwnHook
    from everstep.train.stage import build_by_module
    from everstep.train.task import calling

    class Moves(OwnHook):
        def __init__(self, unit: nn.Module, *, here: bool) -> None:
            self._own, self._here = [(p, p.data) for p in unit.parameters()], here

        def __call__(self, *_: Any) -> None:
            for parameter, mapped in self._own:
                parameter.data = aligned_like(mapped).copy_(mapped) if self._here else mapped

    def there(name: str, like: nn.Parameter) -> torch.Tensor | None:
        found = read.get(name)
        return found if found is not None and (found.shape, found.dtype) == (like.shape, like.dtype) else None

    build = partial(calling, task, "build_model")
    model, _ = build_by_module(build, task.units, task.config.seed, torch.device("cpu"), there=there)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    own = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    typed = {name: t.to(own[name].dtype) if name in own else t for name, t in read.items()}
    _load(model, {name: t.clone() if name in buffers else t for name, t in typed.items()}, assign=True)
    for unit in task.units(model):
        unit.register_forward_pre_hook(Moves(unit, here=True))
        unit.register_forward_hook(Moves(unit, here=False), always_call=True)
    return model


def _mapped(weights: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(weights)  # it maps the file, so the tensors take no memory of their own


def _put_aside(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """A checkpoint's tensors, each byte verified once, in a file without a name where temporary files are."""
    from everstep.checkpoint.interchange import read_weights

    return read_weights(checkpoint, aside=Path(tempfile.gettempdir())).model


def _load(model: nn.Module, read: Mapping[str, Tensor], *, assign: bool = False) -> None:
    from everstep.exact.extra_state import from_file, is_extra

    try:
        named = {name: from_file(t) if is_extra(name) else t for name, t in read.items()}
        model.load_state_dict(named, assign=assign)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:400]
        raise ConfigError(f"the weights do not fit the task's model: {said}") from None


def _from_checkpoint(checkpoint: Checkpoint, model: nn.Module) -> None:
    from everstep.checkpoint.interchange import PassingWeights

    PassingWeights(checkpoint).fill(model)
