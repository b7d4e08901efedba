"""The directory in which a host keeps a job's files: the job's own if the host sees it, else one of its own.

A host finds out by looking: the job leaves a word in its directories, and a host that finds it there sees the same
directory, on any kind of mount. One of its own holds the job's facts for the host's processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.below import write_atomically
from everstep.base.config_keys import CheckpointConfig
from everstep.base.domains import Domains, ordered
from everstep.base.errors import ConfigError
from everstep.base.given import read_given, read_json
from everstep.protocol.converter import converter
from everstep.protocol.messages import HostPlace, JobFacts
from everstep.runtime.link.address import (
    CHECKPOINTS_DIR,
    COORDINATOR_FILE,
    JOB_FILE,
    LOGS_FOLDER,
    METRICS_FOLDER,
    address_of,
    announce,
)

PLACE_FILE = "place"
SOURCE_FILE = "source"
HOSTS_FILE = "hosts.json"
PAGES = ("rehearsed.json",)
"""Small files of a job that workers of all hosts read."""
COPY_FILE = "replica.json"
"""File in a copy that names the copied directory and the versions of its files."""
ARRIVED_FILE = "arrived.json"
"""File in a host's own directory. files: the digest, by name, of each file that has arrived at the head whole; refused:
why a file cannot arrive there; through: the step up to which all are in the job's events. Workers keep their records of
later steps."""
OWN_FOLDER = "host"
"""Folder with the files of this host's own agent, in the directory of a host that leads by a lease or may have to. The
agent sends them to the head as others do, so its workers go on when another host leads in another directory."""
SHARED_DISK = "job"
"""Word for the directory of checkpoints that all hosts share."""
_MOST_WORD_BYTES = 64
_NOBODY = 1


def new_word() -> str:
    """Word for a job that starts."""
    return secrets.token_hex(16)


def leave_word(run_dir: Path, checkpoints: str | None, word: str = "") -> None:
    """Leave a word in the directories of a job that starts: each time a new one, so old copies do not count.

    checkpoints: their folder, None if they go into the run directory. word: the one that others were told; "": a new
    one. Raises: OSError of the run directory.
    """
    word = (word or new_word()) + "\n"
    write_atomically(run_dir / PLACE_FILE, word)
    if checkpoints is not None:
        with contextlib.suppress(OSError):  # the writer of checkpoints reports that
            Path(checkpoints).mkdir(parents=True, exist_ok=True)
            write_atomically(Path(checkpoints) / PLACE_FILE, word)


def checkpoints_in(run_dir: Path) -> Path:
    """Folder of checkpoints that go into a run directory. Raises: ConfigError for a link."""
    folder = run_dir / CHECKPOINTS_DIR
    if folder.is_symlink():
        where = os.path.realpath(folder)
        raise ConfigError(
            f"{folder} is a symbolic link, and below a run directory none is followed: remove it, and say where "
            f"checkpoints go with --set checkpoint.disk.path={where}"
        )
    return folder


def word_of(folder: Path) -> str:
    """The word in this host's directory; "" if there is none. Raises: OSError if it cannot be read."""
    with contextlib.suppress(FileNotFoundError):
        return read_given(folder / PLACE_FILE, _MOST_WORD_BYTES).decode(errors="replace").strip()
    return ""


def word_in(folder: Path) -> str:
    """The word in a directory that may be another host's; "" if none can be read."""
    with contextlib.suppress(OSError):
        return word_of(folder)
    return ""


@dataclass(frozen=True)
class Place:
    """Place of a host's files of a job. apart: the directory is the host's own; passing: removed when the job is
    done; around: as `Joining` has it."""

    run_dir: Path
    apart: bool
    passing: bool = False
    around: str = ""

    @property
    def top(self) -> Path:
        """Where this host's checkpoints and its workers' logs are: they outlive that the host leads, or does not."""
        return Path(self.around) if self.around else self.run_dir


