"""Training in the abstract: states and gradients are hashes, so any wrong or missing part shows in all that follows.

The sum of two gradients is not associative here, as in floating point: only the canonical tree gives the right one.
In a split model a lane's gradient at one stage depends on the states of all of them: an activation goes up through the
stages, and what comes back down depends on it.

The lowest bit of every value says whether it descends from one in which a bit has flipped, which is that one. So what
is wrong for another reason is never taken for it.

A stage's state is a few blocks in a few planes; what an update makes of one depends on all. One that is lost is None,
and nothing can be computed from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.base.errors import check
from everstep.base.extents import Extents
from everstep.placement.tree import fold

BLOCKS = 3
INITIAL = 2
OTHER_DIGEST = "other"
"""Of an initial state that was built differently; everybody else's has that of `INITIAL`."""
PLANES = (("model", 2), ("exp_avg", 2))

SimGradient = tuple[int, ...]
Blocks = tuple[int | None, ...]
"""A stage's state, by number of the block."""


@dataclass(frozen=True)
class SimJob:
    """What is trained: `steps` updates over `lanes` lanes, with gathers after every `gather_every` steps.

    stages: of the model. keep_every: every so many steps a snapshot of each stage is kept in memory, one of them by a
    worker of another pool; 0: never. write_every: the same for checkpoints on disk; 0: only
    those that a plan asks for.
    """

    steps: int
    lanes: int
    gather_every: int = 3
    stages: int = 1
    keep_every: int = 0
    write_every: int = 0
    state_bytes: int = -1

    def gathers(self, step: int) -> int:
        """How many gathers the application asks for at the state of `step`, besides the one that ends the job."""
        return 1 + step % 2 if step % self.gather_every == self.gather_every - 1 else 0


def evaluates(job: SimJob, step: int) -> bool:
    """Whether the application evaluates at the state of `step`, before its first gather."""
    return job.stages > 1 and job.gathers(step) > 0 and step % 2 == 0


def initial(stage: int) -> Blocks:
    """The state of a stage that nobody has trained yet."""
    return tuple(INITIAL + 2 * stage + 100 * block for block in range(sum(n for _, n in PLANES)))


def flipped(state: Blocks) -> Blocks:
    """The state after its bit has flipped."""
    return tuple(block if block is None else block | 1 for block in state)


def wrong(value: int | Blocks) -> bool:
    """Whether it descends from a flipped bit."""
    return any((block or 0) & 1 for block in ((value,) if isinstance(value, int) else value))


def present(state: Blocks) -> Extents:
    """The blocks that are there."""
    return Extents.numbered(PLANES, (k for k, block in enumerate(state) if block is not None))


def without(state: Blocks, lost: Extents) -> Blocks:
    """The same, but for these blocks."""
    gone = {k for lo, hi in lost.spans(PLANES) for k in range(lo, hi)}
    return tuple(None if k in gone else block for k, block in enumerate(state))


def merged(first: Blocks, second: Blocks) -> Blocks:
    """What either has."""
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


NOTHING: Blocks = (None,) * sum(n for _, n in PLANES)


def digest(state: Blocks) -> int:
    """Of all blocks; says like them whether it is wrong."""
    return hash(state) & -2 | _bit(state)


def _bit(state: Blocks) -> int:
    check(None not in state, f"nothing is computed from a state that lacks blocks: {state}")
    return int(wrong(state))


def forward(state: Blocks, step: int, lane: int, entering: int) -> int:
    """What a stage hands to the next one."""
    return hash((state, step, lane, entering, 5)) & -2 | (_bit(state) | entering) & 1


def backward(state: Blocks, step: int, lane: int, entering: int, coming_back: int) -> int:
    """What a stage hands to the one before."""
    return hash((state, step, lane, entering, coming_back, 7)) & -2 | (_bit(state) | entering | coming_back) & 1


def leaf(state: Blocks, step: int, lane: int, entering: int = 0, coming_back: int = 0) -> SimGradient:
    """The gradient of one lane at one stage, one value per block."""
    bit = (_bit(state) | entering | coming_back) & 1
    return tuple(hash((state, step, lane, block, entering, coming_back)) & -2 | bit for block in range(BLOCKS))


def add(left: int, right: int) -> int:
    """One block of two subtrees."""
    return hash((left, right, 17)) & -2 | (left | right) & 1


def update(state: Blocks, step: int, gradient: SimGradient) -> Blocks:
    """The state of a stage after the step."""
    first, second, third = gradient
    bit = (_bit(state) | first | second | third) & 1
    made = hash((state, step, *gradient))
    return tuple(hash((made, block)) & -2 | bit for block in range(len(state)))


def whole_lane(states: Mapping[int, Blocks], step: int, lane: int) -> dict[int, SimGradient]:
    """One lane through all stages: its gradient at each."""
    stages = len(states)
    if stages == 1:
        return {0: leaf(states[0], step, lane)}
    entering = [0]
    for stage in range(stages):
        entering.append(forward(states[stage], step, lane, entering[stage]))
    coming_back, leaves = entering[stages], {}
    for stage in reversed(range(stages)):
        leaves[stage] = leaf(states[stage], step, lane, entering[stage], coming_back)
        coming_back = backward(states[stage], step, lane, entering[stage], coming_back)
    return leaves


def undisturbed(job: SimJob) -> list[dict[int, Blocks]]:
    """The state of every stage after each step, as one worker computes it that nothing ever happens to."""
    states = [{stage: initial(stage) for stage in range(job.stages)}]
    for step in range(1, job.steps + 1):
        leaves = {lane: whole_lane(states[-1], step, lane) for lane in range(job.lanes)}
        after = {}
        for stage, state in states[-1].items():
            blocks = [{lane: values[stage][block] for lane, values in leaves.items()} for block in range(BLOCKS)]
            gradient = tuple(fold(job.lanes, values, add) for values in blocks)
            after[stage] = update(state, step, gradient)
        states.append(after)
    return states
