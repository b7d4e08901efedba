"""How long a process may be silent before it counts as dead, measured by the time in which it could have answered.
Pure.

A busy machine is no dead process: a process that waits for a processor cannot answer. One that is deadlocked, or
stopped by a signal, waits for none. If the kernel does not say, patience alone decides: it grows with each killed
life.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

PING_S = 0.25
LATE_S = 2 * PING_S
"""If the asker asks later than this, it was stuck itself: the rest of the time does not count as silence."""
LIFELESS_S = 60.0
FIRST_S = 600.0
MOST_DOUBLINGS = 6
_HEALTHY_S = 60.0
_LIFE_WINDOW_S = 5.0
_LIFE_PART = 0.01


@dataclass(frozen=True)
class Figures:
    """The kernel's figures about a process at one moment.

    state: of its first thread, the letter of proc(5). ran_s: processor time of that thread; waited_s: how long it
    was ready and had no processor; throttled_s: how long its control group was kept from the processors. spent_s:
    processor time of all its threads and its children; read_bytes: from files.
    """

    state: str = "S"
    ran_s: float = 0.0
    waited_s: float = 0.0
    throttled_s: float = 0.0
    spent_s: float = 0.0
    read_bytes: int = 0

    @property
    def stopped(self) -> bool:
        """Whether a signal, or a debugger, has stopped it."""
        return self.state in "tT"


def waited_s(before: Figures, now: Figures, gap_s: float) -> float:
    """Time between two moments that a process waited for a processor. The kernel adds a wait when it ends, so a
    process that is ready and has not run since is still waiting."""
    ran, ready = now.ran_s > before.ran_s, now.state == "R"
    if ready and not ran:
        return gap_s
    waits = [now.waited_s - before.waited_s]
    if ran or ready:  # one that sleeps misses nothing while its group is throttled
        waits.append(now.throttled_s - before.throttled_s)
    return min(gap_s, max(0.0, *waits))


class Vitals:
    """When a process last showed life: it or its children computed, it read, or it waited for a processor or a disk."""

    def __init__(self) -> None:
        self._since: tuple[float, Figures] | None = None
        self._last: tuple[float, Figures] | None = None
        self._waited_s = 0.0

    @property
    def lifeless_s(self) -> float | None:
        """Time without a sign of life; None if unknown."""
        return None if self._last is None or self._since is None else self._last[0] - self._since[0]

    @property
    def stopped(self) -> bool:
        return self._last is not None and self._last[1].stopped

    def look(self, now_s: float, figures: Figures | None) -> float:
        """Take the present figures; now_s: monotonic. Returns how long the process waited for a processor since the
        last call."""
        if figures is None:
            self._since = self._last = None
            return 0.0
        (before_s, before), self._last = self._last or (now_s, figures), (now_s, figures)
        since_s, since = self._since = self._since or self._last
        waited = waited_s(before, figures, now_s - before_s)
        self._waited_s += waited
        busy_s = figures.spent_s - since.spent_s + self._waited_s
        moved = busy_s > _LIFE_PART * max(now_s - since_s, _LIFE_WINDOW_S) or figures.read_bytes > since.read_bytes
        if not figures.stopped and (moved or figures.state == "D"):
            self._since, self._waited_s = self._last, 0.0
        return waited


class Patience:
    """Whether a process that is asked again and again still answers, over all of its lives.

    least_s: limit of silence, without the time that it waited for a processor. A life has longer before its first
    word, as it may have much to read. spoke: it has said its first word already. silence_s: time without an answer,
    although the process could have answered. Times are monotonic seconds; any thread may call `answered`.
    """

    def __init__(self, least_s: float, *, spoke: bool = False) -> None:
        self.kills = 0
        self._least_s = least_s
        self._next_s = 0.0
        self._asked: tuple[float, float] | None = None
        self._first_s = inf
        self.spoke = spoke
        self._clear()

    def _clear(self) -> None:
        self.silence_s = self.stopped_s = 0.0
        self._vitals = Vitals()

    # ---- its lives

    def begins(self) -> None:
        self.spoke, self._first_s, self._asked = False, inf, None
        self._clear()

    def answered(self) -> None:
        self.spoke = True
        self._clear()

    def killed(self, now_s: float) -> None:
        """The process was killed for its silence. If it had answered for a while, the count starts again."""
        self.kills = 1 if now_s - self._first_s >= _HEALTHY_S else self.kills + 1

    # ---- its silence

    def due_in(self, now_s: float) -> float:
        """Seconds until the next question."""
        return max(0.0, self._next_s - now_s)

    def ask(self, now_s: float, figures: Figures | None = None, own_waits_s: float = 0.0) -> bool:
        """Whether it is time to ask; the time since the last question counts as silence from now on. figures: of the
        process, None if unknown; own_waits_s: how long the asker has waited for a processor in total. The asker's
        waits excuse half of a silence at most; otherwise nothing would be found on a machine that stays busy."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + PING_S
        waited = self._vitals.look(now_s, figures)
        if self._asked is not None:
            gap_s = min(now_s - self._asked[0], LATE_S)
            gap_s -= min(gap_s / 2, max(0.0, own_waits_s - self._asked[1]))
            self.silence_s += max(0.0, gap_s - waited)
            self.stopped_s = self.stopped_s + gap_s if self._vitals.stopped else 0.0
        self._asked = now_s, own_waits_s
        if self.spoke and self._first_s == inf:
            self._first_s = now_s
        return True

    @property
    def limit_s(self) -> float:
        """The silence from which it counts as dead; doubles with each kill."""
        longer = 2.0 ** min(self.kills, MOST_DOUBLINGS)
        return self._least_s * longer if self.spoke else max(FIRST_S, self._least_s * longer)

    def too_long(self) -> str:
        """Why the process counts as dead; "" while it does not."""
        if self.stopped_s >= self._least_s:
            return f"has not answered for {self.stopped_s:.1f} s, since a signal has stopped it"
        if self.silence_s >= self.limit_s:
            return f"has not answered for {self.silence_s:.1f} s"
        lifeless_s = self._vitals.lifeless_s or 0.0
        if not self.spoke and lifeless_s >= max(LIFELESS_S, self._least_s):
            return f"has not begun to answer, and has done nothing for {lifeless_s:.1f} s"
        return ""
