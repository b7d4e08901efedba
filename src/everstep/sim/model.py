"""Training in the abstract: states and gradients are hashes, so any wrong or missing part shows in all that follows.

The sum of two gradients is not associative here, as in floating point: only the canonical tree gives the right one.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.placement.tree import fold

BLOCKS = 3
INITIAL = 1

Gradient = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """What is trained: `steps` updates over `lanes` lanes, with gathers after every `gather_every` steps."""

    steps: int
    lanes: int
    gather_every: int = 3

    def gathers(self, step: int) -> int:
        """How many gathers the application asks for at the state of `step`; the last step is followed by one."""
        if step == self.steps:
            return 1
        return 1 + step % 2 if step % self.gather_every == self.gather_every - 1 else 0


def leaf(state: int, step: int, lane: int) -> Gradient:
    """The gradient of one lane, one value per block."""
    return tuple(hash((state, step, lane, block)) for block in range(BLOCKS))


def add(left: int, right: int) -> int:
    """One block of two subtrees."""
    return hash((left, right, 17))


def update(state: int, step: int, gradient: Gradient) -> int:
    """The state after the step."""
    return hash((state, step, *gradient))


def undisturbed(job: Job) -> list[int]:
    """The state after each step, as one worker computes it that nothing ever happens to."""
    states = [INITIAL]
    for step in range(1, job.steps + 1):
        leaves = {lane: leaf(states[-1], step, lane) for lane in range(job.lanes)}
        gradient = tuple(
            fold(job.lanes, {lane: values[block] for lane, values in leaves.items()}, add) for block in range(BLOCKS)
        )
        states.append(update(states[-1], step, gradient))
    return states
