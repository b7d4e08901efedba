"""`everstep run`: from the user's request to the end of the job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from everstep.base.cause import Cause, Why
from everstep.base.cell_keys import cell_notes
from everstep.base.config import Config, load_config, pool_wish, read_layers, zero_notes
from everstep.base.doors import at_port, is_loopback
from everstep.base.errors import ConfigError
from everstep.base.foreign import foreign_launcher
from everstep.base.package_versions import refuse_versions
from everstep.chaos.spec import parse, strikes_of
from everstep.checkpoint.keys import read_private_key, read_public_key
from everstep.cli.adoption import adopt
from everstep.cli.agent import place, start_of_agent, take_part_in
from everstep.cli.auto_lane import choose_lane, take_auto, with_lane
from everstep.cli.beside import ANY_PORT, PUBLIC_HELP, check_installed, check_metrics
from everstep.cli.coming_back import mark_head, refuse_deposed, standing_by
from everstep.cli.completing import complete_place, complete_task
from everstep.cli.conclusion import lacking_rows
from everstep.cli.config import complete_key
from everstep.cli.config_file import said_layers
from everstep.cli.display import summary
from everstep.cli.doors import check_own_ports, head_doors, slots_here
from everstep.cli.early_server import PRELOAD, take_early
from everstep.cli.job import (
    JobFile,
    Request,
    about_to_run,
    check_dataset,
    check_hosts,
    check_network,
    effective_config,
    free_port,
    going_on,
    make_job,
    refuse_hosts_of_cells,
    with_chaos,
    with_cut,
    with_shards,
    write_job,
)
from everstep.cli.leading import UserView, see_through
from everstep.cli.main import complain
from everstep.cli.placement_table import print_placement
from everstep.cli.probe import Probe, probe_task, with_device
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
from everstep.cli.standby import begin_leased, check_lease, runs_elsewhere
from everstep.cli.starting import DOMAIN_HELP, packages_of, start_here
from everstep.cli.task_loading import TaskSpec, parse_task
from everstep.cli.tokens import given_token, token_in
from everstep.observe.events import read_events
from everstep.report.facts import facts_of
from everstep.runtime.files.claim_files import forget_claims
from everstep.runtime.files.private import owner_words
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.host.admission import cannot_strike
from everstep.runtime.host.fork_server_client import EarlyForkServer
from everstep.runtime.lead.journal import term_in_file
from everstep.runtime.lead.succession import Succession
from everstep.runtime.link import wire
from everstep.runtime.link.address import EVENTS_FILE, JOB_FILE, JOURNAL_FILE, TOKEN_FILE
from everstep.runtime.link.interfaces import check_own
from everstep.runtime.link.tls import check_tls
from everstep.runtime.start import Start
from everstep.sinks.notices import check_notify
from everstep.sinks.sink import check_installed as check_sinks
from everstep.zoo.hub_directory import keep_hub_files


@dataclasses.dataclass(frozen=True)
class Asked:
    """Options of one `everstep run` as typed, except the config keys that have options of their own.

    `argv`: of the script; `told`: of `--address`; `key_file`: of `--require-signature`; others are named as their
    options.
    """

    spec: TaskSpec
    argv: tuple[str, ...]
    run_dir: Path | None
    batch_size: int | None
    simulate_failure: bool
    fresh: bool
    key_file: str | None
    not_before: int | None
    listen: str | None
    told: str | None
    slots: int | None
    no_local_workers: bool
    or_standby: bool
    token_file: Path | None
    domain: str | None
    world_size: int | None
    dry_run: bool
    as_json: bool
    dashboard: bool
    public: bool

    @property
    def is_script(self) -> bool:
        return self.spec.kind == "script"

    @property
    def local(self) -> bool:
        """Whether this host runs workers."""
        return not self.no_local_workers

    def trust(self) -> Trust:
        """Checkpoints that the job may begin with. Raises: ConfigError if the key file holds no key."""
        key = read_public_key(self.key_file) if self.key_file is not None else None
        return Trust(key, self.not_before)


@dataclasses.dataclass(frozen=True)
class Invocation:
    """The parsed command. request: its config; trust: of checkpoints; begun: facts of this host. auto_lane: the largest
    lane that fits is to be found; auto_device: torch is to say which device; notes: to tell the user."""

    asked: Asked
    request: Request
    trust: Trust
    begun: Start
    server: EarlyForkServer
    auto_lane: bool = False
    auto_device: bool = False
    notes: tuple[str, ...] = ()


_ARGS = "everstep.args"
_LOCK_WAIT_S = 60.0
_LOCK_AGAIN_S = 0.25
_ASKED = [field.name for field in dataclasses.fields(Asked) if field.name not in ("spec", "argv")]


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
@click.argument("task", shell_complete=complete_task)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.option("--workers", type=int, help="Number of workers in total (1, or as the pools need).")
@click.option("--spares", type=int, help="Idle workers that replace a lost worker at once (0).")
@click.option("--min-workers", type=int, help="Wait while there are fewer workers than this (1).")
@click.option("--stages", type=int, help="Parts that the model is split into (1).")
@click.option("--pool", type=int, help="Workers per stage, all active.")
@click.option("--redundancy", type=int, help="Standby backups per stage, in addition to one active worker.")
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
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_key,
    help="Set a config key; may be repeated.",
)
@click.option("--chaos", help='Scripted faults, e.g. "kill:target=worker:2,at=30; stop:target=random,at=50,for=5".')
@click.option("--simulate-failure", is_flag=True, help="Kill one random worker in the middle of the run.")
@click.option("--fresh", is_flag=True, help="Start over; the old contents of the directory move to previous-N/.")
@click.option("--resume-from", shell_complete=complete_place, help="Checkpoint (path or URL) to start from.")
@click.option(
    "--require-signature", "key_file", metavar="KEY", help="Start only from a checkpoint signed with this key."
)
@not_before
@click.option(
    "--listen", metavar="ADDR:PORT", help="Address where agents join; port 0: any free port. Sets network.address."
)
@click.option("--address", "told", metavar="IP", help="With --listen 0.0.0.0:PORT: address that other hosts use.")
@click.option(
    "--slots",
    type=click.IntRange(1, 65_535),
    help="Largest number of workers on this host, with --listen or --rank (one per device, or 1).",
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
@click.option(
    "--or-standby", is_flag=True, help="With control.etcd: if the job runs already on another host, stand by for it."
)
@click.option("--dry-run", is_flag=True, help="Print the placement and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines of events.jsonl, then a summary object.")
@click.option("--dashboard", is_flag=True, help="Serve the live page while the job runs, and print its address.")
@click.option(
    "--public", is_flag=True, help=f"With --dashboard or --metrics: {PUBLIC_HELP[0].lower()}{PUBLIC_HELP[1:]}"
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
    config_file: Path | None,
    settings: tuple[str, ...],
    rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    metrics: str | None,
    **said: Any,
) -> int:
    """Train TASK, and go on when workers fail, join or leave.

    TASK is a ready task (name or name:PATH), module:Class, path/file.py:Class, or a script that calls everstep.join
    (everstep run train.py -- its own arguments).
    """
    refuse_versions("torch", "numpy")
    spec = parse_task(task)
    if argv and spec.kind != "script":
        raise ConfigError(f"only a script takes arguments of its own, got {' '.join(argv)!r} for task {task!r}")
    asked = Asked(spec, argv, **{name: said.pop(name) for name in _ASKED})
    options = said | {"metrics.listen": metrics, "security.token_file": asked.token_file and str(asked.token_file)}
    options = {key: value for key, value in options.items() if value is not None}
    if rank is not None or asked.world_size is not None or master_addr is not None or master_port is not None:
        where = place(rank, asked.world_size, master_addr, master_port, asked.listen)
        asked = dataclasses.replace(asked, listen=where)
    layers = said_layers(config_file, settings)
    foreign = foreign_launcher(os.environ)
    if foreign is not None and rank is None:
        if asked.listen is not None:
            raise ConfigError(
                f"--listen: expected none, because this process was {foreign.words()} and its hosts find each other"
            )
        return adopt(foreign, spec.short, click.get_current_context().meta[_ARGS], load_config(layers))
    layers, auto_lane = take_auto(layers)
    layers, auto_device = take_auto(layers, "device")
    if auto_lane and (asked.is_script or asked.no_local_workers or rank is not None):
        what = "a script" if asked.is_script else "--no-local-workers" if asked.no_local_workers else "--rank"
        raise ConfigError(
            f"micro_batch: auto does not go with {what}: it looks at one lane of a Task here; give a number"
        )
    given = read_layers([*layers, ("options", options)])
    if rank:
        return _follow(asked, load_config(layers), asked.slots or slots_here(given, asked.world_size))
    doors, port = head_doors(
        *(asked.listen, asked.told, given), local=asked.local, slots=asked.slots, world_size=asked.world_size
    )
    request = Request((*layers, ("options", options | doors)), asked.batch_size, asked.simulate_failure)
    return _begin(asked, request, port, (auto_lane, auto_device))


def _begin(asked: Asked, request: Request, port: int | None, autos: tuple[bool, bool]) -> int:
    """Be the host on which the job begins. port: where agents of other hosts may join, None: they may not. autos:
    auto_lane and auto_device, as `Invocation` has them."""
    run_dir, given, slots = _directory(asked), read_layers(request.layers), asked.slots
    if port is not None and not is_loopback(given["network.address"]):
        slots = slots or slots_here(given, asked.world_size)
    known: dict[str, Any] = {"run_dir": run_dir, "port": port, "room": (slots or 0) if asked.local else None}
    token = _token(given.get("security.token_file"), asked.listen) or wire.new_token()
    begun, trust = start_here(Config(), asked.domain, token=token, **known), asked.trust()
    if asked.dashboard:
        check_installed("--dashboard")
    check_metrics(given.get("metrics.listen"), asked.public)
    _check_sign_key(given.get("checkpoint.sign_key"))
    if asked.or_standby and asked.fresh:
        raise ConfigError("--fresh: expected none with --or-standby, because a host that comes back would start over")
    if asked.or_standby:
        begun = _or_stand_by(begun, given)  # the host that leads by now may hold the directory, which all hosts see
    if run_dir.exists() and not asked.dry_run:
        with _held(begun, given):  # a busy one is refused before anything is asked of the fork server
            pass
    threads = given.get("threads")
    server = take_early(threads if isinstance(threads, int) else 1, ("torch",) if asked.dry_run else PRELOAD)
    variables = any(name.startswith("env.") for name in given)  # which packages may read: see `Start.imports`
    packages = () if asked.dry_run or variables else packages_of(asked.spec)
    server.import_packages(packages)
    with contextlib.closing(server):
        begun = dataclasses.replace(begun, early=server, preload=(*begun.preload, *packages))
        return _run_or_show(Invocation(asked, request, trust, begun, server, *autos))


def _or_stand_by(begun: Start, given: Mapping[str, Any]) -> Start:
    """The start, where the job does not run yet; else this process becomes a standby host.

    Raises: ConfigError if the job has no lease."""
    own = {key: value for key, value in given.items() if key.startswith(("control.", "network.", "hosts.wait_s"))}
    config = load_config([("options", own)])
    if config.control.etcd is None:
        raise ConfigError("--or-standby: expected --set control.etcd=... with it, where hosts find each other")
    if runs_elsewhere(asked := dataclasses.replace(begun, config=config, stays=True)):
        raise standing_by(asked, given.get("workers"))
    mark_head(leads=True)  # nobody does
    return dataclasses.replace(begun, stays=True)


@contextlib.contextmanager
def _held(begun: Start, given: Mapping[str, Any]) -> Iterator[None]:
    """Hold the run directory; one that may stand by waits for a process that has led the job, and is about to end.
    Raises: ConfigError if another process holds it; Deposed if that leads the job since, and this host may stand by."""
    until_s = time.monotonic() + _LOCK_WAIT_S * begun.stays
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(run_lock(begun.folder))
                break
            except ConfigError:
                if begun.stays:
                    _or_stand_by(begun, given)
                if time.monotonic() >= until_s:
                    raise
            time.sleep(_LOCK_AGAIN_S)
        yield


def _directory(asked: Asked) -> Path:
    """The run directory. Raises: ConfigError for words that no message could contain."""
    run_dir = asked.run_dir or default_run_dir(asked.spec)
    for text in (*asked.argv, asked.spec.canonical, str(run_dir.absolute())):
        if text != text.encode(errors="replace").decode():  # no message could contain it
            raise ConfigError(f"expected arguments and names of folders in UTF-8, got {text!a}")
    return run_dir


def _follow(asked: Asked, config: Config, room: int) -> int:
    """Be one of the other hosts started with a rank; the job runs the task that host 0 names."""
    if asked.dry_run:
        raise ConfigError("--dry-run: expected it with --rank 0, which decides the placement")
    own = "" if asked.told is None else check_own("--address", asked.told)
    known: dict[str, Any] = {"run_dir": asked.run_dir, "host": os.uname().nodename, "own": own}
    known |= {"room": room, "task": asked.spec.canonical}
    return take_part_in(start_of_agent(config, asked.listen or "", asked.token_file, asked.domain, **known))


def _token(path: str | None, listen: str | None) -> bytes | None:
    """The job's token, None for a new one. Raises: ConfigError if a file holds none."""
    given = given_token() if listen is not None else None
    return given if path is None else token_in(Path(path))


