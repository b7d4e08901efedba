"""Hosts that can take over a job whose coordinator is lost: by its lease in etcd, or by a user's command."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from everstep.base.config import Config, load_config, to_dict
from everstep.base.doors import at_port, host_of, is_loopback
from everstep.base.errors import ConfigError, EverstepError, NoHead, ProtocolError
from everstep.base.etcd_address import EtcdAddress
from everstep.base.exit_codes import JOB_FAILED, WORKERS_MISSING
from everstep.cli.beside import parse_listen
from everstep.cli.coming_back import end_agent, left_agent, standing_by
from everstep.cli.conclusion import ENDS
from everstep.cli.doors import check_own_ports
from everstep.cli.job import about_to_run, check_network, read_job
from everstep.cli.leading import see_through
from everstep.cli.meeting import ETCD_S, Met, etcd_at
from everstep.cli.run_dir import read_digest
from everstep.cli.standby_fill import copy_in
from everstep.cli.starting import start_here
from everstep.observe.events import read_events
from everstep.protocol.lease.requests import Holder, HolderSeen, Load, Loaded, Look
from everstep.report.history import History
from everstep.runtime.files.host_directory import OWN_FOLDER, new_word, private_folder, word_in
from everstep.runtime.files.run_lock import is_locked, run_lock
from everstep.runtime.lead.etcd import Announced, Etcd
from everstep.runtime.lead.etcd_access import find_access
from everstep.runtime.lead.finding import among, in_etcd
from everstep.runtime.lead.journal import begin_term
from everstep.runtime.lead.journal_and_lease import place_of
from everstep.runtime.lead.succession import Succession, new_owner
from everstep.runtime.link import wire
from everstep.runtime.link.address import COORDINATOR_FILE, EVENTS_FILE, JOURNAL_FILE, TOKEN_FILE, read_address
from everstep.runtime.link.interfaces import own_address
from everstep.runtime.link.tls import Tls, shown_by
from everstep.runtime.start import Start

_AGAIN_S = 0.25
_SHARED_S = 5.0  # a job announces itself just before it leaves its word, and a mount may show the word later


def check_lease(config: Config, secrets: Mapping[str, str]) -> None:
    """Raises: ConfigError if this host lacks files or variables for the job's etcd, or has invalid ones. secrets: of
    its user there."""
    if config.control.etcd is not None:
        address = EtcdAddress.parse("control.etcd", config.control.etcd)
        find_access(address, config.control, {**os.environ, **secrets})


def runs_elsewhere(begun: Start) -> bool:
    """Whether the job with the lease of this config is led already. While its lease is a lost host's, or free, another
    host may be about to take it, and is waited for. Raises: as `begin_leased`."""
    control = begun.config.control
    if control.etcd is None:
        return False
    address = EtcdAddress.parse("control.etcd", control.etcd)
    access = find_access(address, control, {**os.environ, **begun.secrets})
    with contextlib.closing(Etcd(address, begun.token, ETCD_S, access=access)) as etcd:
        try:
            return _leader(etcd, control.lease_s) is not None
        except ProtocolError as error:
            raise ConfigError(f"control.etcd: {error}") from None


def begin_leased(begun: Start) -> tuple[Start, list[str]]:
    """Announce a job that begins now, if it is configured to have a lease. A killed predecessor may hold the lease
    until it ends. Returns the start, and lines for the user.

    Raises: ConfigError if a job runs there, or etcd does not let this host in; Deposed if a host that stays meets one
    there; NoHead if etcd does not answer.
    """
    control = begun.config.control
    if control.etcd is None:
        return begun, []
    address = EtcdAddress.parse("control.etcd", control.etcd)
    access = find_access(address, control, {**os.environ, **begun.secrets})
    etcd, owner, word = Etcd(address, begun.token, ETCD_S, access=access), new_owner(), new_word()
    facts = {"run_dir": str(begun.folder.resolve()), "word": word}
    try:
        holder = _leader(etcd, control.lease_s)
        if holder is None:  # standbys look for the token as soon as they hear of the job
            wire.write_token(begun.folder / TOKEN_FILE, begun.token)
            holder = etcd.begin(facts, owner, control.lease_s)
    except ProtocolError as error:
        raise ConfigError(f"control.etcd: {error}") from None
    if holder is not None:
        raise standing_by(begun, begun.config.workers) if begun.stays else ConfigError(_still(etcd, holder))
    lines = [f"hosts that can take over join with: everstep agent --join {address} --standby"]
    lines += [f"warning: {text}" for text in (access.warning(),) if text]
    return replace(begun, succession=Succession(owner=owner, job=etcd.job, word=word)), lines


def _leader(etcd: Etcd, lease_s: int) -> Holder | None:
    """Who leads the job that was announced there before, once that is clear; it may be between two coordinators. None
    if it is over: it says so, or nobody has held its lease for longer than a takeover takes."""
    if etcd.announced() is None:
        return None
    begun_s = time.monotonic()
    free_s = begun_s + 2 * lease_s + 1
    while time.monotonic() < free_s:
        seen, found = etcd.ask(Look()), etcd.ask(Load())
        holder = seen.holder if isinstance(seen, HolderSeen) else None
        if holder is not None:
            if time.monotonic() > begun_s + lease_s + 1:  # a killed coordinator holds the lease a while longer
                return holder
            free_s = time.monotonic() + 2 * lease_s + 1
        elif isinstance(found, Loaded) and any(entry.get("kind") == "ended" for entry in found.entries):
            return None
        time.sleep(_AGAIN_S)
    return None


def _still(etcd: Etcd, holder: Holder) -> str:
    where = at_port(str(holder.where.get("host")), int(holder.where.get("port", 0)))
    return f"a job is still running under {etcd.address}: its coordinator is at {where}; wait, or stop it"


def stand_by(begun: Start, met: Callable[[Met], object] | None = None) -> int:
    """Be an agent, and the job's next coordinator if the present one is lost. met: called with a head that is there
    already. Returns the exit code, which is 0 only if the job is complete."""
    begun = replace(begun, agent=left_agent())
    with contextlib.ExitStack() as held, contextlib.ExitStack() as unwatched:
        unwatched.callback(end_agent, begun)
        etcd = held.enter_context(contextlib.closing(etcd_at(begun)))
        patience_s = begun.config.hosts.wait_s
        found = _announced(etcd, patience_s, patient=bool(begun.agent))
        if begun.stays and _is_over(etcd):
            unwatched.close()  # the agent is that job's
            begun = replace(begun, agent=0)
            _wait_for_next(etcd, patience_s)
            found = _announced(etcd, patience_s)
        word = str(found.facts.get("word", ""))
        begun = replace(begun, own=begun.own or _own(etcd, begun.config))
        shown = begun.run_dir or Path(str(found.facts.get("run_dir")))
        shared = _sees(shown, lambda: _place(etcd, patience_s) or word)
        # Where another host has led again, that folder is its agent's.
        if shared and word_in(shown) != word and not begun.agent and is_locked(shown / OWN_FOLDER):
            begun, shared = replace(begun, run_dir=None), False
        if not shared:
            shown = held.enter_context(copy_in(begun, word, lambda: in_etcd(etcd)))
        if met is not None and (where := in_etcd(etcd)) is not None:
            met(Met(begun.own, begun.token, (str(where["host"]), int(where["port"]))))
        job = read_job(shown, joined=False)
        check_lease(job.config, begun.secrets)
        copying_host = "" if shared and word_in(shown) == word else begun.host  # hosts share the first directory alone
        begun = replace(begun, room=begun.room or None)
        check_own_ports(job.config, begun.room, head=True, agent=bool(copying_host))
        succession = Succession(True, new_owner(), found.job, copying_host=copying_host)
        how = "" if shared else ", with files of its own"
        print(f"{begun.host} stands by for the job in {shown}{how}; {about_to_run(job)}", file=sys.stderr, flush=True)
        unwatched.pop_all()  # from here on the job's process looks after the agent
        exit_code = see_through(replace(begun, run_dir=shown, succession=succession), job)
        private = shown == private_folder(word[:16], f"{begun.host}-standby")
        over = exit_code in (0, JOB_FAILED, WORKERS_MISSING)
        if private and over and not (shared or word_in(shown)):  # it was led elsewhere
            shutil.rmtree(shown, ignore_errors=True)
        return exit_code


def _sees(run_dir: Path, word: Callable[[], str]) -> bool:
    """Whether the job is led in this directory. word: returns the word that the job left in its own."""
    end_s = time.monotonic() + _SHARED_S
    while word_in(run_dir) != word():
        if time.monotonic() > end_s or not run_dir.is_dir():
            return False
        time.sleep(_AGAIN_S)
    return True


def _place(etcd: Etcd, patience_s: float) -> str:
    """Word of the directory in which the job is led now; "" if nobody says. Raises: NoHead if etcd does not answer."""
    end_s = time.monotonic() + patience_s
    while not isinstance(seen := etcd.ask(Look()), HolderSeen):
        if time.monotonic() > end_s:
            raise NoHead(f"nobody under {etcd.address} has said for {patience_s:g} s who leads the job")
        time.sleep(_AGAIN_S)
    return place_of(seen.holder.where) if seen.holder is not None else ""


def _announced(etcd: Etcd, patience_s: float, *, patient: bool = False) -> Announced:
    """The job, once there is one. patient: workers of the job run here, so etcd is waited for, too. Raises: NoHead if
    none comes, or etcd does not answer."""
    end_s, said = time.monotonic() + patience_s, False
    while True:
        try:
            words, found = f"no job has begun under {etcd.address}", etcd.announced()
        except ProtocolError as error:
            raise ConfigError(f"--join: {error}") from None
        except NoHead as error:
            if not patient:
                raise
            words, found = str(error), None
        if found is not None:
            return found
        if time.monotonic() > end_s:
            raise NoHead(f"{words} for {patience_s:g} s")
        if not said:
            print(f"{words}: waiting for it", file=sys.stderr, flush=True)
        said = True
        time.sleep(_AGAIN_S)


def _wait_for_next(etcd: Etcd, patience_s: float) -> None:
    """Wait while the announced job is over, as the next may follow it. Raises: NoHead if none comes."""
    end_s, said = time.monotonic() + patience_s, False
    while etcd.announced() is not None and _is_over(etcd):
        if time.monotonic() > end_s:
            raise NoHead(f"the job under {etcd.address} is over, and no other has begun for {patience_s:g} s")
        if not said:
            print(f"the job under {etcd.address} is over: waiting for the next one", file=sys.stderr, flush=True)
        said = True
        time.sleep(_AGAIN_S)


def _is_over(etcd: Etcd) -> bool:
    """Whether the announced job has ended, and nobody leads it."""
    seen, found = etcd.ask(Look()), etcd.ask(Load())
    free = isinstance(seen, HolderSeen) and seen.holder is None
    return free and isinstance(found, Loaded) and any(entry.get("kind") == "ended" for entry in found.entries)


def _own(etcd: Etcd, config: Config) -> str:
    """Address of this host: that of network.interface, else the one on the way to the coordinator, or to etcd while
    there is no coordinator."""
    seen, there = etcd.ask(Look()), host_of(etcd.address.members[0])
    if isinstance(seen, HolderSeen) and seen.holder is not None and seen.holder.where:
        there = str(seen.holder.where.get("host"))
    try:
        return own_address(config.network, None, there)
    except (OSError, UnicodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"--join: there is no way to {there} from here ({why}): give --address") from None


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--listen", metavar="ADDR:PORT", help="Address of this host where agents join; port 0: any free port.")
@click.option("--slots", type=click.IntRange(1), help="Largest number of workers on this host (none).")
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
            f"got {own} (loopback): give one of 'ip addr'"
        )
    try:
        token = wire.read_token(run_dir / TOKEN_FILE)
    except (OSError, EverstepError) as error:
        raise ConfigError(f"cannot read the job's token in {run_dir / TOKEN_FILE}: {error}") from None
    host = os.uname().nodename
    with run_lock(run_dir):
        known: dict[str, Any] = {"run_dir": run_dir, "token": token, "port": port}
        begun = start_here(job.config, host=host, own=own, room=slots, **known)
        _refuse_if_led(begun)
        _refuse_if_stopped(run_dir)
        check_network(load_config([("the job", to_dict(job.config)), ("--listen", {"network.address": own})]), port)
        print(about_to_run(job), file=sys.stderr, flush=True)
        succession = Succession(by_hand=True, term=begin_term(run_dir / JOURNAL_FILE))
        return see_through(replace(begun, succession=succession), job)


def _refuse_if_led(begun: Start) -> None:
    """Raises: ConfigError if the job's coordinator answers."""
    try:
        there = read_address(begun.folder / COORDINATOR_FILE)
        shown = shown_by(begun.config.security.tls, begun.token, begun.own)
        found = among([(there.host, there.port)], begun.token, Tls.of(shown))
    except (OSError, ProtocolError):  # no address is known, or another program listens there by now
        return
    if found is not None:
        raise ConfigError(
            f"the coordinator of {begun.folder} answers at {at_port(there.host, there.port)}: takeover is only for a "
            "job whose coordinator is lost"
        )


def _refuse_if_stopped(run_dir: Path) -> None:
    """Raises: ConfigError if the job has said how it ended, and has not begun again since."""
    lives = [e["kind"] for e in read_events(run_dir / EVENTS_FILE) if e["kind"] in ("job_started", *ENDS)]
    if lives and lives[-1] in ENDS:
        raise ConfigError(
            f"the job in {run_dir} has stopped: there is nothing to take over. To go on: {History(run_dir).resume}"
        )
