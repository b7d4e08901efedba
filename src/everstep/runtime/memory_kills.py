"""Whether the kernel has killed for want of memory: what SIGKILL alone does not say.

Source: Linux, admin-guide/cgroup-v2: `oom_kill` in memory.events (memory.oom_control in version 1) counts the processes
of the group that any kind of out-of-memory killer has killed; it rises before the signal is sent.
"""

from __future__ import annotations

from pathlib import Path

_LATELY_S = 5.0
_ROOT = Path("/sys/fs/cgroup")


class MemoryKills:
    """Watches the counter of this process's control group. Where there is none, no kill was for want of memory."""

    def __init__(self, events: Path | None = None) -> None:
        self._events = _counter() if events is None else events
        self._count = self._read()
        self._rose_s: float | None = None

    def look(self, now_s: float) -> None:
        """Take note of the counter, so that a later death is not ascribed to an older kill. `now_s` is monotonic."""
        count = self._read()
        if count > self._count:
            self._rose_s = now_s
        self._count = count

    def lately(self, now_s: float) -> bool:
        """Whether somebody was killed in the last seconds."""
        self.look(now_s)
        return self._rose_s is not None and now_s - self._rose_s <= _LATELY_S

    def _read(self) -> int:
        try:
            rows = dict(line.split() for line in self._events.read_text().splitlines() if line)
            return int(rows.get("oom_kill", 0))
        except (OSError, ValueError):
            return 0


def _counter() -> Path:
    """The file with the counter of this process's control group, whether it exists or not."""
    try:
        groups = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    paths = {controllers: path.lstrip("/") for _, controllers, path in groups}
    if "memory" in paths:
        return _ROOT / "memory" / paths["memory"] / "memory.oom_control"
    return _ROOT / paths.get("", "") / "memory.events"
