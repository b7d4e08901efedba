"""`everstep.join`: for people with a loop of their own. A few changed lines, no inheritance.

Under `everstep run` the script is one of many workers; by itself it is a job of one worker with the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from everstep.base.below import write_atomically, write_privately
from everstep.base.config import Config, check_keys, device_of, dotted, load_config, read_layers, to_dict
from everstep.base.errors import ConfigError
from everstep.base.package_versions import refuse_versions
from everstep.base.plan import WorkerKey
from everstep.data.given_loader import AsRead, Collate, read_data
from everstep.data.reading import reading_of
from everstep.exact.image import BESIDE
from everstep.exact.seeding import build_seed, seed_all
from everstep.exact.several import optimizers_of, schedulers_of
from everstep.order.permutation import MAX_SIZE
from everstep.protocol import messages as wire
from everstep.runtime.files.private import close_run_dir, refuse_foreign
from everstep.runtime.link.address import DATASET_FILE
from everstep.script.adopted import become_job
from everstep.script.beside_state import BesideState
from everstep.script.foreign_trainers import watch_trainers
from everstep.script.join_again import second_call
from everstep.script.loop_values import LoopValues
from everstep.script.restarts import unpassed
from everstep.script.unpassed import unpassed_scheduler
from everstep.script.unsupported import (
    refuse_elsewhere,
    refuse_group,
    refuse_scaler,
    refuse_unmade,
    refuse_unsupported,
    schedule_of_epochs,
)
from everstep.train.given_optimizers import name_alone, one_optimizer, schedulers_apart
from everstep.train.global_batch import sized
from everstep.train.job_data import alone_in, moving_by_itself
from everstep.train.job_parts import assemble
from everstep.train.precision import prepare_torch
from everstep.train.rehearsal import LifeLink, WatchedLoop
from everstep.train.rehearsing import Conclude, beside_script, main_script
from everstep.train.run import Run
from everstep.train.script_errors import say_in_one_line
from everstep.train.stage import Parts
from everstep.train.worker_link import LaunchedLink, LoneLink, WorkerLink

_TWICE = (
    "{what}, but a worker belongs to one job: put both parts into one loop, by step.number, or into two scripts, of "
    "which the second loads what the first has left (final/model.safetensors in its run directory)"
)
_launched: LaunchedLink | LifeLink | None = None
_called = False
_run: Run | None = None
_conclude: Conclude | None = None


def launched_with(link: LaunchedLink, conclude: Conclude) -> None:
    """Called by the worker before it runs a script: `join` belongs to this job. conclude: the script's rehearsal."""
    global _conclude
    _enter(link)
    _conclude = conclude


def rehearsed_with(link: LifeLink) -> None:
    """Called before a script is rehearsed: `join` belongs to this life."""
    _enter(link)


def _enter(link: LaunchedLink | LifeLink) -> None:
    global _launched, _called
    _launched, _called = link, False
    watch_trainers()
    seed_all(build_seed(link.config.seed))


def is_launched() -> bool:
    """Whether this process is a worker of `everstep run`, or a rehearsed life."""
    return _launched is not None


def active_workers() -> int:
    """Number of workers that this process's job begins with, and that need a lane each."""
    return 1 if _launched is None or _launched.config.redundancy is not None else _launched.config.workers


def in_turn() -> contextlib.AbstractContextManager[Path | None]:
    """While inside, no other worker of this job on this host is."""
    return alone_in(_launched.run_dir if _launched is not None else None)


def device_for(own: str | None) -> str:
    """Where this process's model has to be, before it joins: the user's word comes before the script's own."""
    if _launched is None:
        return own or Config.device
    config = _launched.config
    if own is not None and "device" not in _launched.job.get("explicit", ()):
        config = replace(config, device=own)
    return device_of(config, _launched.me.worker_id)


def was_called() -> bool:
    """Whether the script has called `join`."""
    return _called


def hold(words: wire.WorkerFailed) -> None:
    """The script has raised; its state may be needed."""
    if _run is not None:
        _run.hold(words)


def leave() -> None:
    """The script has ended; if its loop has not, it was left."""
    if _run is not None:
        _run.loop.leave()


def over() -> bool:
    """Whether the job that the script has joined is complete."""
    return _run is not None and _run.loop.over


def close() -> None:
    """The script is over."""
    if _run is not None:
        _run.close()


def leads() -> bool | None:
    """Whether this worker leads the job that the script has joined; None while there is no plan to say so."""
    return _run.leads if _run is not None else None


