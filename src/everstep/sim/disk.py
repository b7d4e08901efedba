"""What a simulated job could go back to: checkpoints on disk. What is written and invalidated is the driver's to
say."""

from __future__ import annotations

from collections.abc import Callable

from everstep.sim.model import Blocks


class Disk:
    """Checkpoints, by step and stage. `hosts`: who sees the directory; everybody if None."""

    def __init__(self, stages: int, hosts: frozenset[str] | None) -> None:
        self.stages = stages
        self.hosts = hosts
        self.parts: dict[int, dict[int, Blocks]] = {}
        self.damaged: set[int] = set()
        self._asking: dict[int, Callable[[], None]] = {}

    def ask(self, step: int, complete: Callable[[], None]) -> None:
        """Call `complete` when the parts of all stages are there."""
        self._asking = {step: complete}

    def write(self, stage: int, step: int, state: Blocks) -> None:
        """One stage's part is on disk; the last one completes the checkpoint."""
        self.parts.setdefault(step, {})[stage] = state
        self.damaged.discard(step)
        if len(self.parts[step]) == self.stages and step in self._asking:
            self._asking.pop(step)()

    def newest(self, host: str, limit: int | None) -> tuple[int, ...]:
        """Steps of the newest two checkpoints that a host can read, up to the limit."""
        if self.hosts is not None and host not in self.hosts:
            return ()
        whole = (step for step, parts in self.parts.items() if len(parts) == self.stages)
        return tuple(sorted(step for step in whole if limit is None or step <= limit)[-2:])

    def damage(self) -> None:
        """The newest complete checkpoint cannot be read any more."""
        self.damaged.update(sorted(step for step, parts in self.parts.items() if len(parts) == self.stages)[-1:])

    def read(self, stage: int, step: int) -> Blocks | None:
        """A stage's state, or None if the checkpoint turns out to be damaged: then it is set aside."""
        if step in self.damaged or step not in self.parts:
            self.parts.pop(step, None)
            return None
        return self.parts[step][stage]

    def invalidate(self, sound: int) -> None:
        """Later checkpoints are set aside."""
        self.parts = {step: parts for step, parts in self.parts.items() if step <= sound}
