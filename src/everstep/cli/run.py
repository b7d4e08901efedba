"""`everstep run`: from what the user asks to a job that is over, with everything it says on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config, read_layers
from everstep.base.domains import found_domains
from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError
from everstep.base.foreign import foreign_launcher
from everstep.chaos.spec import parse, strikes_of
from everstep.checkpoint.keys import read_private_key, read_public_key
from everstep.cli.adoption import adopt
from everstep.cli.agent import DOMAIN_HELP, place, take_part_in
from everstep.cli.beside import (
    ANY_PORT,
    PUBLIC_HELP,
    check_installed,
    check_metrics,
    dashboard_beside,
    metrics_beside,
)
from everstep.cli.conclusion import end_of, lacking_rows, say_the_end
from everstep.cli.config_file import said_layers
from everstep.cli.display import Watcher, choose_display, summary
from everstep.cli.doors import check_own_ports, head_doors, slots_here
from everstep.cli.job import (
    JobFile,
    Request,
    about_to_run,
    check_dataset,
    check_hosts,
    check_network,
    effective_config,
    free_port,
    make_job,
    total_steps,
    with_chaos,
    with_cut,
    write_job,
)
from everstep.cli.main import complain
from everstep.cli.placement_table import print_placement
from everstep.cli.probe import Probe, probe_task
from everstep.cli.run_dir import (
    Found,
    StartPoint,
    Trust,
    ask_object_store,
    close_to_others,
    default_run_dir,
    find_start,
    inspect,
    named_directory,
    set_aside,
)
from everstep.cli.signed import not_before
from everstep.cli.standby import begin_leased, check_lease, leaders_work
from everstep.cli.task_loading import TaskSpec, parse_task
from everstep.cli.tokens import given_token, token_in
from everstep.cli.worker import ENTRY, FILES, PRELOAD
from everstep.observe.events import EventLog, read_events
from everstep.report.facts import facts_of
from everstep.runtime.files.private import owner_words
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.host.admission import cannot_strike
from everstep.runtime.host.fork_server_client import EarlyForkServer
from everstep.runtime.lead.etcd_access import taken_secrets
from everstep.runtime.link import wire
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE, TOKEN_FILE
from everstep.runtime.link.interfaces import check_own
from everstep.runtime.link.tls import check_tls
from everstep.sinks.notices import check_notify
from everstep.sinks.sink import check_installed as check_sinks

if TYPE_CHECKING:
    from everstep.runtime.job import Job
    from everstep.runtime.lead.succession import Succession
    from everstep.runtime.supervisor import LocalHost


@dataclasses.dataclass(frozen=True)
class Invocation:
    """One `everstep run`, as the user typed it. port: where agents of others may come, None: they may not. token:
    which they know already. local: this host runs workers, `slots` at most (0: all that nobody
    else runs). domains: in which it is. trust: in which checkpoints
    to begin with. secrets: of this host's user in etcd."""

    spec: TaskSpec
    argv: tuple[str, ...]
    request: Request
    run_dir: Path
    server: EarlyForkServer
    fresh: bool
    as_json: bool
    dashboard: bool
    public: bool
    port: int | None
    token: bytes | None
    local: bool
    slots: int
    trust: Trust
    domains: dict[str, str]
    secrets: dict[str, str] = dataclasses.field(repr=False)

    @property
    def is_script(self) -> bool:
        return self.spec.kind == "script"


_ARGS = "everstep.args"