def join(
    model: nn.Module,
    optimizer: Any,
    dataset: Any,
    lanes: int = 8,
    micro_batch: int | None = None,
    scheduler: Any = None,
    clip_norm: float | None = None,
    state: Mapping[str, Any] | LoopValues | None = None,
    *,
    units: Sequence[nn.Module] | None = None,
    collate: Collate | None = None,
    run_dir: str | Path | None = None,
    ignore: Sequence[Any] = (),
    **config: Any,
) -> Run:
    """Make this process a worker of a job, and return the job's steps to iterate over.

    - `optimizer`, `scheduler`: each is one, or a list or dict of several. Optimizers are stepped in this order. The
      loop itself steps schedulers that go by a metric (ReduceLROnPlateau).
    - `dataset`: map-style, a stream, or a DataLoader, of which join takes dataset, order, collate_fn, processes and
      batch_size, the size of the global batch.
    - `lanes`, `micro_batch` (8): the global batch has `lanes` x `micro_batch` samples, on any number of workers.
      `accumulate=k` multiplies the lanes by k.
    - `state`: everything else to heal and save: the result of everstep.state(best=1e9, wait=0), or, by name, such
      objects and others with state_dict and load_state_dict.
    - `units`: the finest cuts of the model, in order.
    - `run_dir`: directory of a job of one worker. The job takes checkpoints there, and goes on from the newest one when
      the script is run again. Its owner alone can read the files that this process writes; os.umask changes that.
    - `ignore`: values that the loop may keep without `state`, as objects or as names ("meter", "trainer.history").
    - `config`: further keys (steps=..., precision=..., seed=...). Under `everstep run`, keys given there win.

    Other values that the loop keeps from step to step are lost in a worker that is resumed or healed. So a script is
    rehearsed before its first step, and refused if it keeps any; `rehearse=False` skips this. Seed before you build the
    model (torch.manual_seed(...)): a job seeds every worker alike before it runs the script.

    In a process that torchrun, srun, mpirun or the like has started as one of several, this does not return: all of
    them become one job (`everstep run` of the script), whose workers run the script from its beginning. So the code
    before `join` is run again, and the code after it by workers alone.

    Raises: ConfigError for arguments that cannot work; SystemExit (2) in a process that cannot be part of one job.
    """
    global _called, _run
    _called = _is_first(sys._getframe(1))
    data = read_data(dataset, collate)
    ignore = (*ignore, *moving_by_itself(data.dataset))
    given = {"lanes": lanes, "micro_batch": micro_batch, "clip_norm": clip_norm, **data.settings, **dotted(config)}
    link = _link(given, Path(run_dir) if run_dir is not None else None, data.batch_size)
    extras = _carried(state)
    named, optimizer = name_alone(optimizer), one_optimizer(optimizer)
    scheduler, extras = schedulers_apart(scheduler, optimizer, extras)
    refuse_unsupported(model, optimizer, scheduler)
    refuse_scaler(extras)
    refuse_unmade(model)
    refuse_group()
    lost = _lost_scheduler(link, optimizer, (*schedulers_of(scheduler), *extras.values()), ignore)
    device = prepare_torch(link.config, link.me.worker_id)
    refuse_elsewhere(model, device)
    extras |= {**data.extras, **({BESIDE: BesideState(model, extras)} if extras else {})}
    parts = Parts(model, optimizer, scheduler, list(units) if units else [model], extras, named=named)
    _tell_ledger(link, data.dataset)
    watched = link.config.rehearse and not isinstance(link, LifeLink)
    ignored, given_data = tuple(ignore) if watched else None, AsRead(dataset, data)
    _run = assemble(link, parts, data.dataset, data.collate, device, ignored=ignored, given=given_data)
    if isinstance(link, LifeLink):
        link.follow(WatchedLoop(tuple(ignore), unpassed=lost, data=(data.dataset, data.collate), given=dataset))
    else:
        _run.remarks.extend([*filter(None, [_rehearsed(link)]), *_remark_on_schedule(link, _run, scheduler)])
    return _run


def _carried(state: Any) -> dict[str, Any]:
    """What `state=` names. Raises: ConfigError for what has no names."""
    if state is not None and not isinstance(state, LoopValues | Mapping):
        got = type(state).__name__
        raise ConfigError(f"state: expected objects by name ({{'ema': ema}}) or an everstep.state(...), got {got}")
    return {"state": state} if isinstance(state, LoopValues) else dict(state or {})


