"""Training in the abstract: states and gradients are hashes, so any wrong or missing part shows in all later values.

The sum of two gradients is not associative here, as in floating point: only the canonical tree gives the right one. In
a split model a lane's gradient at one stage depends on the states of all of them: an activation goes up through the
stages, and the gradient that comes back down depends on it.

All of it is pure, and members compute the same values, which the undisturbed run has computed before: so the functions
that take long remember what they have found.

The lowest bit of every value says whether the value descends from one in which a bit has flipped. So values that are
wrong for another reason are told apart from these.

A stage's state is a few blocks in a few planes; an update of one depends on all. A lost block is None, and nothing can
be computed from it. Where the optimizer's state is divided, that of the first parameters may come with an update in the
middle of the job: the state has a block more from then on, and later ones have other numbers. A block has one value per
unit of the stage, and each unit is computed by itself: so the cut of the model changes no value, and a state written in
one cut can be read in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from everstep.base.errors import InvariantViolation
from everstep.base.extents import Extents, Runs, Sizes
from everstep.base.plan import SEGMENTS, Plan
from everstep.placement.shards import SegmentBlocks, Takers, gifts, numbers_of_runs, runs_of_numbers, segment_holders
from everstep.placement.tree import fold
from everstep.protocol.moving.giver import JointAsk

BLOCKS = 3
GRADIENT = -1
INITIAL = 2
PLANES = (("model", 2), ("optimizer/exp_avg", 2))
_EARLY = (("model", 2), ("optimizer/exp_avg", 1))
_DIVIDED = 2

_MOST_KNOWN = 1 << 14

UnitValues = tuple[int, ...]
"""Values by number of the unit, of a stage's units."""
SimGradient = tuple[UnitValues, ...]
SimReduced = tuple[UnitValues | None, ...]
"""By number of the block; None where a worker does not take it."""
Blocks = tuple[UnitValues | None, ...]
"""A stage's state, by number of the block."""