class _Run(click.Command):
    """`--metrics TASK` asks for metrics, too: only what looks like an address is the option's value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args.index("--") if "--" in args else len(args)
        for at in reversed([i for i in range(own) if args[i] == "--metrics"]):
            if at + 1 < own and not re.search(r":\d+$", args[at + 1]):
                args = [*args[:at], f"--metrics={ANY_PORT}", *args[at + 1 :]]
        ctx.meta[_ARGS] = tuple(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Run)
@click.argument("task")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.option("--workers", type=int, help="Number of workers in total (1, or as the pools need).")
@click.option("--spares", type=int, help="Idle workers that replace a lost worker at once (0).")
@click.option("--min-workers", type=int, help="Wait for more workers while there are fewer (1).")
@click.option("--stages", type=int, help="Parts that the model is split into (1).")
@click.option("--pool", type=int, help="Workers per stage, all active.")
@click.option("--redundancy", type=int, help="Standby backups per stage, beside one active worker.")
@click.option("--steps", type=int, help="End after this many steps.")
@click.option("--epochs", type=int, help="End after this many passes over the data.")
@click.option("--batch-size", type=int, help="Samples per global batch (lanes x micro_batch); sets micro_batch.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    callback=named_directory,
    help="Directory of the job (runs/<task>-<time>).",
)
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file of config keys.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a config key; may be repeated.")
@click.option("--chaos", help='Scripted faults, e.g. "kill:target=worker:2,at=30; stop:target=random,at=50,for=5".')
@click.option("--simulate-failure", is_flag=True, help="Kill one random worker in the middle of the run.")
@click.option("--fresh", is_flag=True, help="Start over; the old contents of the directory move to previous-N/.")
@click.option("--resume-from", help="Checkpoint (path or URL) to start from.")
@click.option(
    "--require-signature", "key_file", metavar="KEY", help="Start only from a checkpoint signed with this key."
)
@not_before
@click.option(
    "--listen", metavar="ADDR:PORT", help="Address where agents join; port 0: any free port. Sets network.address."
)
@click.option("--address", "told", metavar="IP", help="With --listen 0.0.0.0:PORT: address that others are told.")
@click.option(
    "--slots",
    type=click.IntRange(1, 65_535),
    help="With --listen, --rank: most workers on this host (one per device, or 1).",
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with the job's token. Sets security.token_file."
)
@click.option("--domain", metavar="K=V,...", help=DOMAIN_HELP)
@click.option("--rank", type=click.IntRange(0), help="Number of this host; host 0 runs the job itself.")
@click.option("--world-size", type=click.IntRange(1), help="With --rank: number of hosts.")
@click.option("--master-addr", metavar="IP", help="With --rank: address of host 0, where the others join.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="With --rank: port of host 0.")
@click.option("--no-local-workers", is_flag=True, help="With --listen: leave all workers to agents that join.")
@click.option("--dry-run", is_flag=True, help="Print the placement and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines of events.jsonl, then a summary object.")
@click.option("--dashboard", is_flag=True, help="Serve the live page while the job runs, and print its address.")
@click.option(
    "--public", is_flag=True, help=f"With --dashboard and --metrics: {PUBLIC_HELP[0].lower()}{PUBLIC_HELP[1:]}"
)
@click.option(
    "--metrics",
    metavar="[HOST:PORT]",
    is_flag=False,
    flag_value=ANY_PORT,
    help="Serve metrics to Prometheus while the job runs, and print the address. Sets metrics.listen.",
)
def command(
    task: str,
    argv: tuple[str, ...],
    batch_size: int | None,
    run_dir: Path | None,
    config_file: Path | None,
    settings: tuple[str, ...],
    simulate_failure: bool,
    fresh: bool,
    key_file: str | None,
    listen: str | None,
    told: str | None,
    slots: int | None,
    token_file: Path | None,
    domain: str | None,
    rank: int | None,
    world_size: int | None,
    master_addr: str | None,
    master_port: int | None,
    no_local_workers: bool,
    dry_run: bool,
    as_json: bool,
    dashboard: bool,
    public: bool,
    metrics: str | None,
    **options: Any,
) -> int:
    """Train TASK, whatever happens to its workers.

    TASK is a ready task (name or name:PATH), module:Class, path/file.py:Class, or a script that calls everstep.join
    (everstep run train.py -- its own arguments).
    """
    spec = parse_task(task)
    if argv and spec.kind != "script":
        raise ConfigError(f"only a script takes arguments of its own, got {' '.join(argv)!r} for task {task!r}")
    options |= {"metrics.listen": metrics, "security.token_file": None if token_file is None else str(token_file)}
    domains = found_domains(domain, os.environ)
    if rank is not None or world_size is not None or master_addr is not None or master_port is not None:
        listen = place(rank, world_size, master_addr, master_port, listen)
    layers = said_layers(config_file, settings)
    foreign = foreign_launcher(os.environ)
    if foreign is not None and rank is None:
        if listen is not None:
            raise ConfigError(f"--listen: expected none, as hosts meet by themselves: {foreign.words()}")
        return adopt(foreign, spec.short, click.get_current_context().meta[_ARGS], load_config(layers))
    given = read_layers([*layers, ("options", _said(options))])
    if rank and listen is not None:
        room, own = slots or slots_here(given, world_size), load_config(layers)
        return _follow(listen, room, own, domains, token_file, run_dir, told, spec, dry_run=dry_run)
    doors, port = head_doors(listen, told, given, local=not no_local_workers, slots=slots, world_size=world_size)
    options |= doors
    layers.append(("options", _said(options)))
    request = Request(tuple(layers), batch_size, simulate_failure)
    run_dir = _usable(run_dir, spec, argv, dry_run)
    given = read_layers(request.layers)
    if port is not None and not is_loopback(given["network.address"]):
        slots = slots or slots_here(given, world_size)
    token, secrets = _token(given.get("security.token_file"), listen), taken_secrets()
    trust = Trust(read_public_key(key_file) if key_file is not None else None, options["not_before"])
    if dashboard:
        check_installed("--dashboard")
    check_metrics(given.get("metrics.listen"), public)
    _check_sign_key(given.get("checkpoint.sign_key"))
    threads = given.get("threads")
    server = EarlyForkServer(threads if isinstance(threads, int) else 1, ("torch",) if dry_run else PRELOAD)
    with contextlib.closing(server):
        first = spec, argv, request, run_dir, server, fresh, as_json, dashboard, public
        invocation = Invocation(*first, port, token, not no_local_workers, slots or 0, trust, domains, secrets)
        return _run_or_show(invocation, dry_run)


def _usable(given: Path | None, spec: TaskSpec, argv: Sequence[str], dry_run: bool) -> Path:
    """The run directory; one that is busy, or leads elsewhere, is refused before anything is imported."""
    run_dir = given or default_run_dir(spec)
    for text in (*argv, spec.canonical, str(run_dir.absolute())):
        if text != text.encode(errors="replace").decode():  # no message could bear it
            raise ConfigError(f"expected arguments and names of folders in UTF-8, got {text!a}")
    if run_dir.exists() and not dry_run:
        with run_lock(run_dir):
            pass
    return run_dir


def _follow(
    head: str,
    room: int,
    config: Config,
    domains: Mapping[str, str],
    token_file: Path | None,
    run_dir: Path | None,
    own: str | None,
    spec: TaskSpec,
    *,
    dry_run: bool,
) -> int:
    """Be one of the other hosts that are started with a rank, and run what was said here."""
    if dry_run:
        raise ConfigError("--dry-run: expected it with --rank 0, which decides the placement")
    if own is not None:
        check_own("--address", own)
    task = spec.canonical
    return take_part_in(head, room, config, domains, token_file=token_file, run_dir=run_dir, own=own, task=task)


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None and key != "not_before"}


def _token(path: str | None, listen: str | None) -> bytes | None:
    """The job's, None for a new one. Raises: ConfigError if a file holds none."""
    given = given_token() if listen is not None else None
    return given if path is None else token_in(Path(path))


