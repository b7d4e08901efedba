"""What the kernel says of processes that compute, sleep and are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.protocol.patience import Patience
from everstep.runtime import process_figures
from everstep.runtime.process_figures import ask_about, figures_of, own_waits_s


def started(code: str) -> subprocess.Popen[bytes]:
    found = subprocess.Popen([sys.executable, "-c", f"print(1, flush=True)\n{code}"], stdout=subprocess.PIPE)
    assert found.stdout is not None and found.stdout.readline()
    return found


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        os.sched_yield()


def test_one_that_computes_sleeps_and_is_stopped() -> None:
    spins, sleeps = started("while True: pass"), started("import time; time.sleep(1000)")
    with spins, sleeps:
        before = figures_of(spins.pid)
        assert before is not None
        until(lambda: (now := figures_of(spins.pid)) is not None and now.ran_s > before.ran_s)
        until(lambda: (now := figures_of(spins.pid)) is not None and now.spent_s > before.spent_s)
        until(lambda: (now := figures_of(sleeps.pid)) is not None and now.state == "S")
        sleeps.send_signal(signal.SIGSTOP)
        until(lambda: (now := figures_of(sleeps.pid)) is not None and now.stopped)
        for process in (spins, sleeps):
            process.kill()
    assert figures_of(spins.pid) is None
    assert own_waits_s() >= 0.0


def test_what_children_spend_counts_as_their_parents_life() -> None:
    code = "import os, time\nif os.fork() == 0:\n    while True: pass\ntime.sleep(1000)"
    with started(f"import signal, ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n{code}") as parent:
        before = figures_of(parent.pid, whole=True)
        assert before is not None
        until(lambda: (now := figures_of(parent.pid, whole=True)) is not None and now.spent_s > before.spent_s + 0.05)
        for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        parent.kill()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("usage_usec 7\nthrottled_usec 2500000\n", 2.5), ("nr_periods 3\nthrottled_time 1500000000\n", 1.5), ("x", 0.0)],
)
def test_how_long_a_control_group_was_throttled(tmp_path: Path, text: str, expected: float) -> None:
    (tmp_path / "cpu.stat").write_text(text)
    assert process_figures._throttled_s(tmp_path / "cpu.stat") == expected
    assert process_figures._throttled_s(None) == process_figures._throttled_s(tmp_path / "none") == 0.0


def test_where_the_kernel_counts_no_waits_patience_alone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> tuple[float, float]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(process_figures, "_scheduled", refused)
    own = figures_of(os.getpid())
    assert own is not None and own.state == "?"
    patience = Patience(5.0, spoke=True)
    assert all(ask_about(patience, os.getpid(), n / 4) for n in range(22)) and patience.too_long()
    assert not ask_about(patience, 0, 5.3)