@dataclass(frozen=True)
class SimJob:
    """The job that is trained: `steps` updates over `lanes` lanes, with gathers after every `gather_every` steps.

    stages: of the model. keep_every: steps between snapshots of each stage in memory, one of them by a worker of
    another pool; 0: none. write_every: steps between checkpoints on disk; 0: only those that a plan asks for.
    leaves_after: the step after which all loops are left; 0: the last one. units: the finest cut of the model; 0: as
    many as there are stages. copies: of each segment of the optimizer's state; 0: all members have all of it, and an
    update of a block depends on all others; else on that of the other plane alone, the same block of the gradient, and
    the last one, which all take. frees: sums of lanes may be given back as soon as they have been added up. nonfinite:
    (step, lane) of losses that are not finite; `GRADIENT` as lane: the gradient alone is not. on_nonfinite,
    nonfinite_limit: as in a config. late: (step, stage): the first step with a gradient
    for the first of a state's parameters, whose optimizer's state comes with that update, and the only stage of which
    that is so, -1: of all; step 0: it is there from the start.
    """

    steps: int
    lanes: int
    gather_every: int = 3
    stages: int = 1
    keep_every: int = 0
    write_every: int = 0
    state_bytes: int = -1
    units: int = 0
    leaves_after: int = 0
    copies: int = 0
    nonfinite: frozenset[tuple[int, int]] = frozenset()
    on_nonfinite: str = "warn"
    nonfinite_limit: int = 0
    frees: bool = False
    late: tuple[int, int] = (0, -1)

    def strange(self, step: int) -> bool:
        """Whether something of a step is not finite."""
        return any(at == step for at, _ in self.nonfinite)

    def leaves_out(self, step: int) -> bool:
        """Whether the update of a step is not made."""
        return self.on_nonfinite != "warn" and self.strange(step)

    def ends_with(self, step: int) -> bool:
        """Whether the job ends with a step for what is not finite."""
        many = range(step - self.nonfinite_limit + 1, step + 1)
        limit = bool(many) and all(map(self.strange, many))
        return self.strange(step) and (self.on_nonfinite == "stop" or limit)

    @property
    def last(self) -> int:
        """The step with which it ends."""
        return self.leaves_after or self.steps

    def units_of(self, stage: int) -> range:
        units = self.units or self.stages
        return range(units * stage // self.stages, units * (stage + 1) // self.stages)

    def cut(self, stages: int) -> SimJob:
        return replace(self, stages=stages, units=self.units or self.stages)

    def parts(self, states: Mapping[int, Blocks]) -> Iterator[tuple[int, int]]:
        """What is held apart of a step's states: (stage, block); only the first block of one that is not dealt out."""
        return ((k, block) for k, state in states.items() for block in range(len(state) if self.copies else 1))

    def grows(self, state: Blocks, step: int) -> bool:
        """Whether the update of a step, unless it is left out, makes a stage's state larger."""
        return is_early(state) and step >= self.late[0]

    def trained(self, state: Blocks) -> Blocks:
        """The part of a stage's state that lanes are computed from, and that all members have: they compare it."""
        return state[:_DIVIDED] if self.copies else state

    def updated(self, state: Blocks, step: int, gradient: SimReduced) -> Blocks:
        """The state of a stage after the step."""
        if not self.copies:
            return update(state, step, gradient)
        return _update_apart(state, step, gradient, self.grows(state, step))

    def gathers(self, step: int) -> int:
        """Number of gathers that the application asks for at the state of `step`, besides the one that ends the job."""
        return 1 + step % 2 if step % self.gather_every == self.gather_every - 1 else 0


def evaluates(job: SimJob, step: int) -> bool:
    """Whether the application evaluates at the state of `step`, before its first gather."""
    return job.stages > 1 and job.gathers(step) > 0 and step % 2 == 0


def initial(job: SimJob, stage: int) -> Blocks:
    """State of a stage before any training."""
    units, late = job.units_of(stage), job.copies and job.late[0] and job.late[1] in (-1, stage)
    there = (block for block in range(_N_BLOCKS) if block != _DIVIDED or not late)
    return tuple(tuple(INITIAL + 2 * unit + 100 * block for unit in units) for block in there)


def is_early(state: Blocks) -> bool:
    """Whether the first parameters have no optimizer's state yet."""
    return len(state) < _N_BLOCKS


def planes_of(state: Blocks) -> Sizes:
    """Sizes of a state."""
    return _EARLY if is_early(state) else PLANES


def dealt(early: bool) -> dict[int, int]:
    """Blocks of parameters that are dealt out, with the numbers of their optimizer's blocks; segment by segment."""
    return {1: _DIVIDED} if early else {block: _DIVIDED + block for block in range(_DIVIDED)}


_SEGMENTS = {early: SegmentBlocks(len(dealt(early))) for early in (False, True)}


def flipped(state: Blocks) -> Blocks:
    """The state after its bit has flipped."""
    return tuple(block if block is None else tuple(value | 1 for value in block) for block in state)


@lru_cache(maxsize=_MOST_KNOWN)
def wrong(state: int | Blocks) -> bool:
    """Whether a state, or a digest of one, descends from a flipped bit."""
    if isinstance(state, int):
        return bool(state & 1)
    return any(value & 1 for block in state for value in block or ())


@lru_cache(maxsize=_MOST_KNOWN)
def present(state: Blocks) -> Extents:
    """Blocks that are not lost."""
    return Extents.numbered(planes_of(state), (k for k, block in enumerate(state) if block is not None))


def without(state: Blocks, lost: Extents) -> Blocks:
    """The state without these blocks."""
    gone = {k for lo, hi in lost.spans(planes_of(state)) for k in range(lo, hi)}
    return tuple(None if k in gone else block for k, block in enumerate(state))


@lru_cache(maxsize=_MOST_KNOWN)
def merged(first: Blocks, second: Blocks) -> Blocks:
    """Blocks that either state has. One of which nothing is here may have other sizes."""
    if len(first) != len(second):
        known = [state for state in (first, second) if any(block is not None for block in state)]
        if len(known) > 1:
            raise InvariantViolation(f"blocks of states of different sizes: {first} and {second}")
        return known[0] if known else first
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))


_N_BLOCKS = sum(n for _, n in PLANES)
NOTHING: Blocks = (None,) * _N_BLOCKS


def by_unit(states: Mapping[int, Blocks]) -> tuple[Blocks, ...]:
    """States of all stages, split into the states of their units, in order."""
    return tuple(one for _, state in sorted(states.items()) for one in _units(state))


def cut_anew(states: Mapping[int, Blocks], job: SimJob) -> dict[int, Blocks]:
    """States of all stages, as the stages of another cut of the model. Units of one stage have as many blocks."""
    units = by_unit(states)
    cut = {stage: [units[unit] for unit in job.units_of(stage)] for stage in range(job.stages)}
    return {
        stage: tuple(tuple(one[block][0] for one in own) for block in range(len(own[0])))  # type: ignore[index]
        for stage, own in cut.items()
    }