def _check_sign_key(path: str | None) -> None:
    """Raises: ConfigError if checkpoints are to be signed, but not with this."""
    if path is not None:
        read_private_key(path)


def _run_or_show(invocation: Invocation, dry_run: bool) -> int:
    if dry_run:
        print_placement(*_prepare(invocation, units=True), as_json=invocation.as_json)
        return 0
    prepared = None if invocation.run_dir.exists() else _prepare(invocation)  # what cannot work leaves nothing behind
    with run_lock(invocation.run_dir):
        return _run(invocation, *(prepared or _prepare(invocation)))


def _prepare(invocation: Invocation, *, units: bool = False) -> tuple[Config, Probe]:
    """The effective config, checked against everything that can be known before the start."""
    request, probe = invocation.request, Probe()
    if not invocation.is_script:
        parse(str(read_layers(request.layers).get("chaos", "")))  # found before anything is imported
        probe = probe_task(invocation.spec.canonical, request, invocation.server, units=units)
    config = effective_config(probe.defaults, request, script=invocation.is_script)
    check_metrics(config.metrics.listen, invocation.public)
    check_sinks(config.sinks)
    check_notify(config.notify)
    _check_sign_key(config.checkpoint.sign_key)
    check_hosts(config, alone=invocation.port is None)
    check_network(config, invocation.port or 0)
    check_own_ports(config, invocation.slots, local=invocation.local)
    _check_strikes(config)
    check_tls(config.security.tls, config.network.address)
    check_lease(config, invocation.secrets)
    if probe.dataset_size is not None:
        check_dataset(config, probe.dataset_size)
    return with_chaos(config, request, probe.dataset_size), probe


