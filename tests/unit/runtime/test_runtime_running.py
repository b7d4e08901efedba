"""Workers that outlive their fork server: how they ended, and that they die with whoever owns them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from everstep.base.readable import readable
from everstep.runtime.host.board import Board
from everstep.runtime.host.worker_processes import Running
from everstep.runtime.process import unreaped_status

PATIENCE_S = 60.0
DIES = "import sys; from everstep.runtime.process import die_with_writer; die_with_writer(int(sys.argv[1])); "


def forked(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return pid


def ended(running: Running, board: Board) -> tuple[int, int]:
    """The rank and the wait status of the death that ended it."""
    while True:
        cell = running.look(lambda rank: board.row(0, rank))
        if cell is not None:
            assert cell.status is not None
            return cell.cell_rank, cell.status
        readable(running.fds, PATIENCE_S)


def held(*pids: int) -> Running:
    running = Running(os.pipe()[1])
    running.started(pids)
    assert running.fds == [], "its fork server lives"
    running.adopt(0, 0, pids)
    return running


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (lambda: os._exit(3), 3 << 8),
        (lambda: os._exit(0), 0),
        (lambda: os.kill(os.getpid(), signal.SIGUSR2), signal.SIGUSR2),
    ],
)
def test_a_child_is_waited_for(act: Callable[[], None], status: int) -> None:
    board, running = Board.create(1), held(forked(act))
    assert ended(running, board) == (0, status) and not running.unseen
    running.close()


@pytest.mark.parametrize(("said", "status"), [(None, signal.SIGKILL), (0, 0), (75, 75 << 8)])
def test_who_is_another_processes_child_has_said_how_it_ends(said: int | None, status: int) -> None:
    board = Board.create(1)
    read_end, write_end = os.pipe()
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=write_end)
    pid = int(os.read(read_end, 32))
    running = held(pid)
    if said is not None:
        board.row(0).leave(said)
    assert running.kill()
    assert ended(running, board) == (0, status) and running.unseen == (said is None)
    running.close()
    shell.kill()
    shell.wait()


def test_with_one_rank_the_whole_cell_ends() -> None:
    pids = [forked(signal.pause) for _ in range(3)]
    board, running = Board.create(1), held(*pids)
    os.kill(pids[1], signal.SIGUSR2)
    assert ended(running, board) == (1, signal.SIGUSR2)
    running.close()


def test_the_kernel_kills_who_has_lost_the_last_writer_even_if_it_is_stopped() -> None:
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", DIES + "print(1, flush=True); import time; time.sleep(1000)", str(read_end)]
    workers = [subprocess.Popen(command, pass_fds=(read_end,), stdout=subprocess.PIPE) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline()
    workers[1].send_signal(signal.SIGSTOP)
    os.close(write_end)
    assert [worker.wait(PATIENCE_S) for worker in workers] == [-signal.SIGKILL] * 2
    late = subprocess.run(command, pass_fds=(read_end,), check=False, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
    assert late.returncode == 1
    os.close(read_end)
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.close()


def test_how_anothers_child_has_ended_can_be_seen_until_it_is_waited_for() -> None:
    read_end, write_end = os.pipe()
    script = (
        "import os, signal, sys, time; pid = os.fork(); pid or signal.pause(); print(pid, flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=write_end) as parent:
        pid = int(os.read(read_end, 32))
        assert unreaped_status(pid) is None
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        assert readable([pidfd], PATIENCE_S)
        assert unreaped_status(pid) == signal.SIGTERM
        parent.kill()
    for fd in (read_end, write_end, pidfd):
        os.close(fd)
    assert unreaped_status(1) is None and unreaped_status(1 << 30) is None
