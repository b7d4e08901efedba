"""Hosts that can take over a job whose coordinator is lost: by its lease in etcd, or because somebody says so."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from everstep.base.config import Config
from everstep.base.domains import found_domains
from everstep.base.doors import is_loopback
from everstep.base.errors import ConfigError, EverstepError, ProtocolError, QuorumLost
from everstep.base.etcd_address import EtcdAddress
from everstep.cli.beside import parse_listen, sinks_beside
from everstep.cli.conclusion import ENDS, end_of, say_the_end
from everstep.cli.display import Watcher, choose_display
from everstep.cli.job import JobFile, about_to_run, check_network, read_job, total_steps
from everstep.cli.main import complain
from everstep.cli.meeting import ETCD_S, etcd_at
from everstep.cli.run_dir import read_digest
from everstep.cli.standby_fill import copy_in
from everstep.cli.worker import ENTRY, FILES, PRELOAD
from everstep.observe.events import EventLog, read_events
from everstep.protocol.lease.requests import Holder, HolderSeen, Load, Loaded, Look
from everstep.report.history import History
from everstep.runtime.files.host_directory import OWN_FOLDER, new_word, word_in
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.host.fork_server_client import EarlyForkServer
from everstep.runtime.lead.etcd import Announced, Etcd
from everstep.runtime.lead.etcd_access import find_access
from everstep.runtime.lead.finding import among, in_etcd, local_address
from everstep.runtime.lead.journal_and_lease import place_of
from everstep.runtime.lead.succession import Succession, new_owner
from everstep.runtime.link import wire
from everstep.runtime.link.address import COORDINATOR_FILE, EVENTS_FILE, JOURNAL_FILE, TOKEN_FILE, read_address
from everstep.runtime.link.tls import Tls, shown_by

_PATIENCE_S = 600.0
_AGAIN_S = 0.25
_SHARED_S = 5.0  # a job announces itself just before it leaves its word, and a mount may show that later


def check_lease(config: Config, secrets: Mapping[str, str]) -> None:
    """Raises: ConfigError if this host lacks what it needs for the job's etcd, or has something that is no such thing.
    secrets: of its user there."""
    if config.control.etcd is not None:
        address = EtcdAddress.parse("control.etcd", config.control.etcd)
        find_access(address, config.control, {**os.environ, **secrets})


def begin_leased(
    run_dir: Path, config: Config, token: bytes, opening: list[str], secrets: Mapping[str, str]
) -> Succession:
    """Announce a job that begins now, where it has a lease; another one may have it still for as long as that lasts.
    secrets: of this host's user in etcd.

    Raises: ConfigError if a job runs there, or etcd does not let this host in; QuorumLost if etcd does not answer.
    """
    if config.control.etcd is None:
        return Succession()
    address = EtcdAddress.parse("control.etcd", config.control.etcd)
    access = find_access(address, config.control, {**os.environ, **secrets})
    etcd, owner, lease_s = Etcd(address, token, ETCD_S, access=access), new_owner(), config.control.lease_s
    word = new_word()
    wire.write_token(run_dir / TOKEN_FILE, token)  # whoever stands by looks for it as soon as it hears of the job
    try:
        _wait_until_over(etcd, lease_s)
        holder = etcd.begin({"run_dir": str(run_dir.resolve()), "word": word}, owner, lease_s)
    except ProtocolError as error:
        raise ConfigError(f"control.etcd: {error}") from None
    if holder is not None:
        raise ConfigError(_still(etcd, holder))
    opening.append(f"hosts that can take over join with: everstep agent --join {address} --standby")
    opening += [f"warning: {text}" for text in (access.warning(),) if text]
    return Succession(owner=owner, job=etcd.job, address=config.network.address, word=word, secrets=secrets)


def _wait_until_over(etcd: Etcd, lease_s: int) -> None:
    """A job that was there before may be between two coordinators: it is over if it says so, or if nobody holds its
    lease for longer than it takes to take over. Raises: ConfigError if it runs."""
    if etcd.announced() is None:
        return
    begun_s = time.monotonic()
    free_s = begun_s + 2 * lease_s + 1
    while time.monotonic() < free_s:
        seen, found = etcd.ask(Look()), etcd.ask(Load())
        holder = seen.holder if isinstance(seen, HolderSeen) else None
        if holder is not None:
            if time.monotonic() > begun_s + lease_s + 1:  # one that was killed holds it a while longer
                raise ConfigError(_still(etcd, holder))
            free_s = time.monotonic() + 2 * lease_s + 1
        elif isinstance(found, Loaded) and any(entry.get("kind") == "ended" for entry in found.entries):
            return
        time.sleep(_AGAIN_S)


def _still(etcd: Etcd, holder: Holder) -> str:
    where = f"{holder.where.get('host')}:{holder.where.get('port')}"
    return f"a job is still running under {etcd.address}: its coordinator is at {where}; wait, or stop it"


@contextlib.contextmanager
def leaders_work(
    run_dir: Path, config: Config, note: Callable[[str], None], leads: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What one host does for the job, beside deciding: telling the sinks. Yields what is to be told of the process's
    own events. leads: from the start, and for good."""
    with contextlib.ExitStack() as working:

        def on_event(event: dict[str, Any]) -> None:
            if event["kind"] in ("coordinator_leads", "coordinator_follows"):
                working.close()
            if event["kind"] == "coordinator_leads":
                working.enter_context(sinks_beside(run_dir, config, note))

        if leads:
            working.enter_context(sinks_beside(run_dir, config, note))
        yield on_event