def _check_strikes(config: Config) -> None:
    """Raises: ConfigError if this host cannot do its part of a scripted fault."""
    lacks = cannot_strike(strikes_of(parse(config.chaos)), (config.network.address,))
    if lacks:
        raise ConfigError(lacks)


def _run(invocation: Invocation, config: Config, probe: Probe) -> int:
    """With the directory locked."""
    run_dir = invocation.run_dir
    job = make_job(invocation.spec.canonical, invocation.argv, config, probe.dataset_size, invocation.request)
    open_still = close_to_others(run_dir, config)
    aside = set_aside(run_dir) if invocation.fresh else None
    found = inspect(run_dir, job)
    if found.state == "finished":
        return _already_finished(invocation, found)
    if found.job is not None:  # it goes on: its checkpoints must know it again
        job = dataclasses.replace(job, created_unix_ns=found.job.created_unix_ns, begins_after=found.job.begins_after)
    warning = ask_object_store(config.checkpoint)
    job = with_cut(dataclasses.replace(job, split_checked=probe.split_checked), probe.cut, probe.unit_ms, found.job)
    start = find_start(run_dir, job, script=invocation.is_script, trust=invocation.trust)
    job = dataclasses.replace(job, resumes_at=start.step)
    if start.step and found.job is not None:
        before = found.job.code or found.job.code_before
        job = dataclasses.replace(job, numerics=found.job.numerics, code_before=before)
    if start.brought:
        job = dataclasses.replace(job, begins_after=start.step)
    write_job(run_dir, job)
    opening = _opening(run_dir, found, start, aside, invocation.is_script)
    if config.hosts.mixed:
        opening.insert(0, "hosts.mixed: hosts with other kernels are admitted, so the result is not exact any more")
    opening += [about_to_run(job)] if found.job is not None else []
    opening += [text for text in (owner_words(run_dir), warning, open_still) if text]
    return _launch(invocation, job, opening, start.step)


def _opening(run_dir: Path, found: Found, start: StartPoint, aside: Path | None, is_script: bool) -> list[str]:
    lines = [f"run directory {run_dir}"]
    if found.job is not None and found.job.unknown:
        keys = ", ".join(f"{key}={value}" for key, value in found.job.unknown.items())
        lines.append(f"warning: {run_dir / JOB_FILE} has keys that this version does not know, without effect: {keys}")
    if is_script:
        lines.append(
            "the output of the leader is shown here; the output of all workers goes to "
            f"{run_dir / 'logs'}/worker-*.jsonl"
        )
    if aside is not None:
        lines.append(f"the old contents are now in {aside}")
    if start.step:
        lines.append(start.words)
        if found.step > start.step:
            lines.append(f"steps {start.step + 1} to {found.step} are done again, to the same bits")
    elif found.state == "stopped":
        lines.append(
            f"this job was stopped after step {found.step} and left no checkpoint: it starts again from step 0 in the "
            "same directory"
        )
    return lines


