"""A deposed head comes back: its process becomes `everstep agent --standby`, by exec, in the same directory."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from everstep.base.below import write_atomically
from everstep.base.domains import VARIABLE
from everstep.base.errors import ConfigError, Deposed
from everstep.cli.run_dir import set_aside
from everstep.cli.tokens import TOKEN_VARIABLE
from everstep.runtime.files.host_directory import OWN_FOLDER, private_folder, word_in, word_in_source
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.lead.etcd_access import file_variables
from everstep.runtime.link.address import CHECKPOINTS_DIR, COORDINATOR_FILE, LOGS_FOLDER
from everstep.runtime.process import own_command
from everstep.runtime.start import Start
from everstep.runtime.supervisor import LocalHost

HEAD_MARK = "EVERSTEP_HEAD_MARK"
"""Variable with the name of a file that is there while this host leads the job, for the script that started it."""


_AGENT = "EVERSTEP_AGENT"
"""Variable with the pid of this host's agent, for the program that this process becomes."""
_MOST_DIGITS = 20
_KEPT = (CHECKPOINTS_DIR, OWN_FOLDER, LOGS_FOLDER, COORDINATOR_FILE)


def left_agent() -> int:
    """Pid of an agent that this process has left to itself; 0 if there is none."""
    text = os.environ.pop(_AGENT, "")
    try:
        pid = int(text) if text.isdecimal() and len(text) < _MOST_DIGITS else 0
        return pid if pid and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None else 0
    except (OSError, OverflowError):
        return 0  # no child of this process


def end_agent(begun: Start) -> None:
    """End the agent that the job's process has left, if there is one."""
    if begun.agent:
        local = LocalHost(replace(begun, run_dir=begun.run_dir or Path()))  # it writes nothing
        local.adopt(begun.agent)
        local.end()


def mark_head(*, leads: bool) -> None:
    """Say whether this host leads the job, if the caller asked for that."""
    path = os.environ.get(HEAD_MARK, "")
    with contextlib.suppress(OSError):
        if path and leads:
            write_atomically(Path(path), "")
        elif path:
            Path(path).unlink(missing_ok=True)


def become_standby(begun: Start, *, deposed: bool = True, refill: int | None = None) -> NoReturn:
    """Go on as a standby host. begun: of this host, where nothing of the job runs any more but the agent, with its
    workers. deposed: the job is led elsewhere since, so this directory is set aside. Of the hosts that share one, only
    that on which the job began stands by in it again; while it is there, it holds the directory, and does this. refill:
    as of the agent. Raises: ConfigError, OSError if that fails."""
    if begun.agent:  # until the next program listens, a notice of a preemption would kill it, and the agent with it
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if deposed:
        shares, word = begun.succession.guest and not begun.succession.copying_host, word_in(begun.folder)
        with contextlib.suppress(ConfigError) if shares else contextlib.nullcontext(), run_lock(begun.folder):
            put_aside(begun.folder)
        if shares:
            begun = replace(begun, run_dir=private_folder(word[:16], f"{begun.name}-standby") if word else None)
    mark_head(leads=False)
    command = standby_words(begun) + ([] if refill is None else ["--refill", str(refill)])
    os.execve(command[0], command, _variables(begun))


def standing_by(begun: Start, workers: int | None) -> Deposed:
    """Exception for a host that was to begin a job which another host leads already: it stands by instead. It does not
    stay after a stop of the job, because the same command is given again then. workers: in total."""
    refill, begun = None if begun.room is None else workers, replace(begun, stays=False)
    return Deposed("the job runs already", lambda: become_standby(begun, deposed=False, refill=refill))


def put_aside(folder: Path) -> Path | None:
    """Move the contents of a locked directory away, except for parts of checkpoints, which other hosts may need, and
    the files of this host's agent, which may run. Returns where they are. Raises: ConfigError, OSError."""
    aside = set_aside(folder, lambda name: name not in _KEPT)
    output = sorted((folder / LOGS_FOLDER).glob("output*.log"))
    if aside is not None and output:  # the launcher's lines are the job's, not this host's
        (aside / LOGS_FOLDER).mkdir()
        for path in output:
            os.rename(path, aside / LOGS_FOLDER / path.name)
    return aside


def refuse_deposed(folder: Path) -> None:
    """Check a directory without a job before one begins there at the first step. Raises: ConfigError if `put_aside` has
    moved a job away, and the host did not become a standby after that: it would be trained all over again."""
    aside = sorted(folder.glob("previous-*"), key=lambda path: (len(path.name), path.name))
    if aside and word_in_source(folder / OWN_FOLDER):
        raise ConfigError(
            f"another host has led the job of {folder} since, in a directory of its own, and what was here is in "
            f"{aside[-1]}: go on where it was led last, or with --resume-from; --fresh begins anew"
        )


def standby_words(begun: Start) -> list[str]:
    """Command of the standby host that this head becomes."""
    slots = 0 if begun.room is None else begun.room or begun.config.workers
    own = ["--slots", str(slots), "--host-name", begun.name, "--address", begun.address]
    own += [] if begun.run_dir is None else ["--run-dir", str(begun.run_dir.absolute())]
    own += ["--set", f"hosts.wait_s={begun.config.hosts.wait_s:g}", *["--stay"] * begun.stays]
    return own_command("everstep", "agent", "--join", str(begun.config.control.etcd), "--standby", *own)


def _variables(begun: Start) -> dict[str, str]:
    """Environment of the command, which has not read the job's config yet when it asks etcd."""
    domains = ",".join(f"{kind}={name}" for kind, name in begun.domains.items())
    found = {TOKEN_VARIABLE: begun.token.hex(), **begun.secrets, **({VARIABLE: domains} if domains else {})}
    found |= {_AGENT: str(begun.agent)} if begun.agent else {}
    return {**file_variables(begun.config.control), **os.environ, **found}
