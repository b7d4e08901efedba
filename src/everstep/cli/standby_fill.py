"""The directory of a standby host that does not see the job's: it is prepared, and filled from the head's."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from everstep.base.config_keys import TlsConfig
from everstep.base.errors import ConfigError, NoHead
from everstep.cli.coming_back import put_aside
from everstep.protocol.roles import PEOPLE
from everstep.runtime.files.host_directory import COPY_FILE, OWN_FOLDER, private_folder, word_of
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.files.standby_files import CopyLink, DirectoryCopy
from everstep.runtime.lead.finding import Finder, Where
from everstep.runtime.link import wire
from everstep.runtime.link.address import (
    CHECKPOINTS_DIR,
    COORDINATOR_FILE,
    JOB_FILE,
    LOGS_FOLDER,
    TOKEN_FILE,
    role_file,
)
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Tls, shown_by
from everstep.runtime.start import Start

_PATIENCE_S = 600.0
_TURN_S = 10.0
_AGAIN_S = 0.25


@contextlib.contextmanager
def copy_in(begun: Start, job: str, look: Callable[[], Where | None]) -> Iterator[Path]:
    """Directory that has, or a moment ago had, all files of the job's; locked as long as it is used.

    job: the word of the job when it began. look: where the head is, as `Finder` has it. Raises: ConfigError if the
    directory cannot be used; NoHead if no head fills it.
    """
    folder = begun.run_dir or private_folder(job[:16], f"{begun.host}-standby")
    with run_lock(folder):
        words = _make_ready(folder, job, begun.token, agent_runs=bool(begun.agent))
        if words:
            print(words, file=sys.stderr, flush=True)
        _fill(folder, begun, look)
        yield folder


def _make_ready(folder: Path, job: str, token: bytes, *, agent_runs: bool = False) -> str:
    """Prepare the folder; returns words for the user if old contents were set aside. agent_runs: the agent of this
    host, which follows the address of the head in this folder, runs already."""
    words = ""
    try:
        if kept_apart(folder, job):
            words = f"the old contents of {folder}, from an earlier time of this job, are in {put_aside(folder)} now"
        own = folder / OWN_FOLDER
        for path in (own, folder / LOGS_FOLDER, folder / CHECKPOINTS_DIR):
            path.mkdir(parents=True, exist_ok=True)
        if not agent_runs:
            (folder / COORDINATOR_FILE).unlink(missing_ok=True)
        wire.write_token(folder / TOKEN_FILE, token)
        for role in PEOPLE:
            wire.write_token(folder / role_file(role), role_token(token, role))
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot write {folder}: {error.strerror or error}") from None
    return words


def kept_apart(folder: Path, job: str) -> bool:
    """Whether the contents of a folder have to be set aside, because a host has led the job in it. A copy, or an empty
    folder, is kept. job: the job's word when it began. Raises: ConfigError if the files are another job's;
    OSError."""
    word = word_of(folder)
    if not (folder / COPY_FILE).exists() and (folder / JOB_FILE).exists() and word != job:
        raise ConfigError(f"--run-dir: {folder} has files of another job: choose a new directory")
    return bool(word)


def _fill(folder: Path, begun: Start, look: Callable[[], Where | None]) -> None:
    """Wait until the folder has all files as of a moment ago. Without a head, older complete ones do."""
    end_s = time.monotonic() + _PATIENCE_S
    while (where := look()) is None:
        if DirectoryCopy(folder).state(None).usable:
            DirectoryCopy(folder).fall_back()
            return
        if time.monotonic() > end_s:
            raise NoHead(f"nobody has held the job's lease for {_PATIENCE_S:g} s")
        time.sleep(_AGAIN_S)
    tls = Tls.of(shown_by(TlsConfig(mode=where["tls"]), begun.token, begun.own))
    with contextlib.ExitStack() as held:
        held.callback(Finder(folder / COORDINATOR_FILE, look, lambda: True).close)
        link = CopyLink(folder, begun.token, begun.host, tls)
        held.callback(link.close)
        while not link.wait_in_step(_TURN_S) and (look() is not None or not link.state().usable):
            if time.monotonic() > end_s:
                raise NoHead(f"no head has filled {folder} for {_PATIENCE_S:g} s: is the job still running?")
            print(f"{folder} is being filled from the head's directory", file=sys.stderr, flush=True)
    DirectoryCopy(folder).fall_back()