def stand_by(
    address: EtcdAddress,
    token: bytes,
    run_dir: Path | None,
    slots: int,
    host: str,
    own: str,
    domains: Mapping[str, str],
    secrets: Mapping[str, str],
) -> int:
    """Be an agent, and the job's next coordinator should its present one be lost. Returns the exit code.

    run_dir: None if the job says. host: its name, "" for this machine's. own: its address, "" for that of the route.
    domains: in which it is, by label. secrets: of its user in etcd.
    """
    name = host or os.uname().nodename
    with contextlib.ExitStack() as held:
        etcd = held.enter_context(contextlib.closing(etcd_at(address, token, Config().control, secrets)))
        found = _announced(etcd)
        word, own = str(found.facts.get("word", "")), own or _own(etcd)
        shown = run_dir or Path(str(found.facts.get("run_dir")))
        shared = _sees(shown, lambda: _place(etcd) or word)
        if not shared:
            shown = held.enter_context(copy_in(run_dir, word, name, own, token, lambda: in_etcd(etcd)))
        job = read_job(shown, joined=False)
        check_lease(job.config, secrets)
        copying_host = name if (shown / OWN_FOLDER).is_dir() else ""
        succession = Succession(True, new_owner(), found.job, own, copying_host=copying_host, secrets=secrets)
        how = "" if shared else ", with files of its own"
        print(f"{name} stands by for the job in {shown}{how}; {about_to_run(job)}", file=sys.stderr, flush=True)
        exit_code = _take_part(shown, job, token, succession, slots, name, 0, domains)
        if not (exit_code or shared or run_dir or word_in(shown)):  # the job is over, and was led elsewhere
            shutil.rmtree(shown, ignore_errors=True)
        return exit_code


def _sees(run_dir: Path, word: Callable[[], str]) -> bool:
    """Whether a directory is that which the job is led in. word: that it has left there."""
    end_s = time.monotonic() + _SHARED_S
    while word_in(run_dir) != word():
        if time.monotonic() > end_s or not run_dir.is_dir():
            return False
        time.sleep(_AGAIN_S)
    return True


def _place(etcd: Etcd) -> str:
    """By which word the directory is known in which the job is led now; "" if nobody says."""
    seen = etcd.ask(Look())
    holder = seen.holder if isinstance(seen, HolderSeen) else None
    return place_of(holder.where) if holder is not None else ""


def _announced(etcd: Etcd) -> Announced:
    """The job, once there is one. Raises: QuorumLost if none comes, or etcd does not answer."""
    end_s, said = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            found = etcd.announced()
        except ProtocolError as error:
            raise ConfigError(f"--join: {error}") from None
        if found is not None:
            return found
        if time.monotonic() > end_s:
            raise QuorumLost(f"no job has begun under {etcd.address} for {_PATIENCE_S:g} s")
        if not said:
            print(f"no job has begun under {etcd.address}: waiting for it", file=sys.stderr, flush=True)
        said = True
        time.sleep(_AGAIN_S)


def _own(etcd: Etcd) -> str:
    """The address of this host on the way to the coordinator, or to etcd while there is none."""
    seen = etcd.ask(Look())
    host, _, port = etcd.address.members[0].rpartition(":")
    if isinstance(seen, HolderSeen) and seen.holder is not None and seen.holder.where:
        return local_address((str(seen.holder.where.get("host")), 1))
    return local_address((host, int(port)))


