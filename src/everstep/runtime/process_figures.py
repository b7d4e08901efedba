"""Linux's figures of a process's time: whether it computes, waits for a processor, or does nothing.

Source: proc(5) and Linux, scheduler/sched-stats (schedstat: time on a processor, time in its queue, in ns);
admin-guide/cgroup-v2 (throttled_usec in cpu.stat; throttled_time, in ns, in version 1).
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path

from everstep.protocol.patience import Figures, Patience

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CGROUPS = Path("/sys/fs/cgroup")
_MOST_CHILDREN = 64


def figures_of(pid: int, *, whole: bool = False) -> Figures | None:
    """Figures of this process now; None if it is gone or nothing is known. whole: with bytes read, and children's
    time."""
    try:
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        spent = sum(map(int, fields[11:15])) / _TICKS_PER_S
        state = fields[0]
    except (OSError, ValueError, IndexError):
        return None
    ran, waited = 0.0, 0.0
    try:
        ran, waited = _scheduled(f"/proc/{pid}/schedstat")
    except (OSError, ValueError):
        state = "?" if state == "R" else state  # whether it runs or waits is not known
    return Figures(
        state=state,
        ran_s=ran,
        waited_s=waited,
        throttled_s=_throttled_s(_cpu_stat(pid)),
        spent_s=spent + (_of_children(pid) if whole else 0.0),
        read_bytes=_read_bytes(pid) if whole else 0,
    )


def ask_about(patience: Patience, pid: int, now_s: float) -> bool:
    """`Patience.ask` about a process of this host."""
    if patience.due_in(now_s) > 0:
        return False
    return patience.ask(now_s, figures_of(pid, whole=not patience.spoke) if pid else None, own_waits_s())


def own_waits_s() -> float:
    """Total time, in seconds, for which the threads of this process have waited for a processor."""
    found = 0.0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, ValueError):
            found += _scheduled(f"/proc/self/task/{thread}/schedstat")[1]
    return found


def _text(path: str | Path) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _scheduled(path: str) -> tuple[float, float]:
    ran, waited = _text(path).split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def _of_children(pid: int) -> float:
    """Processor time of the processes below this one; a parent's includes that of dead ones that it waited for."""
    found, left = 0.0, [pid]
    for _ in range(_MOST_CHILDREN):
        if not left:
            break
        parent = left.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            if parent != pid:
                fields = _text(f"/proc/{parent}/stat").rpartition(")")[2].split()
                found += sum(map(int, fields[11:15])) / _TICKS_PER_S
            for thread in os.listdir(f"/proc/{parent}/task"):
                left += map(int, _text(f"/proc/{parent}/task/{thread}/children").split())
    return found


def _read_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):  # for example a process of another user
        return int(dict(row.split(": ") for row in _text(f"/proc/{pid}/io").splitlines())["read_bytes"])
    return 0


@lru_cache(maxsize=256)
def _cpu_stat(pid: int) -> Path | None:
    """File of this process's control group with its throttled time, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        rows = [row.split(":", 2) for row in _text(f"/proc/{pid}/cgroup").splitlines()]
        for _, controllers, path in rows:
            folder = "cpu" if "cpu" in controllers.split(",") else "" if not controllers else None
            for inside in (path.lstrip("/"), "") if folder is not None else ():
                file = _CGROUPS / (folder or "") / inside / "cpu.stat"
                if file.exists():
                    return file
    return None


def _throttled_s(file: Path | None) -> float:
    with contextlib.suppress(OSError, ValueError):
        rows = dict(row.split() for row in _text(file).splitlines()) if file is not None else {}
        return int(rows.get("throttled_usec", 0)) / 1e6 + int(rows.get("throttled_time", 0)) / 1e9
    return 0.0
