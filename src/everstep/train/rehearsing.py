"""When and where a script is rehearsed: once for a job and a script, before the first step, while the workers start.

Apart from the rehearsal because here it meets a worker that is launched, or a script that is run by itself. Either has
a process for it in which no code of the user's has run, so it does not matter which threads, files and devices the
script opens.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from everstep.base.below import kept_descriptors, write_atomically
from everstep.base.errors import ConfigError
from everstep.base.given import read_given, read_json
from everstep.base.readable import readable
from everstep.runtime.host.fork_server import redirect_output
from everstep.runtime.link.address import JOB_FILE
from everstep.runtime.process import close_descriptors, die_with_parent, own_command, pinned_environment
from everstep.script.reachable import of_user
from everstep.script.script_files import files_of
from everstep.script.watched_life import IN_REHEARSAL
from everstep.train.rehearsal import LIMIT_S, LifeLink, Rehearsal, Rehearsed, run_script
from everstep.train.worker_link import LaunchedLink

PROCESS = "everstep.train.rehearsal_process"
_REMEMBERED, _FOLDER, _VERDICT = "rehearsed.json", "rehearsal", "verdict.json"
_PATIENCE_S = LIMIT_S + 30.0
_TICK_S, _GLANCE_S = 0.05, 0.01

Conclude = Callable[[], str]
"""Waits for the verdict. Returns why there was no rehearsal, "" if there was one. Raises: ConfigError."""


def _no_rehearsal() -> str:
    return ""


def beside_worker(link: LaunchedLink, script: str, argv: list[str], enter: Callable[[LifeLink], None]) -> Conclude:
    """Begin the rehearsal if it is due: worker 0 does it, and the others wait for it. enter: sets the link to which
    `join` belongs from then on."""
    run_dir = link.run_dir
    digest = script_digest(script, argv)
    if run_dir is None or not link.config.rehearse or is_rehearsed(run_dir, digest, tried=link.me.incarnation > 0):
        return _no_rehearsal
    if _is_under_way(run_dir):  # the script has been edited since: this life will be compared, and refused
        return _no_rehearsal
    if link.me.worker_id:
        return lambda: _await_others(run_dir, digest, link.row.tick)
    folder = _cleared(run_dir)
    what = Rehearsed(script, tuple(argv), str(folder), config=link.config, said=link.job)
    pid = _fork(what, enter)
    conclude = _once(lambda: _conclude(pid, run_dir, script, digest, link.row.tick))
    if _gpus():
        conclude()
    return conclude


def beside_script(run_dir: Path) -> Conclude:
    """Begin the rehearsal of a script that is run by itself, and may go on later in this directory."""
    script = main_script()
    if script is None or IN_REHEARSAL in os.environ:
        return _no_rehearsal
    argv = sys.argv[1:]
    digest = script_digest(script, argv)
    if is_rehearsed(run_dir, digest):
        return _no_rehearsal
    folder = _cleared(run_dir)
    said = json.dumps({"script": script, "folder": str(folder), "parent": os.getpid()})
    process = subprocess.Popen(
        own_command(PROCESS, said, *argv),  # passed as they came: a single argument has a size limit
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=pinned_environment(1),
    )
    return lambda: _conclude(process.pid, run_dir, script, digest, lambda: None)


def perform(what: Rehearsed, enter: Callable[[LifeLink], None]) -> None:
    """Rehearse a script in this process, and write the verdict down."""

    def body(link: LifeLink) -> None:
        enter(link)
        run_script(what)

    verdict = Rehearsal(what, body, in_turn=_gpus()).verdict()
    refused = [verdict.refused] if verdict.refused and verdict.seen.step else [str(f) for f in verdict.findings]
    said = {"note": verdict.note or verdict.refused, "refused": refused}
    write_atomically(what.path(_VERDICT), json.dumps(said), 1)


def refusal(script: str, lines: list[str]) -> ConfigError:
    """Error for a script that must not be started. lines: of its findings."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return ConfigError(
        f"{lines[0]}{more}; everstep check {os.path.basename(script)} lists all, rehearse=false skips the rehearsal"
    )


def _fork(what: Rehearsed, enter: Callable[[LifeLink], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            redirect_output(what.path("rehearsal.log"))
            close_descriptors(kept_descriptors())
            perform(what, enter)
        finally:
            os._exit(0)
    return pid


def _conclude(pid: int, run_dir: Path, script: str, digest: str, tick: Callable[[], None]) -> str:
    fd = os.pidfd_open(pid)
    until_s = time.monotonic() + _PATIENCE_S
    try:
        while not readable([fd], _TICK_S) and time.monotonic() < until_s:
            tick()
    finally:
        os.close(fd)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    folder = run_dir / _FOLDER
    try:
        said = read_json(folder / _VERDICT, folders=1)
        note, lines = str(said["note"]), [str(line) for line in said["refused"]]
    except (OSError, ValueError, KeyError, TypeError):
        note, lines = "its process ended without a word", []
    shutil.rmtree(folder, ignore_errors=True)
    if lines:
        raise refusal(script, lines)
    write_atomically(run_dir / _REMEMBERED, json.dumps({"script": digest, "note": note}) + "\n")
    if not note:
        return ""
    return (
        f"{os.path.basename(script)} was not rehearsed ({note}): its loop may keep state that join does not carry; "
        "everstep check looks for it, rehearse=false skips the rehearsal"
    )


def _await_others(run_dir: Path, digest: str, tick: Callable[[], None]) -> str:
    """Wait until worker 0 has finished the rehearsal. If it refuses the script the job ends meanwhile."""
    until_s = time.monotonic() + _PATIENCE_S
    while not (is_rehearsed(run_dir, digest, tried=True) or _is_under_way(run_dir)) and time.monotonic() < until_s:
        tick()
        time.sleep(_GLANCE_S)
    return ""


def _is_under_way(run_dir: Path) -> bool:
    """Whether a worker of this run has reported its imports, and so had finished waiting for the verdict."""
    try:
        return read_json(run_dir / JOB_FILE).get("code") is not None
    except (OSError, ValueError, AttributeError):
        return False


def _once(act: Conclude) -> Conclude:
    said: list[str] = []

    def conclude() -> str:
        if not said:
            said.append(act())
        return said[0]

    return conclude


def _cleared(run_dir: Path) -> Path:
    folder = run_dir / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main_script() -> str | None:
    """Path of the user's script that this process runs; None in a notebook, a test, a module or a prompt."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None or not of_user(path):
        return None
    return None if str(Path(path).resolve()).startswith(f"{Path(sys.prefix).resolve()}/") else str(Path(path).resolve())


def _gpus() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def script_digest(script: str, argv: Iterable[str]) -> str:
    """Digest of a script, of the modules that it imports from its own folder, and of its arguments; 32 hex digits."""
    found = hashlib.blake2b(read_given(script, links=True), digest_size=16)
    found.update(json.dumps(list(argv)).encode())
    first, *others = files_of(script)
    for path in others:
        said = str(path.relative_to(first.parent)), hashlib.blake2b(_content(path)).hexdigest()
        found.update(json.dumps(said).encode())
    return found.hexdigest()


def _content(path: Path) -> bytes:
    try:
        return read_given(path, links=True)
    except (OSError, ValueError):
        return b""  # the script cannot import it either


def is_rehearsed(run_dir: Path, digest: str, *, tried: bool = False) -> bool:
    """Whether this script was rehearsed for this job. tried: a failed rehearsal counts, too."""
    try:
        said = read_json(run_dir / _REMEMBERED)
        return bool(said["script"] == digest) and (tried or not said["note"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