def _take_part(
    run_dir: Path,
    job: JobFile,
    token: bytes,
    succession: Succession,
    slots: int,
    host: str,
    port: int,
    domains: Mapping[str, str],
) -> int:
    """As the process of a job that was started elsewhere. slots: of this host, -1 for none."""
    from everstep.runtime.job import Job, hearing_signals
    from everstep.runtime.supervisor import LocalHost

    config, own = job.config, succession.address
    events = EventLog(run_dir / EVENTS_FILE)
    display = choose_display(
        run_dir, as_json=False, log_every=config.log_every, total_steps=total_steps(config, job.dataset_size)
    )
    begin_ns = time.time_ns()
    watcher = Watcher(run_dir / EVENTS_FILE, begin_ns, display)
    led = not succession.owner
    with contextlib.ExitStack() as held:
        server = held.enter_context(contextlib.closing(EarlyForkServer(config.threads, PRELOAD)))
        more: dict[str, Any] = {"room": slots, "domains": domains, "files": FILES, "host": host, "own": own}
        apart = run_dir / OWN_FOLDER if succession.copying_host else None
        local = LocalHost(run_dir, config, ENTRY, preload=PRELOAD, early=server, apart=apart, **more)

        def on_event(event: dict[str, Any]) -> None:
            nonlocal led
            on_lead(event)
            if event["kind"] == "coordinator_leads" and not led:
                led = True
                with contextlib.suppress(ConfigError):  # the command that began the job may run still
                    held.enter_context(run_lock(run_dir))
                logs = ", and the logs of its workers are where it is" if succession.copying_host else ""
                display.note(f"{host} leads the job in {run_dir} from now on: the host that did is lost{logs}")
                watcher.start()
            if led:
                watcher.process_event(event)

        on_lead = held.enter_context(leaders_work(run_dir, config, display.note, leads=led))
        agent = local if slots >= 0 else None
        if led:
            watcher.start()
        process = Job(
            run_dir, config, job.task, list(job.argv), agent, on_event, port=port, token=token, succession=succession
        )
        held.enter_context(hearing_signals(process))
        exit_code = process.run()
        outcome = process.outcome
        if led:
            watcher.stop()
        if succession.guest and (not led or (outcome is not None and exit_code > 128)):
            if outcome is not None and exit_code > 1:
                complain(outcome.why.reason)
            return exit_code if exit_code > 1 else 0
        say_the_end(events, run_dir, begin_ns, outcome, exit_code)
        events.close(wait_s=1.0)
        return end_of(process, run_dir, job, events, watcher.facts, exit_code)


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--listen", metavar="ADDR:PORT", help="Address of this host where agents join; port 0: any free port.")
@click.option("--slots", type=click.IntRange(1), help="Most workers to run on this host (none).")
def takeover(run_dir: Path, listen: str | None, slots: int | None) -> int:
    """Go on with the job in DIR on this host, from its journal, after the host that led it was lost.

    The command refuses while that host still answers, and if the job has stopped. Agents and workers that wait for a
    coordinator find this one by DIR, or by their list of addresses.
    """
    job = read_job(run_dir)
    if read_digest(run_dir) is not None:
        raise ConfigError(f"the job in {run_dir} has finished: there is nothing to take over")
    if job.config.control.etcd is not None:
        where = job.config.control.etcd
        raise ConfigError(f"the job's lease is in etcd: everstep agent --join {where} --standby takes over by itself")
    if not (run_dir / JOURNAL_FILE).is_file():
        raise ConfigError(f"expected the journal of a job that runs in {run_dir}, found no {JOURNAL_FILE}")
    own, port = parse_listen("--listen", listen) if listen is not None else (job.config.network.address, 0)
    if is_loopback(own) and not is_loopback(job.config.network.address):
        raise ConfigError(
            f"--listen: expected an address that the job's other hosts can reach, as {job.config.network.address} was, "
            f"got {own} (loopback): give one of 'ip -4 addr'"
        )
    try:
        token = wire.read_token(run_dir / TOKEN_FILE)
    except (OSError, EverstepError) as error:
        raise ConfigError(f"cannot read the job's token in {run_dir / TOKEN_FILE}: {error}") from None
    with run_lock(run_dir):
        _refuse_if_led(run_dir, job.config, token, own)
        _refuse_if_stopped(run_dir)
        check_network(_at(job.config, own), port)
        print(about_to_run(job), file=sys.stderr, flush=True)
        succession = Succession(address=own, anew=True)
        name = os.uname().nodename
        return _take_part(run_dir, job, token, succession, slots or -1, name, port, found_domains(None, os.environ))


def _at(config: Config, own: str) -> Config:
    from everstep.base.config import load_config, to_dict

    return load_config([("the job", to_dict(config)), ("--listen", {"network.address": own})])


def _refuse_if_led(run_dir: Path, config: Config, token: bytes, own: str) -> None:
    """Raises: ConfigError if the job's coordinator answers."""
    try:
        there = read_address(run_dir / COORDINATOR_FILE)
        found = among([(there.host, there.port)], token, Tls.of(shown_by(config.security.tls, token, own)))
    except (OSError, ProtocolError):  # nobody has said where it is, or somebody else is there by now
        return
    if found is not None:
        raise ConfigError(
            f"the coordinator of {run_dir} answers at {there.host}:{there.port}: takeover is only for a job whose "
            "coordinator is lost"
        )


def _refuse_if_stopped(run_dir: Path) -> None:
    """Raises: ConfigError if the job has said how it ended, and has not begun again since."""
    lives = [e["kind"] for e in read_events(run_dir / EVENTS_FILE) if e["kind"] in ("job_started", *ENDS)]
    if lives and lives[-1] in ENDS:
        raise ConfigError(
            f"the job in {run_dir} has stopped: there is nothing to take over. To go on: {History(run_dir).resume}"
        )