def _check_sign_key(path: str | None) -> None:
    """Raises: ConfigError if checkpoints are to be signed, but this key cannot do it."""
    if path is not None:
        read_private_key(path)


def _run_or_show(invocation: Invocation) -> int:
    if invocation.auto_device:
        invocation = dataclasses.replace(invocation, request=with_device(invocation.request, invocation.server))
    if not invocation.asked.fresh:
        request = with_shards(invocation.request, invocation.begun.folder)
        invocation = dataclasses.replace(invocation, request=request)
    if invocation.auto_lane:
        invocation = _with_lane(invocation)
    if invocation.asked.dry_run:
        print_placement(*_prepare(invocation, units=True), as_json=invocation.asked.as_json)
        return 0
    run_dir = invocation.begun.folder
    prepared = None if run_dir.exists() else _prepare(invocation)  # a job that cannot work leaves nothing behind
    with _held(invocation.begun, read_layers(invocation.request.layers)):
        return _run(invocation, *(prepared or _prepare(invocation)))


def _with_lane(invocation: Invocation) -> Invocation:
    """With the largest lane that fits, or that of the job that goes on."""
    asked = invocation.asked
    before = None if asked.fresh else invocation.begun.folder
    chosen = choose_lane(asked.spec.canonical, invocation.request, invocation.server, before)
    return dataclasses.replace(
        invocation, request=with_lane(invocation.request, chosen), notes=(*invocation.notes, chosen.words)
    )


