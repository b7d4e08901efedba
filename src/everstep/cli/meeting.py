"""Places at which a host finds the job that it wants to join, as --join names them, and the wait for it.

The job listens at one address or at one of several, is found in etcd, or has a directory that says where it listens.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from everstep.base.config_keys import TlsConfig
from everstep.base.doors import at_port, check_private
from everstep.base.errors import ConfigError, NoHead, ProtocolError, TlsDiffers
from everstep.base.etcd_address import SCHEMES, EtcdAddress
from everstep.cli.run_dir import read_digest
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.etcd_access import find_access
from everstep.runtime.lead.finding import Where, among, in_etcd
from everstep.runtime.link import wire
from everstep.runtime.link.address import COORDINATOR_FILE, TOKEN_FILE, read_address
from everstep.runtime.link.context import Joining
from everstep.runtime.link.head_facts import as_refused, ask_about, check_mode, clock_words, refusal_words
from everstep.runtime.link.interfaces import own_address, route_to
from everstep.runtime.link.tls import Tls, shown_by
from everstep.runtime.start import Start

_FILE = "file://"
_AGAIN_S = 0.25
ETCD_S = 2.0


class Met(NamedTuple):
    """A job that answered at a place and accepted its token. own: the address of this host on the way there."""

    own: str
    token: bytes
    place: tuple[str, int]


def folder_of(address: str) -> Path | None:
    """The job's directory that "file://DIR" names, None for other addresses. Raises: ConfigError if it names none."""
    if not address.startswith(_FILE):
        return None
    if not address.removeprefix(_FILE):
        raise ConfigError(f"--join: expected file://DIR with the job's directory, got {address!r}")
    return Path(address.removeprefix(_FILE)).absolute()


def moves(address: str) -> bool:
    """Whether the job's coordinator may move later, so that this host has to look for it by itself."""
    return address.startswith(SCHEMES) or len(places_in(address)) > 1


def etcd_at(begun: Start) -> Etcd:
    """The etcd that this host has to ask.

    Raises: ConfigError if this host lacks credentials for it, or they are invalid.
    """
    address = EtcdAddress.parse("--join", begun.where)
    access = find_access(address, begun.config.control, {**os.environ, **begun.secrets})
    if access.warning():
        print(f"warning: {access.warning()}", file=sys.stderr, flush=True)
    return Etcd(address, begun.token, ETCD_S, access=access)


def looking(begun: Start) -> Callable[[], Where | None]:
    """Function that finds the job's coordinator, as `Finder` takes it.

    Raises: ConfigError; NoHead if etcd does not answer.
    """
    folder, known = folder_of(begun.where), places_in(begun.where)
    if folder is not None:
        return lambda: _in_folder(folder)
    if not known:
        etcd = etcd_at(begun)
        etcd.announced()
        return lambda: in_etcd(etcd)
    if len(known) == 1:
        return lambda: {"host": known[0][0], "port": known[0][1]}
    return lambda: _among(known, begun.token, begun.config.security.tls)


def _among(places: Sequence[tuple[str, int]], token: bytes, tls: TlsConfig) -> Where | None:
    try:
        return among(places, token, Tls.of(shown_by(tls, token, route_to(places[0][0]))))
    except ProtocolError as error:
        raise as_refused(error, tls) from None


def places_in(address: str) -> list[tuple[str, int]]:
    """The places that ADDR:PORT[,...] names; none for etcd and directories. Raises: ConfigError for another form."""
    if address.startswith((*SCHEMES, _FILE)):
        return []
    places = [Joining(one, "", [], "").where() for one in address.split(",")]
    known = [place for place in places if not isinstance(place, Path)]
    if len(known) < len(places):
        raise ConfigError(f"--join: expected ADDR:PORT like 127.0.0.1:29400, or file://DIR, got {address!r}")
    return known


def _in_folder(folder: Path) -> Where:
    found = read_address(folder / COORDINATOR_FILE)
    return {"host": found.host, "port": found.port}


def wait_for_job(begun: Start, look: Callable[[], Where | None], *, patient: bool = False) -> Met | None:
    """Wait until a job with this token answers at a place that `look` returns. patient: also while a process with
    another token answers, because it may be about to leave. Returns None if the directory says that the job is over.

    Raises: ConfigError if the job has another token, or it is no job; NoHead if nobody has answered for long.
    """
    config, folder, patience_s = begun.config, folder_of(begun.where), begun.config.hosts.wait_s
    end_s, told, at = time.monotonic() + patience_s, False, begun.where
    while True:
        try:
            found = look()
            if found is None:
                for one in () if told else places_in(at):
                    check_mode(one, begun.token, config.security.tls, route_to(one[0]))
                none = "none of them answers" if len(places_in(at)) > 1 else "nobody holds its lease, or answers"
                raise ConnectionRefusedError(none)
            place = str(found["host"]), int(found["port"])
            at = at_port(*place)
            token = begun.token or wire.read_token(Path(folder or "", TOKEN_FILE))
            own = own_address(config.network, begun.own or None, place[0])
            check_private("--address", own, trusted=config.network.trusted)
            warning = clock_words(ask_about(place, token, config.security.tls, own))
            if warning:
                print(f"warning: {warning}", file=sys.stderr, flush=True)
            return Met(own, token, place)
        except TlsDiffers as error:
            raise ConfigError(f"--join {at}: {error}") from None
        except ProtocolError as error:
            if folder is None and not patient:
                raise ConfigError(f"--join {at}: {refusal_words(error)}") from None
            there = f"at {at}" if folder is None else f"in {folder}"
            words = f"no job answers {there} ({error})"  # the answer may still be the previous job's
        except (OSError, UnicodeError) as error:  # an impossible host name raises a UnicodeError
            words = f"no head at {at} ({(getattr(error, 'strerror', None) or str(error)).lower()})"
        if folder is not None and read_digest(folder) is not None and not (folder / COORDINATOR_FILE).exists():
            return None
        if time.monotonic() >= end_s:
            raise NoHead(f"{words} for {patience_s:g} s: is the job's 'everstep run --listen' started there?")
        if not told:
            print(f"{words}: waiting for it", file=sys.stderr, flush=True)
            told = True
        time.sleep(min(_AGAIN_S, max(0.0, end_s - time.monotonic())))