def _is_first(frame: FrameType) -> bool:
    """True. Raises: ConfigError in a job, or a script, if this call of `join`, from this frame, is the second, or one
    follows."""
    if _launched is None:
        say_in_one_line()
        refuse_versions("torch", "numpy")
        if main_script() is None:  # a notebook, a test: any number of jobs
            return True
    if _called:
        raise ConfigError(_TWICE.format(what="everstep.join was called twice in one script"))
    if line := second_call(frame, join):
        raise ConfigError(_TWICE.format(what=f"everstep.join is called again, in line {line} of this script"))
    return True


def _lost_scheduler(
    link: WorkerLink, optimizer: Any, known: Sequence[Any], ignore: Sequence[Any]
) -> tuple[str, str] | None:
    """A scheduler that join was not given; a rehearsed life tells of it. known: what it was given. Raises: ConfigError,
    in a life that is to train."""
    frame = sys._getframe(1)
    each = (unpassed_scheduler(one, known, ignore, frame) for one in optimizers_of(optimizer).values())
    lost = next(filter(None, each), None)
    if lost is not None and link.config.rehearse and not isinstance(link, LifeLink):
        raise ConfigError(str(unpassed(*lost)))
    return lost


def _link(given: Mapping[str, Any], run_dir: Path | None, loaded: int | None) -> WorkerLink:
    """This process's link to the job, with all that is known of its config by now. loaded: batch size of a loader."""
    if _launched is not None:
        alone = isinstance(_launched, LifeLink) and not _launched.launched
        _launched.fill_up(_alone(given, loaded) if alone else _merge(_launched, given, loaded))
        return _launched
    become_job(given, run_dir)
    link = LoneLink(_alone(given, loaded), run_dir)
    if run_dir is not None:
        write_privately()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {run_dir}: {error.strerror or error}") from None
        refuse_foreign(run_dir)
        with contextlib.suppress(OSError):  # what is root's
            close_run_dir(run_dir)
    return link


def _rehearsed(link: WorkerLink) -> str:
    """Wait for the rehearsal. Returns why there was none, "" if there was or need not be. Raises: ConfigError."""
    if _conclude is not None:
        note = _conclude()
        return note if link.config.rehearse else ""
    if link.run_dir is None or not link.config.rehearse or not link.config.checkpoint.enabled:
        return ""  # nobody will ever go on with it
    return beside_script(link.run_dir)()


def _remark_on_schedule(link: WorkerLink, run: Run, scheduler: Any) -> list[str]:
    """What is said, once in a job, if a schedule was made for one step an epoch."""
    if link.me != WorkerKey(0, 0) or run.total_steps >= MAX_SIZE:
        return []
    remark = schedule_of_epochs(scheduler, link.config.epochs, run.total_steps)
    if remark and isinstance(link, LoneLink):
        print(f"everstep: {remark}", file=sys.stderr)
    return [remark] if remark else []


def _tell_ledger(link: WorkerLink, dataset: Any) -> None:
    """Write down facts that only the script knew: the ledger cannot be checked without them."""
    if link.run_dir is None or not hasattr(dataset, "__len__") or reading_of(dataset).streamed:
        return
    said = to_dict(link.config)
    facts = {key: said[key] for key in ("lanes", "micro_batch", "steps", "epochs", "shuffle", "seed")}
    facts["size"] = len(dataset)
    with contextlib.suppress(OSError):  # a full disk does not stop training; `everstep ledger` will say what it lacks
        link.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(link.run_dir / DATASET_FILE, json.dumps(facts) + "\n")


def _alone(given: Mapping[str, Any], loaded: int | None = None) -> Config:
    own = _values(given)
    own = sized(own, to_dict(Config()), loaded=loaded)
    if own.get("steps") is None and own.get("epochs") is None:
        own = {**own, "epochs": 1}
    config = load_config([("join", own)])
    if config.resume_from is not None:
        raise ConfigError(
            "resume_from is for everstep run; by itself a script goes on in the run_dir it was stopped in"
        )
    return config


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values that a script has given to `join`, by dotted key. Raises: ConfigError for unknown keys, bad values."""
    check_keys("join", given)
    return read_layers([("join", {key: value for key, value in dotted(given).items() if value is not None})])


def _merge(link: LaunchedLink | LifeLink, given: Mapping[str, Any], loaded: int | None = None) -> Config:
    """The job's config, filled up with the script's values for keys that the user has not set."""
    job, explicit = to_dict(link.config), link.job.get("explicit", ())
    own = sized(_values(given), job, explicit, loaded=loaded, asked=link.job.get("batch_size"))
    merged = load_config([("job.json", job), ("join", own)])
    if merged.steps is None and merged.epochs is None:
        merged = load_config([("job.json", to_dict(merged)), ("join", {"epochs": 1})])
    return merged