def _already_finished(invocation: Invocation, found: Found) -> int:
    run_dir = invocation.run_dir
    lacking = lacking_rows(run_dir)
    text = f"this job has finished: step {found.step}, in {run_dir}; --fresh runs it again from the start"
    if invocation.as_json:
        facts, why = facts_of(read_events(run_dir / EVENTS_FILE)), Why(Cause.COMPLETED, text)
        text = json.dumps(summary(facts, 0, str(run_dir), found.digest, why, lacking))
    print(text)
    if lacking:
        complain(lacking)
    return int(bool(lacking))


def _launch(invocation: Invocation, job: JobFile, opening: list[str], step: int) -> int:
    from everstep.runtime import job as runtime_job

    run_dir, config = invocation.run_dir, job.config
    port = 0
    if invocation.port is not None:
        port = invocation.port or free_port(config.network.address)
        where = f"{config.network.address}:{port}"
        opening.append(f"hosts join with: everstep agent --join {where} --token-file {run_dir.resolve() / TOKEN_FILE}")
        if config.control.etcd is None:
            opening.append(
                "if this host is lost, the others train on only until a decision is needed: control.etcd lets another "
                f"host take over, or type there: everstep takeover {run_dir.resolve()}"
            )
    if not invocation.local:
        invocation.server.close()
    token = invocation.token or wire.new_token()
    succession = begin_leased(run_dir, config, token, opening, invocation.secrets)
    process = runtime_job.Job(
        run_dir,
        config,
        job.task,
        list(job.argv),
        _local_host(invocation, config),
        port=port,
        token=token,
        strikes=strikes_of(parse(config.chaos)),
        succession=succession,
    )
    with runtime_job.hearing_signals(process):
        return _see_through(process, succession, invocation, job, opening, step)


def _see_through(
    process: Job, succession: Succession, invocation: Invocation, job: JobFile, opening: list[str], step: int
) -> int:
    """Run the job to its end, and say what becomes of it."""
    run_dir, config, begin_ns = invocation.run_dir, job.config, time.time_ns()
    total = total_steps(config, job.dataset_size)
    display = choose_display(run_dir, as_json=invocation.as_json, log_every=config.log_every, total_steps=total)
    watcher = Watcher(run_dir / EVENTS_FILE, begin_ns, display)
    for line in opening:
        display.note(line)
    events = EventLog(run_dir / EVENTS_FILE)
    words = shlex.join([job.task, *(["--", *job.argv] if job.argv else [])])
    how = f"{words} with {config.workers} workers" + (f", from the checkpoint of step {step}" if step else "")
    events.write("job_started", step=step, cause=Cause.STARTED, reason=how, workers=config.workers)
    watcher.start()
    exit_code = 1
    try:
        with leaders_work(run_dir, config, display.note, leads=not succession.owner) as on_lead:

            def told_of(event: dict[str, Any]) -> None:
                on_lead(event)
                watcher.process_event(event)

            with (
                dashboard_beside(run_dir, invocation.dashboard, invocation.public) as page,
                metrics_beside(run_dir, config.metrics.listen, invocation.public) as metrics,
            ):
                for name, address in (("dashboard", page), ("metrics", metrics)):
                    if address:
                        display.note(f"{name} {address}")
                exit_code = process.run(told_of)
            say_the_end(events, run_dir, begin_ns, process.outcome, exit_code)
    finally:
        events.close(wait_s=1.0)
        watcher.stop()
    return end_of(process, run_dir, job, events, watcher.facts, exit_code, as_json=invocation.as_json)


def _local_host(invocation: Invocation, config: Config) -> LocalHost | None:
    from everstep.runtime.supervisor import LocalHost

    if not invocation.local:
        return None
    run_dir, early = invocation.run_dir, invocation.server
    room, domains = invocation.slots, invocation.domains
    return LocalHost(run_dir, config, ENTRY, preload=PRELOAD, early=early, room=room, domains=domains, files=FILES)
