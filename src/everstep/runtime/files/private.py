"""Files of a job belong to its owner alone: directories 0700, files 0600, in a directory that is the right user's.

The umask sees to it: every process of a job inherits it, and libraries that write files by themselves heed it. Files
that an older version or another umask left wider are closed when a job runs there again.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

from everstep.base.below import DRAFT, OTHERS, folder_of, refuse_others, whose
from everstep.base.config_keys import NOTICES, SINKS
from everstep.base.errors import ConfigError
from everstep.protocol.roles import PEOPLE
from everstep.runtime.files import host_directory
from everstep.runtime.link import address

_OURS = {
    *(address.LOCK_FILE, address.TOKEN_FILE, address.JOB_FILE, address.DATASET_FILE, address.EVENTS_FILE),
    *(address.COORDINATOR_FILE, address.JOURNAL_FILE, address.METRICS_FILE, address.METRICS_TOKEN_FILE),
    *(address.NEWEST_FILE, address.NOTES_FILE),
    *(host_directory.PLACE_FILE, host_directory.SOURCE_FILE, host_directory.HOSTS_FILE, *host_directory.PAGES),
    *(host_directory.ARRIVED_FILE, host_directory.COPY_FILE, host_directory.OWN_FOLDER, "newest-checkpoint.json"),
    *(address.LOGS_FOLDER, address.METRICS_FOLDER, address.PROFILES_FOLDER, address.CHECKPOINTS_DIR),
    *map(address.role_file, PEOPLE),
    *("ledger", "final", "chaos", "report.html", "report-figures", "launch", *SINKS, NOTICES),
}
_OURS_TOO = re.compile(
    rf"previous-\d+|\.({'|'.join(map(re.escape, _OURS))})\.\d+"  # moved there by --fresh; still being written
)
_WRITTEN_S = 10.0
"""A younger draft may be one that a dashboard is writing."""
_THE_JOBS_ALONE = ("final", "ledger")
"""Folders in which nothing else writes."""
_OF_A_STORE = re.compile(r"(step-|damaged-).*|(latest|best|pins)\.json")


def _is_ours(name: str) -> bool:
    return name in _OURS or _OURS_TOO.fullmatch(name) is not None


def close_run_dir(run_dir: Path) -> None:
    """Close files that jobs left in a run directory to other users; also the directory, if it holds nothing else.

    Raises: OSError.
    """
    _close_what_is_ours(run_dir, _is_ours)


def refuse_foreign(run_dir: Path) -> None:
    """Check a directory before a job uses it: neither it nor the files that the job opens, moves or removes there may
    belong to another user, or be links that lead elsewhere.

    Raises: ConfigError.
    """
    host_directory.checkpoints_in(run_dir)
    path = run_dir
    try:
        with folder_of(run_dir / address.LOCK_FILE) as folder:
            for name in filter(_is_ours, os.listdir(folder)):
                path = run_dir / name
                with contextlib.suppress(FileNotFoundError):  # the draft of a dashboard
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISLNK(found.st_mode):
                        words = "is a symbolic link, and below a run directory none is followed"
                        raise ConfigError(f"{path} {words}: remove it, or choose another --run-dir")
                    refuse_others(found.st_uid, folder, root_too=True)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror or error}") from None


def owner_words(run_dir: Path) -> str:
    """Warning for the user if root uses a directory of others, or made it for them; "" otherwise.

    Raises: OSError.
    """
    owner, own = whose(run_dir)
    if owner == own:
        return ""
    who = "root" if owner == 0 else f"user {owner}"
    return f"warning: {run_dir} belongs to {who}, and this job is user {own}'s: {who} can change what the job reads"


def sweep_drafts(run_dir: Path) -> None:
    """Remove unfinished files that killed writers left in a (locked) directory."""
    folders = [run_dir, *(run_dir / name for name in _OURS - {address.CHECKPOINTS_DIR} if (run_dir / name).is_dir())]
    for folder in folders:
        newest = time.time() - (0.0 if folder.name in _THE_JOBS_ALONE else _WRITTEN_S)
        for path in folder.glob(".*"):
            with contextlib.suppress(OSError):
                if DRAFT.fullmatch(path.name) and path.lstat().st_mtime <= newest:
                    path.unlink()


def close_store(folder: Path) -> None:
    """Close a folder of checkpoints elsewhere to other users. Raises: OSError."""
    _close_what_is_ours(folder, lambda name: _OF_A_STORE.fullmatch(name) is not None)


def close_folder(path: Path) -> None:
    """Close one folder or file to other users. Links are left alone: their targets are elsewhere. Raises: OSError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return  # a temporary file that has its name by now
    if (stat.S_ISDIR(mode) or stat.S_ISREG(mode)) and mode & OTHERS:
        path.chmod(stat.S_IMODE(mode) & ~OTHERS)


def _close_what_is_ours(folder: Path, ours: Callable[[str], bool]) -> None:
    names = os.listdir(folder)
    for name in filter(ours, names):
        _close_tree(folder / name)
    if all(map(ours, names)):
        close_folder(folder)


def _close_tree(top: Path) -> None:
    close_folder(top)
    if top.is_symlink():
        return
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            close_folder(Path(folder, name))