def find_place(facts: JobFacts, given: str, host: str, around: str = "") -> Place:
    """Place for an agent that has heard of its job. given: the directory that the user named on this host, "" if none.
    around: as `Joining` has it.

    Raises: ConfigError if the directory cannot be used.
    """
    shown = Path(given or facts.run_dir)
    if (facts.place and word_in(shown) == facts.place) or (not facts.place and shown.is_dir()):
        return Place(shown, apart=False)
    own = shown if given else _private(facts, host)
    try:
        before = read_json(own / JOB_FILE)
        if isinstance(before, dict) and before.get("created_unix_ns") != facts.job.get("created_unix_ns"):
            raise ConfigError(f"--run-dir: {own} has files of another job: choose a new directory")
    except (OSError, ValueError):
        pass
    try:
        (own / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
        if not word_in_source(own):
            write_atomically(own / SOURCE_FILE, secrets.token_hex(8) + "\n")
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot write {own}: {error.strerror or error}") from None
    return Place(own, apart=True, passing=not given, around=around)


def is_of(job: Any, own: Path) -> bool:
    """Whether a directory has facts of this job, maybe older ones. job: the facts."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(read_json(own / JOB_FILE).get("created_unix_ns") == job.get("created_unix_ns"))
    return False


def begin_anew(own: Path) -> None:
    """As a host's own agent is started for a job: remove what an earlier one has sent from this folder, since nothing
    in it says so. A folder that no agent has made is left alone."""
    if not word_in_source(own):
        return
    for name in (METRICS_FOLDER, LOGS_FOLDER, "final"):
        shutil.rmtree(own / name, ignore_errors=True)


def word_in_source(folder: Path) -> str:
    """Word by which the hosts know a host's own directory; "" if it has none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = read_given(folder / SOURCE_FILE, _MOST_WORD_BYTES).decode().strip()
        return found if re.fullmatch(r"[0-9a-f]{16}", found) else ""
    return ""


def write_job(place: Place, facts: JobFacts, address: tuple[str, int] | None) -> None:
    """Write the facts of the job that processes of this host read. address: of the coordinator; None if another file
    says it, and keeps up with it. Raises: OSError."""
    (place.run_dir / HOSTS_FILE).unlink(missing_ok=True)  # from an earlier run
    write_atomically(place.run_dir / JOB_FILE, json.dumps(facts.job, indent=2) + "\n")
    if address is not None:
        announce(place.run_dir / COORDINATOR_FILE, address_of(*address, pid=_NOBODY))  # no coordinator here


def _private(facts: JobFacts, host: str) -> Path:
    job = facts.job.get("created_unix_ns")
    return private_folder(f"{job if isinstance(job, int) else 0:x}", host)


def private_folder(job: str, host: str) -> Path:
    """Path of a directory that is the same at each return of the host, and that nobody else uses; it may not exist yet.

    Raises: ConfigError.
    """
    top = Path(tempfile.gettempdir()) / f"everstep-{os.getuid()}"
    try:
        top.mkdir(mode=0o700, exist_ok=True)
        found = top.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make {top}: {error.strerror or error}; say with --run-dir where files go") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{top} is not this user's alone: remove it, or say with --run-dir where files go")
    return top / f"{job}-{re.sub(r'[^A-Za-z0-9._-]', '_', host)[:64]}"


# ---- the other hosts


def write_hosts(run_dir: Path, places: dict[str, HostPlace]) -> None:
    """Write, for the processes of this host, where the other hosts keep their files. Nothing is written while all have
    shared one directory. Raises: OSError."""
    path = run_dir / HOSTS_FILE
    if len({place.disk for place in places.values()}) < 2 and not path.exists():
        return  # otherwise nobody looks for a host that is gone
    write_atomically(path, msgspec.json.encode(dict(sorted(places.items()))) + b"\n")


def hosts_there(run_dir: Path) -> dict[str, HostPlace]:
    """Each host's statement of its place, by name; {} if all share one directory. Damaged ones are left out."""
    found: dict[str, HostPlace] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for name, row in sorted(read_json(run_dir / HOSTS_FILE).items()):
            with contextlib.suppress(msgspec.ValidationError):
                found[name] = _place(row)
    return found


_place = converter(HostPlace)


def others(run_dir: Path, host: str) -> dict[str, str]:
    """Addresses of the hosts that have checkpoints in a directory that this one does not see, one for each directory.
    {} if all share one, or no other host is there."""
    places = hosts_there(run_dir)
    own = places[host].disk if host in places else ""
    found: dict[str, tuple[str, str]] = {}
    for name, place in places.items():
        if place.disk != own and place.address:
            found.setdefault(place.disk, (name, place.address))
    return dict(found.values())


def domains_there(run_dir: Path) -> dict[str, Domains]:
    """Failure domains of the hosts, by name, as far as they have said so."""
    return {name: ordered(place.domains, name) for name, place in hosts_there(run_dir).items()}


def is_led_above(facts: JobFacts, place: Place) -> bool:
    """Whether an agent's own directory lies in that in which the job is led."""
    return bool(place.around and facts.place) and word_in(place.top) == facts.place


def disk_of(facts: JobFacts, place: Place, config: CheckpointConfig, host: str) -> tuple[Path, str]:
    """Folder of checkpoints as a host sees it, and the word by which that directory is known.

    Raises: ConfigError if it should be the job's, and is not.
    """
    given = config.disk.path
    folder = Path(given) if given is not None else checkpoints_in(place.top)
    shared = not facts.place or word_in(folder) == facts.place
    if given is None:
        shared = not place.apart or is_led_above(facts, place)
    if config.shared == "yes" and not shared:
        raise ConfigError(
            f"checkpoint.shared=yes: expected the directory of the job's checkpoints at {folder}, it is not here: "
            "mount it, or leave checkpoint.shared at auto"
        )
    if config.shared != "no" and shared:
        return folder, SHARED_DISK
    return folder, own_disk(host)


def own_disk(host: str) -> str:
    """Word for the checkpoints of a host that has them alone."""
    return f"host {host}"