def _prepare(invocation: Invocation, *, units: bool = False) -> tuple[Config, Probe]:
    """The effective config, with all checks that are possible before the start."""
    asked, begun, request, probe = invocation.asked, invocation.begun, invocation.request, Probe()
    if not asked.is_script:
        parse(str(read_layers(request.layers).get("chaos", "")))  # found before anything is imported
        probe = probe_task(asked.spec.canonical, request, invocation.server, units=units)
    config = effective_config(probe.defaults, request, script=asked.is_script)
    check_metrics(config.metrics.listen, asked.public)
    check_sinks(config.sinks)
    check_notify(config.notify)
    _check_sign_key(config.checkpoint.sign_key)
    check_hosts(config, alone=begun.port is None)
    if begun.port is None and not asked.dry_run:
        refuse_hosts_of_cells(config)
    check_network(config, begun.port or 0)
    may_move = config.control.etcd is not None and begun.port is not None
    check_own_ports(config, begun.room, head=begun.port == 0, agent=may_move)
    _check_strikes(config)
    if asked.fresh or not (begun.folder / JOB_FILE).exists():
        layers: list[tuple[str, Mapping[str, Any]]] = [("the task's defaults", probe.defaults), *request.layers]
        _check_copies(config, read_layers(layers))
    check_tls(config.security.tls, config.network.address)
    check_lease(config, begun.secrets)
    if probe.dataset_size is not None:
        check_dataset(config, probe.dataset_size)
    return with_chaos(config, request, probe.dataset_size), probe