@lru_cache(maxsize=_MOST_KNOWN)
def digest(state: Blocks) -> int:
    """Digest of all blocks; its lowest bit says whether the state is wrong, too."""
    return hash(state) & -2 | _bit(state)


def _bit(state: Blocks) -> int:
    if None in state:
        raise InvariantViolation(f"nothing is computed from a state that lacks blocks: {state}")
    return int(wrong(state))


def _units(state: Blocks) -> list[Blocks]:
    """State of each unit of a stage that is whole."""
    if None in state:
        raise InvariantViolation(f"nothing is computed from a state that lacks blocks: {state}")
    return [tuple((value,) for value in unit) for unit in zip(*state, strict=True)]  # type: ignore[arg-type]


def forward(state: Blocks, step: int, lane: int, entering: int) -> int:
    """Activation that a stage hands to the next one."""
    return _entering(state, step, lane, entering)[-1]


@lru_cache(maxsize=_MOST_KNOWN)
def _entering(state: Blocks, step: int, lane: int, entering: int) -> tuple[int, ...]:
    """Input of each unit of a stage, and the output of the last one."""
    found = [entering]
    for unit in _units(state):
        found.append(hash((unit, step, lane, found[-1], 5)) & -2 | (_bit(unit) | found[-1]) & 1)
    return tuple(found)


@lru_cache(maxsize=_MOST_KNOWN)
def through(state: Blocks, step: int, lane: int, entering: int, coming_back: int) -> tuple[int, SimGradient]:
    """The backward pass of a stage: the gradient for the stage before, and the gradient of the lane."""
    leaves: list[SimGradient] = []
    for unit, start in reversed(list(zip(_units(state), _entering(state, step, lane, entering)[:-1], strict=True))):
        bit = (_bit(unit) | start | coming_back) & 1
        made = hash((unit, step, lane, start, coming_back))
        leaves.append(tuple((hash((made, block)) & -2 | bit,) for block in range(BLOCKS)))
        coming_back = hash((made, 7)) & -2 | bit
    return coming_back, tuple(tuple(one[block][0] for one in reversed(leaves)) for block in range(BLOCKS))


@lru_cache(maxsize=_MOST_KNOWN)
def add(left: UnitValues, right: UnitValues) -> UnitValues:
    """Sum of one block of two subtrees."""
    return tuple(hash((a, b, 17)) & -2 | (a | b) & 1 for a, b in zip(left, right, strict=True))


@lru_cache(maxsize=_MOST_KNOWN)
def update(state: Blocks, step: int, gradient: SimReduced) -> Blocks:
    """The state of a stage after the step."""
    if None in gradient:
        raise InvariantViolation(f"nothing is updated with a gradient that lacks blocks: {gradient}")
    values = zip(*gradient, strict=True)  # type: ignore[arg-type]
    units = [_updated(unit, step, one) for unit, one in zip(_units(state), values, strict=True)]
    return tuple(zip(*units, strict=True))


@lru_cache(maxsize=_MOST_KNOWN)
def _update_apart(state: Blocks, step: int, gradient: SimReduced, grows: bool) -> Blocks:
    """The same where a block of a plane depends on that of the other plane alone; of what is not there, nothing. grows:
    optimizer's state of the first parameters is made."""
    early = is_early(state)
    after: list[UnitValues | None] = [*state[:_DIVIDED], *(None,) * grows, *state[_DIVIDED:]]
    kept = dealt(early)
    for block, other in dealt(early and not grows).items():
        own, beside = state[block], state[kept.get(block, block)]
        parts = own, beside, gradient[block], gradient[BLOCKS - 1]
        if None in parts:
            after[block] = after[other] = None
            continue
        units = list(zip(*parts, strict=True))  # type: ignore[arg-type]
        bits = [int(any(value & 1 for value in unit)) for unit in units]
        for at, plane in ((block, 0), (other, _DIVIDED)):
            after[at] = tuple(
                hash((unit, step, plane + block)) & -2 | bit for unit, bit in zip(units, bits, strict=True)
            )
    return tuple(after)


def segments_of(plan: Plan, stage: int) -> list[tuple[int, ...]]:
    """Holders of each pair of blocks that is dealt out, by the plan."""
    return list(segment_holders(plan, stage, _DIVIDED))


def holders_of(plan: Plan, stage: int, early: bool) -> dict[int, tuple[int, ...]]:
    """Holders of each block of parameters that is dealt out, and of its optimizer's block, by the plan."""
    return dict(zip(dealt(early), segments_of(plan, stage), strict=False))


