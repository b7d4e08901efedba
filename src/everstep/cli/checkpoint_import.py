"""Import of weights: a task's initial state with weights from elsewhere, as a checkpoint of step 0.

Apart from the command line, because it builds the task, which takes torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.base.config import Config, numerics, parse_set
from everstep.base.errors import ConfigError
from everstep.checkpoint.interchange import NAMES, names_record, take_weights
from everstep.checkpoint.interchange_formats import detect, load_weights
from everstep.checkpoint.keys import read_public_key
from everstep.checkpoint.manifest import JobIdentity
from everstep.checkpoint.manifest_writer import write_whole
from everstep.checkpoint.reader import steps_in
from everstep.checkpoint.signing import Signer
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.checkpoint.transfer import transfer
from everstep.cli.config_file import read_config_file
from everstep.cli.job import Request, effective_config
from everstep.cli.task_loading import make_task, parse_task
from everstep.exact.seeding import build_seed, seed_all
from everstep.train.elastic import ElasticOrder, sample_order
from everstep.train.precision import prepare_torch
from everstep.train.replica import StageReplica
from everstep.train.stage import Parts
from everstep.train.task import Task, calling
from everstep.train.trainer import EarlyStop


def import_weights(
    path: Path,
    text: str,
    store: BlobStore,
    config_file: Path | None,
    settings: tuple[str, ...],
    scratch: Path,
    told: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """Build the task, give it the weights, and write step 0 into the store. Returns the facts to show the user.

    scratch: an empty directory for files that go to an object store. told: called with the origin of the weights before
    they are read.

    Raises: ConfigError naming what does not fit; StoreError; TaskError.
    """
    kind = detect(path)
    if steps_in(store):
        raise ConfigError(f"{store.url} has checkpoints already: choose another --to")
    spec = parse_task(text)
    if spec.kind == "script":
        raise ConfigError(f"task {text!r} is a script: only a Task's weights can be imported")
    told(f"{path}: {kind} without a signature; it is read as data only")
    weights = load_weights(path)
    task = make_task(spec)
    layers = [(str(config_file), read_config_file(config_file))] if config_file is not None else []
    layers += [("--set", dict([parse_set(item)])) for item in settings]
    config = effective_config(task.defaults, Request(tuple(layers)), script=True)
    replica = initial_replica(task, config)
    parts = replica.parts
    taken = take_weights(weights, parts.model, parts.optimizer)
    identity = JobIdentity(spec.canonical, numerics(config))
    target = store if isinstance(store, DirectoryStore) else DirectoryStore(scratch)
    application = {NAMES: names_record(parts.model)}
    key = config.checkpoint.sign_key
    manifest = write_whole(
        target,
        replica.state,
        identity,
        reason=f"imported from {path}",
        application=application,
        signer=Signer(key) if key is not None else None,
    )
    if target is not store:
        transfer(target, store, manifest.step)
    return {
        "from": str(path),
        "format": kind,
        "to": store.url,
        "step": manifest.step,
        "task": identity.task,
        "taken": taken,
        "tensors": len(weights.model),
        "optimizer": weights.optimizer is not None,
        "signed_by": None if key is None else read_public_key(key),
    }


def initial_replica(task: Task, config: Config) -> StageReplica:
    """State that a worker of the job begins with.

    Raises: TaskError naming the method that raised.
    """
    device = prepare_torch(config)
    seed_all(build_seed(config.seed))
    task.config = config
    model = calling(task, "build_model").to(device)
    units = calling(task, "units", model)
    extras: dict[str, Any] = {"everstep.early_stop": EarlyStop(config.early_stop)}
    dataset = calling(task, "build_dataset", "train") if config.batch == "per_worker" else None
    optimizer = calling(task, "build_optimizer", list(model.parameters()))
    scheduler = calling(task, "build_scheduler", optimizer)
    order = sample_order(config, dataset) if dataset is not None else None
    if isinstance(order, ElasticOrder):
        extras["everstep.order"] = order
    return StageReplica(Parts(model, optimizer, scheduler, units, extras), config, device)