def _proven(probe: Probe) -> dict[str, Any]:
    return {"split_checked": probe.split_checked, "lane_digest": probe.lane_digest}


def _check_copies(config: Config, given: Mapping[str, Any]) -> None:
    """Raises: ConfigError if a new job is told to keep more copies of the optimizer's state than it has members for, or
    than there are hosts, where several are asked for."""
    least = min(map(len, pool_wish(config).homes))
    if config.zero.stage and "zero.copies" in given and config.zero.copies > least:
        pool = "for each stage" if config.stages > 1 else "in all"
        raise ConfigError(
            f"zero.copies: expected at most {least}, the workers {pool}, got {config.zero.copies}: set "
            f"zero.copies={least}, or use more workers"
        )
    hosts = config.hosts.min
    if config.zero.stage and "zero.copies" in given and 1 < hosts < config.zero.copies:
        raise ConfigError(
            f"zero.copies: expected at most {hosts}, one for each of the hosts asked for (hosts.min), got "
            f"{config.zero.copies}: set zero.copies={hosts}, or hosts.min={config.zero.copies}"
        )


def _check_strikes(config: Config) -> None:
    """Raises: ConfigError if this host cannot carry out its part of a scripted fault."""
    lacks = cannot_strike(strikes_of(parse(config.chaos)), (config.network.address,))
    if lacks:
        raise ConfigError(lacks)