def givers(plan: Plan, stage: int, early: bool, to: int) -> dict[int, int]:
    """The giver, after an update, of each block of parameters that this member lacks."""
    blocks = list(dealt(early))
    found = (gift for gift in gifts(plan, stage, _SEGMENTS[early]) if to in gift.takers)
    return {block: gift.source for gift in found for block in blocks[gift.first : gift.stop]}


def taken(plan: Plan, stage: int, worker_id: int, state: Blocks, grows: bool) -> Extents:
    """Blocks that a worker's update of a state makes. What gets its optimizer's state with it is updated by all."""
    early = is_early(state)
    others = {block for block, who in holders_of(plan, stage, early).items() if worker_id not in who}
    after = dealt(early and not grows)
    gone = others | {after[block] for block in others}
    sizes = _EARLY if early and not grows else PLANES
    return Extents.numbered(sizes, (n for n in range(sum(count for _, count in sizes)) if n not in gone))


def segments_in(gradient: SimReduced, early: bool) -> Runs | None:
    """Segments whose blocks of a gradient are here, of all that a plan deals out; None: all."""
    gone = {segment for segment, block in enumerate(dealt(early)) if gradient[block] is None}
    return runs_of_numbers(n for n in range(SEGMENTS) if n not in gone) if gone else None


def fed(gradient: SimReduced, joint: JointAsk | None, early: bool) -> SimReduced:
    """The blocks of a gradient that a donor feeds."""
    if joint is None or joint.segments is None:
        return gradient
    wanted, apart = numbers_of_runs(joint.segments), list(dealt(early))
    gives = [apart.index(n) in wanted if n in apart else joint.rest for n in range(BLOCKS)]
    return tuple(value if there else None for value, there in zip(gradient, gives, strict=True))


def joined(gradients: Sequence[SimReduced]) -> SimReduced:
    """The gradient that several donors have fed."""
    return tuple(next((v for v in values if v is not None), None) for values in zip(*gradients, strict=True))


def takers(plan: Plan, stage: int, step: int, early: bool) -> Takers:
    """Blocks of a step's gradient that each member of a stage's pool takes: all of the first one, which makes the
    optimizer's state."""
    pool = [seat.worker_id for seat in plan.pool(stage)]
    if not plan.divided_stages or step == 1:
        return dict.fromkeys(pool, ((0, BLOCKS),))
    held = holders_of(plan, stage, early)
    return {i: runs_of_numbers(n for n in range(BLOCKS) if n not in held or i in held[n]) for i in pool}


def _updated(unit: Blocks, step: int, gradient: UnitValues) -> UnitValues:
    bit = _bit(unit) | any(value & 1 for value in gradient)
    made = hash((unit, step, *gradient))
    return tuple(hash((made, block)) & -2 | bit for block in range(len(unit)))


def leaf(state: Blocks, step: int, lane: int) -> SimGradient:
    """Gradient of one lane, for a model of one stage."""
    return through(state, step, lane, 0, forward(state, step, lane, 0))[1]


def whole_lane(states: Mapping[int, Blocks], step: int, lane: int) -> dict[int, SimGradient]:
    """One lane through all stages: its gradient at each."""
    entering = [0]
    for _, state in sorted(states.items()):
        entering.append(forward(state, step, lane, entering[-1]))
    coming_back, leaves = entering[-1], {}
    for stage in sorted(states, reverse=True):
        coming_back, leaves[stage] = through(states[stage], step, lane, entering[stage], coming_back)
    return leaves


def undisturbed(job: SimJob) -> tuple[list[dict[int, Blocks]], list[dict[int, Blocks]]]:
    """The state of every stage after each step, as one worker computes it that nothing ever happens to; and what the
    update would make of it, which some steps leave out."""
    states = [{stage: initial(job, stage) for stage in range(job.stages)}]
    made = [states[0]]
    for step in range(1, job.steps + 1):
        trained = {k: job.trained(state) for k, state in states[-1].items()}
        leaves = {lane: whole_lane(trained, step, lane) for lane in range(job.lanes)}
        after = {}
        for stage, state in states[-1].items():
            blocks = [{lane: values[stage][block] for lane, values in leaves.items()} for block in range(BLOCKS)]
            gradient = tuple(fold(job.lanes, values, add) for values in blocks)
            after[stage] = job.updated(state, step, gradient)
        made.append(after)
        states.append(states[-1] if job.leaves_out(step) else after)
    return states, made
