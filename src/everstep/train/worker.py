"""The body of a launched worker: assemble, train, and say clearly why if it ends badly."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from everstep.base.cause import Why
from everstep.base.config import Config
from everstep.base.errors import (
    ConfigError,
    DeterminismError,
    EverstepError,
    Evicted,
    InvariantViolation,
    JobFailed,
    NonFinite,
    StateTainted,
    TaskError,
    Uncarried,
    cause_of,
    one_line,
)
from everstep.protocol import messages as wire
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.process import AGAIN, RETURNS
from everstep.script.importing import import_from_script
from everstep.train import join
from everstep.train.console import LeaderConsole
from everstep.train.job_parts import assemble_task
from everstep.train.offload_parameters import build_in_files
from everstep.train.published import Publisher
from everstep.train.rehearsing import beside_worker
from everstep.train.task import Task, where
from everstep.train.trainer import train
from everstep.train.worker_link import Faults, LaunchedLink

log = logging.getLogger(__name__)

_FATAL = (ConfigError, DeterminismError, NonFinite, Uncarried)
_STATELESS = (JobFailed, Evicted, DeterminismError, ConfigError, StateTainted)
"""Exceptions that end a worker without a state worth saving."""


def run_worker(
    context: WorkerContext,
    load: Callable[[Config], Task] | None,
    script: str | None,
    faults: Faults,
    linked: Callable[[LaunchedLink], None] = lambda link: None,
) -> int:
    """Train as the worker of this context: a task (`load`), or a script that calls `join`. Returns the exit code.

    load: makes the task, with this config set. linked: called with the link before it is used, so that a test or a
    scripted fault can disturb it.

    0: the job is over, or this worker was drained. 75: it was evicted, and may come back as a new life; 76: the same,
    because of another's loss. 1: it failed; its last words went to the coordinator and the log.
    """
    config = context.load_config()
    build_in_files(config)
    link = LaunchedLink(context, config, faults)
    linked(link)
    try:
        if load is not None:
            task = load(config)
            run, early_stop = assemble_task(link, task)
            with contextlib.closing(run), _held(link, context, run.hold):
                with _leaving():
                    train(task, run, early_stop)
                run.loop.leave()
        elif script is not None:
            _run_script(link, script, context)
        return 0
    except (JobFailed, Evicted) as end:
        log.info("leaving: %s", end)
        if not isinstance(end, Evicted) or end.drained:
            return 0
        return RETURNS if end.returns else AGAIN
    except Exception as error:
        _last_words(link, context, error)
        return 1
    finally:
        link.close()


@contextlib.contextmanager
def _held(link: LaunchedLink, context: WorkerContext, hold: Callable[[wire.WorkerFailed], None]) -> Iterator[None]:
    """If the body raises, this worker stays for as long as its state is needed."""
    try:
        yield
    except _STATELESS:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            hold(failure(link, context, error, describe(error), holds=True))
        raise


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """sys.exit(0) ends the user's code in order. Raises: TaskError for another exit code, which means failure, and
    for a BaseException such as KeyboardInterrupt, because the handling of failures goes by TaskError."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise TaskError(f"sys.exit({end.code!r:.200}) was called") from None
    except Exception:
        raise
    except BaseException as error:
        raise TaskError(describe(error)) from error


def _run_script(link: LaunchedLink, script: str, context: WorkerContext) -> None:
    conclude = beside_worker(link, script, context.argv, join.rehearsed_with)
    join.launched_with(link, conclude)
    sys.argv = [script, *context.argv]
    import_from_script(Path(script))
    most_bytes = int(link.config.logs.max_mb * (1 << 20))
    console = LeaderConsole(sys.stdout, context.run_path, join.leads, context.incarnation == 0, most_bytes)
    with contextlib.redirect_stdout(console):
        try:
            with _held(link, context, join.hold):
                with _leaving():
                    runpy.run_path(script, run_name="__main__")
                join.leave()
        finally:
            join.close()
            console.finish()
    if not join.was_called():
        raise ConfigError(f"{script} ended without calling everstep.join(model, optimizer, dataset)")


def _last_words(link: LaunchedLink, context: WorkerContext, error: Exception) -> None:
    reason = describe(error)
    log.critical("%s", reason, exc_info=error)
    if join.over():  # else nobody would hear of it: the job has ended well
        text = f"worker {link.me.worker_id}: the job is complete, but what follows the script's loop failed: {reason}"
        with contextlib.closing(Publisher(link.run_dir, link.me)) as publisher:
            publisher.emit("warning", step=link.row.read().step, cause=cause_of(error), reason=text)
    try:
        context.write_last_words(Why(cause_of(error), reason))
    except OSError as problem:
        log.warning("last words not written: %s", problem)
    link.announce(lambda: failure(link, context, error, reason))


def failure(
    link: LaunchedLink, context: WorkerContext, error: Exception, reason: str, *, holds: bool = False
) -> wire.WorkerFailed:
    """The message that tells the coordinator."""
    tainted = error if isinstance(error, StateTainted) else None
    signature = getattr(error, "signature", "") or hashlib.blake2b(reason.encode(), digest_size=8).hexdigest()
    return wire.WorkerFailed(
        worker_id=context.worker_id,
        incarnation=context.incarnation,
        step=link.row.read().step,
        cause=cause_of(error),
        reason=reason,
        signature=signature,
        fatal=isinstance(error, _FATAL) or (isinstance(error, TaskError) and link.row.read().step == 0),
        generation=tainted.generation if tainted else link.row.read().generation,
        exit_code=error.exit_code if isinstance(error, EverstepError) else 1,
        holds=holds,
        sound=tainted.sound if tainted else -1,
        tainted=tainted.step if tainted else 0,
    )


def describe(error: BaseException) -> str:
    """One line for the user."""
    text = one_line(str(error)) or "no message"
    if isinstance(error, EverstepError):
        return text
    if isinstance(error, InvariantViolation):
        return f"a bug in Everstep: {text}"
    return f"{type(error).__name__}: {text}{where(error)}"
