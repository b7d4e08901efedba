"""What an agent knows of a death: wait statuses, last words, kills for want of memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.base.cause import Cause, Why
from everstep.base.config import load_config, to_dict
from everstep.runtime import process
from everstep.runtime.host import fork_server
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.process import MemoryKills, why_ended


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (signal.SIGKILL, Cause.KILLED),
        (signal.SIGTERM, Cause.KILLED),
        (signal.SIGSEGV, Cause.CRASHED),
        (signal.SIGABRT, Cause.CRASHED),
        (signal.SIGABRT | 0x80, Cause.CRASHED),  # with a core dump
        (3 << 8, Cause.EXITED),
        (0, Cause.EXITED),
    ],
)
def test_wait_statuses(status: int, cause: Cause) -> None:
    assert why_ended(os.waitstatus_to_exitcode(int(status))).cause is cause


def test_a_real_kill() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    os.kill(pid, signal.SIGKILL)
    assert why_ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).cause is Cause.KILLED


def test_kills_for_want_of_memory_are_counted_by_the_kernel(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\n")
    kills = MemoryKills(counter)
    assert not kills.lately(0.0), "those before this process are none of its own"
    counter.write_text("low 0\noom_kill 3\n")
    assert kills.lately(1.0)
    assert kills.lately(5.0), "several may die of one"
    assert not kills.lately(7.0), "who dies later does not die of it"
    counter.write_text("oom_kill 4\n")
    kills.look(10.0)
    assert not kills.lately(20.0)


def test_without_a_counter_no_kill_is_for_want_of_memory(tmp_path: Path) -> None:
    for text in (None, "", "oom_kill many\n", "\n\n"):
        counter = tmp_path / "memory.events"
        if text is not None:
            counter.write_text(text)
        assert not MemoryKills(counter).lately(0.0)
    MemoryKills().look(0.0)  # that of this machine, whatever it has


@pytest.mark.parametrize(
    ("first", "files"),
    [
        (False, ("memory.max", "memory.current", "inactive_file")),
        (True, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_memory_that_can_still_be_had_is_what_the_tightest_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool, files: tuple[str, str, str]
) -> None:
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    monkeypatch.setattr(process, "_ROOT", tmp_path)
    monkeypatch.setattr(process, "_memory_group", lambda: (inner, first))
    whole = process.available_bytes()
    assert whole > 1 << 20, "no group has a limit: that of the machine"
    for folder, limit in ((inner, "max"), (inner.parent, "1000000")):
        (folder / files[0]).write_text(limit)
        (folder / files[1]).write_text("400000\n")
        (folder / "memory.stat").write_text(f"anon 5\n{files[2]} 70000\n")
    assert process.available_bytes() == 670_000
    (inner.parent / files[1]).write_text("2000000\n")
    assert process.available_bytes() == 0


def test_last_words_keep_their_cause(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    config = to_dict(load_config([("x", {"steps": 1})]))
    context = WorkerContext(str(tmp_path), 3, 0, "h", "", "", -1, config, "task")
    assert context.read_last_words() is None
    context.write_last_words(Why(Cause.OOM, "CUDA out of memory\nin linear"))
    assert context.read_last_words() == Why(Cause.OOM, "CUDA out of memory in linear")
    context.write_last_words(Why(Cause.EXCEPTION, "no file caf\udce9.jpg" + 5000 * "x"))
    said = context.read_last_words()
    assert said is not None and said.reason.startswith("no file caf?.jpgxx")
    assert said.reason.endswith("... (5016 characters)")
    assert len(said.reason.encode()) < 2100, "a message and an event bear it"
    for spoilt in ("not JSON", "[]", '{"reason": "x"}', '"x"'):
        context.last_words_path.write_text(spoilt)
        assert context.read_last_words() is None


WAYS: dict[str, tuple[Any, int, Cause | None]] = {
    "nothing": (None, 0, None),
    "a number": (3, 3, None),
    "something else": ("done", 0, None),
    "exit": (SystemExit(), 0, None),
    "exit with a number": (SystemExit(5), 5, None),
    "exit with words": (SystemExit("no data"), 1, None),
    "an error": (ValueError("no data"), 1, Cause.EXCEPTION),
    "no memory": (MemoryError(), 1, Cause.OOM),
}
"""What an entry point returns or raises, the exit code of its process, and the cause in its last words."""


def entry(context: WorkerContext) -> Any:
    way = WAYS[context.task][0]
    if isinstance(way, BaseException):
        raise way
    return way


@pytest.mark.parametrize("way", WAYS)
def test_how_an_entry_point_ends_is_the_exit_code_and_errors_are_last_words(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[None] = []
    monkeypatch.setattr(fork_server, "_leave_in_order", lambda: left.append(None))
    (tmp_path / "logs").mkdir()
    _, code, cause = WAYS[way]
    context = WorkerContext(str(tmp_path), 3, 0, "h", "", "", -1, {}, way)
    assert fork_server.run_entry(f"{__name__}:entry", context) == code and left == [None]
    said = context.read_last_words()
    assert (None if said is None else said.cause) == cause
    if cause is not None:
        context.write_last_words(Why(Cause.CONFIG, "it has said it better itself"))
        fork_server.run_entry(f"{__name__}:entry", context)
        assert context.read_last_words() == Why(Cause.CONFIG, "it has said it better itself")
