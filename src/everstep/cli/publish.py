"""`everstep publish`: sends a job, past or running, to TensorBoard and others; `run` starts it for its sinks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from everstep.base.cause import Cause
from everstep.base.config import load_config
from everstep.base.config_keys import NOTICES, SINKS
from everstep.base.errors import ConfigError
from everstep.base.leaving import until_ctrl_c
from everstep.base.readable import readable
from everstep.cli.beside import NOTIFY_VARIABLE
from everstep.cli.config_file import said_layers
from everstep.cli.main import complain
from everstep.observe.events import EventLog
from everstep.report.history import History
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE
from everstep.sinks.notices import check_notify
from everstep.sinks.publication import Publication, follow, sole_publisher
from everstep.sinks.sink import SinkFailed, check_installed, make_sink

_LAST_WORDS_S = 60
_NICE = 10


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--to", "names", multiple=True, required=True, metavar="SINK[,SINK]", help=f"{', '.join(SINKS)}.")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="YAML file with notify.* keys, for --to notify."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a notify.* key, for --to notify.")
@click.option("--follow", "-f", "following", is_flag=True, help="Follow until the job is over, or Ctrl-C.")
@click.option("--beside", is_flag=True, hidden=True, help="Follow until standard input ends (a run's own sinks).")
def command(
    run_dir: Path,
    names: tuple[str, ...],
    config_file: Path | None,
    settings: tuple[str, ...],
    following: bool,
    beside: bool,
) -> int:
    """Send the steps and events of the job in DIR to TensorBoard, Weights & Biases, MLflow or OpenTelemetry.

    With --to notify, send notices to the notify.command or notify.webhook given here; those in DIR are not run. Each
    step and event is sent once: run again, the command goes on where it stopped. Its position is kept in DIR/SINK;
    remove that folder to start over.
    """
    sinks = _sinks(names)
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    if not History(run_dir).job:  # read_job would refuse a file of another version
        raise ConfigError(f"{run_dir} is not a run directory: there is no {JOB_FILE} that can be read")
    check_installed(sinks)
    if (beside or following) and len(sinks) > 1:
        raise ConfigError(f"--follow: expected one sink, got {len(sinks)}: follow each in a process of its own")
    notify = _notify(said_layers(config_file, settings)) if NOTICES in sinks else {}
    results = [_publish(run_dir, name, following, beside, notify) for name in sinks]
    return max(results)


def _sinks(names: tuple[str, ...]) -> list[str]:
    """The sinks by name. Raises: ConfigError for an unknown name."""
    wanted = [name.strip() for said in names for name in said.split(",") if name.strip()]
    for name in wanted:
        if name not in (*SINKS, NOTICES):
            raise ConfigError(f"--to: expected {', '.join(SINKS)}, got {name!r}: give e.g. --to {SINKS[0]}")
    if not wanted:
        raise ConfigError(f"--to: expected {', '.join(SINKS)}, got nothing: give e.g. --to {SINKS[0]}")
    return list(dict.fromkeys(wanted))


def _notify(layers: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Notice settings, from the command line or the parent process. Raises: ConfigError if neither names a target."""
    if (said := os.environ.pop(NOTIFY_VARIABLE, None)) is not None:
        return dict(json.loads(said))
    config = load_config(layers).notify
    if config.command is None and config.webhook is None:
        raise ConfigError(
            "--to notify: expected a command or a webhook (those in DIR/job.json are not used), got none: give --set "
            "notify.command=PROGRAM or --set notify.webhook=VARIABLE, or --config FILE"
        )
    check_notify(config)
    return asdict(config)


def _publish(run_dir: Path, name: str, following: bool, beside: bool, notify: dict[str, Any]) -> int:
    def make() -> Publication:
        return Publication(run_dir, name, make_sink(name), notify)

    with sole_publisher(run_dir, name):
        if beside:
            with contextlib.suppress(OSError):
                os.nice(_NICE)
            return 0 if follow(make, _input_ended, _warner(run_dir)) else 1
        if following:
            with until_ctrl_c():
                return 0 if follow(make, lambda s: _job_over(run_dir, s), lambda text, _: complain(text)) else 1
        try:
            print(_once(make(), is_locked(run_dir)))
        except SinkFailed as error:
            complain(str(error))
            return 1
    return 0


def _once(publication: Publication, running: bool) -> str:
    """Send all there is now. Raises: SinkFailed."""
    while publication.advance(over=not running) and not running:
        pass
    publication.end(running)
    if not publication.steps and not publication.events:
        return f"{publication.name}: nothing new"
    return f"{publication.name}: {publication.steps} steps and {publication.events} events"


def _input_ended(seconds: float) -> bool:
    """Wait for the end of standard input: the job is over, or the process that ran it is gone."""
    ready = readable([sys.stdin.fileno()], seconds)
    if ready:
        signal.alarm(_LAST_WORDS_S)  # a hanging call would hang for ever now
    return bool(ready)


def _job_over(run_dir: Path, seconds: float) -> bool:
    time.sleep(seconds)
    return not is_locked(run_dir)


def _warner(run_dir: Path) -> Callable[[str, bool], None]:
    """Function that takes warnings. Those of a running job become its events: the user sees them there."""

    def warn(text: str, running: bool) -> None:
        print(text, file=sys.stderr, flush=True)
        if running:
            events = EventLog(run_dir / EVENTS_FILE)
            said = f"{text}; training goes on, and the sink gets the missed data later"
            events.write("warning", cause=Cause.SINK, reason=said)
            events.close()

    return warn