def _run(invocation: Invocation, config: Config, probe: Probe) -> int:
    """Run the job in its locked directory."""
    asked, run_dir = invocation.asked, invocation.begun.folder
    job = make_job(asked.spec.canonical, asked.argv, config, probe.dataset_size, invocation.request)
    open_still = close_to_others(run_dir, config)
    term = term_in_file(run_dir / JOURNAL_FILE)  # of a job that was taken over: who has heard it hears no lower one
    succession = Succession(term=term + 1 if term else 0)
    invocation = dataclasses.replace(invocation, begun=dataclasses.replace(invocation.begun, succession=succession))
    aside = set_aside(run_dir) if asked.fresh else None
    found = inspect(run_dir, job)
    if found.state == "finished":
        return _already_finished(run_dir, found, as_json=asked.as_json)
    if found.job is not None:  # a resumed job: its checkpoints bear its name
        job = dataclasses.replace(job, created_unix_ns=found.job.created_unix_ns, begins_after=found.job.begins_after)
        if found.job.config.chaos != config.chaos:
            forget_claims(run_dir)
    warning = ask_object_store(config.checkpoint)
    job = with_cut(dataclasses.replace(job, **_proven(probe)), probe.cut, probe.unit_ms, found.job)
    start = find_start(run_dir, job, script=asked.is_script, trust=invocation.trust)
    if found.state == "new" and not start.brought:
        refuse_deposed(run_dir)
    job = dataclasses.replace(job, resumes_at=start.step)
    if start.step and found.job is not None:
        job = going_on(job, found.job)
    if start.brought:
        job = dataclasses.replace(job, begins_after=start.step)
    if asked.spec.where == "hf":
        keep_hub_files(asked.spec.what, config.task, run_dir)
    opening = _opening(run_dir, found, start, aside, asked.is_script, invocation.begun.port)
    if config.hosts.mixed:
        opening.insert(0, "hosts.mixed: hosts with other kernels are admitted, so the result is no longer exact")
    opening += [*invocation.notes, *zero_notes(config), *cell_notes(config.cell), *probe.notes]
    opening += [about_to_run(job)] if found.job is not None else []
    opening += [text for text in (owner_words(run_dir), warning, open_still) if text]
    return _launch(invocation, job, opening)


def _opening(
    run_dir: Path, found: Found, start: StartPoint, aside: Path | None, is_script: bool, port: int | None
) -> list[str]:
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
            others = ", unless workers of other hosts have gone on" * (port is not None)
            lines.append(f"steps {start.step + 1} to {found.step} are repeated, to the same bits{others}")
    elif found.state == "stopped":
        lines.append(
            f"this job was stopped after step {found.step} and left no checkpoint: it starts again from step 0 in the "
            "same directory"
        )
    return lines


def _already_finished(run_dir: Path, found: Found, *, as_json: bool) -> int:
    lacking = lacking_rows(run_dir)
    text = f"this job has finished: step {found.step}, in {run_dir}; --fresh runs it again from the start"
    if as_json:
        facts, why = facts_of(read_events(run_dir / EVENTS_FILE)), Why(Cause.COMPLETED, text)
        text = json.dumps(summary(facts, 0, str(run_dir), found.digest, why, lacking))
    print(text)
    if lacking:
        complain(lacking)
    return int(bool(lacking))


def _launch(invocation: Invocation, job: JobFile, opening: list[str]) -> int:
    asked, config = invocation.asked, job.config
    begun = dataclasses.replace(invocation.begun, config=config)
    if begun.port is not None:
        port = begun.port or free_port(config.network.address)
        begun = dataclasses.replace(begun, port=port)
        where, run_dir = at_port(config.network.address, port), begun.folder.resolve()
        opening.append(f"hosts join with: everstep agent --join {where} --token-file {run_dir / TOKEN_FILE}")
        if config.control.etcd is None:
            opening.append(
                "if this host is lost, the others train on only until a decision is needed: control.etcd lets another "
                f"host take over, or type there: everstep takeover {run_dir}"
            )
    if not asked.local:
        invocation.server.close()
    begun, lines = begin_leased(begun)
    write_job(begun.folder, job)  # not before it is clear that no other host leads
    view = UserView([*opening, *lines], asked.as_json, asked.dashboard, config.metrics.listen, asked.public)
    return see_through(begun, job, view)
