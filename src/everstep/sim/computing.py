"""The lanes of one simulated worker: it computes one pass after the other, and exchanges activations between stages.

In a split job a lane really flows: a stage computes its forward pass when the activation of the stage before has come,
and its backward pass when the gradient of the stage after has. So if two workers disagree about the lanes to run, one
waits for ever, and the simulation does not end. One simplification: passes run in the order in which they become
possible, not in that of a schedule.

As in production, complete subtrees of the lane tree are added up as they come: a plan that gives one of their lanes to
another worker tears them apart.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain

import msgspec

from everstep.base.extents import NONE, WHOLE, Extents
from everstep.base.plan import Plan
from everstep.base.ports import Node
from everstep.placement.probes import alone, owed, with_trials
from everstep.placement.shards import Division, finishers
from everstep.placement.tree import Merge, children, cover, fold_order, root
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.operations import Compute
from everstep.protocol.driver.probing import LanesGiven
from everstep.protocol.driver.records import AgreePayload, LaneReport, StageSection
from everstep.protocol.step_types import Discard, Holds, LaneDone, LaneSaid, Takes
from everstep.sim.checks import Vote
from everstep.sim.life import Life
from everstep.sim.mesh import Mesh
from everstep.sim.model import (
    BLOCKS,
    GRADIENT,
    Blocks,
    SimGradient,
    SimReduced,
    UnitValues,
    add,
    digest,
    forward,
    givers,
    is_early,
    leaf,
    planes_of,
    present,
    taken,
    takers,
    through,
    without,
)
from everstep.sim.world import MS

Pass = tuple[str, int, int, int]  # 'forward' or 'backward', step, stage, lane
Sums = dict[Node, SimGradient]


@lru_cache
def _merges(n_lanes: int) -> Mapping[Node, Merge]:
    """For each node but the root, the merge that it is part of."""
    merges = fold_order(n_lanes, [Node(lane, lane + 1) for lane in range(n_lanes)])
    return {node: merge for merge in merges for node in (merge.left, merge.right)}


def _total(node: Node, sums: Sums) -> SimGradient:
    """The sum of a complete subtree, all blocks. Raises: KeyError if a lane of it is not held."""
    if node in sums or node.hi - node.lo == 1:
        return sums[node]
    left, right = children(node)
    return tuple(map(add, _total(left, sums), _total(right, sums)))


def _lanes(node: Node) -> range:
    return range(node.lo, node.hi)


class SimLanes:
    """Computes the lanes asked for; results are kept until `discard`."""

    def __init__(self, life: Life, mesh: Mesh) -> None:
        self.life = life
        self.mesh = mesh
        self.held: dict[int, dict[int, Sums]] = {}  # by step and stage
        self.busy = False
        self.given = LanesGiven()
        self._repeated: dict[int, int] = {}  # in the present operation: trials, and the lanes that they repeat
        self._is_told: set[int] = set()
        self._operation: Compute | None = None
        self._leaving: tuple[tuple[int, ...], str] | None = None
        self._todo: deque[Pass] = deque()
        self._wanted: set[tuple[int, int]] = set()  # (stage, lane), of the present operation
        self._under: dict[int, set[int]] = {}  # all own lanes by stage, when they were computed last
        self._came: dict[Pass, int] = {}  # inputs of passes
        self._when_left: Callable[[], None] | None = None
        life.install({Compute: self._compute, Discard: self._discard, ("message", "lane"): self._arrived})
        life.install({("abort", Compute): self._leave, ("owes", Compute): self._owes})

    def when_left(self, call: Callable[[], None]) -> None:
        """Set the callback for an operation that was aborted, after the driver knows."""
        self._when_left = call

    def open(self, plan: Plan, step: int) -> tuple[tuple[int, int], ...]:
        """Begin a generation: messages on their way between stages are lost. Returns (stage, lane) of sums torn apart:
        a lane of them is another worker's now, or (as with accumulators of another shape) this worker's lanes
        differ; and of those that were given back in an older generation."""
        self._came.clear()
        lost = []
        me, rng = self.life.me.worker_id, self.life.world.rng
        for stage, sums in self.held.get(step, {}).items():
            mine = set(plan.lanes_of(me, stage)) if stage in plan.stages_of(me) else set()
            differs = mine != self._under.get(stage)
            for node in list(sums):
                torn = node.hi - node.lo > 1 and not mine.issuperset(_lanes(node))
                torn = torn or (differs and rng.random() < 0.2)
                if torn or (self.life.job.frees and rng.random() < 0.5):
                    del sums[node]
                    lost += [(stage, lane) for lane in _lanes(node)]
        return tuple(sorted(lost))

    def _discard(self, effect: Discard) -> None:
        """Drop the results of this step and older."""
        self.held = {s: v for s, v in self.held.items() if s > effect.step}
        self.given.drop(effect.step)

    def sums(self, plan: Plan, step: int, stage: int) -> Sums:
        """Sums that this worker has to hand over at a stage."""
        held = self.held.get(step, {}).get(stage, {})
        return {node: _total(node, held) for node in cover(plan.lanes_of(self.life.me.worker_id, stage), plan.lanes)}

    def _compute(self, operation: Compute) -> None:
        """Compute these lanes at all own seats that they pass through."""
        plan, step, me = operation.plan, operation.step, self.life.me.worker_id
        if step != self.life.state.at + 1:
            raise AssertionError(f"{self.life.me} is to compute step {step} at state {self.life.state.at}")
        self._operation, self._leaving = operation, None
        self._note_alone(plan)
        if plan.stages == 1:
            self._repeated, self._is_told = {}, set(owed(operation.trials, plan, me))
            for lane in self._is_told:
                self.given.note(step, lane, 0, LaneSaid(gave=str(hash(self._leaf(step, lane)))))
        else:
            self._repeated = {number: trial.lane for number, trial in enumerate(operation.trials, plan.lanes)}
            self._is_told = set(self._repeated.values())
        self._under = {k: set(plan.lanes_of(me, k)) for k in plan.stages_of(me)}
        there = self._with_trials(operation)
        lanes = {*operation.lanes, *self._repeated}
        self._wanted = {(k, n) for k in self._under for n in lanes.intersection(there.lanes_of(me, k))}
        for stage, lane in sorted(self._wanted):
            if plan.stages == 1:
                self._came["backward", step, 0, lane] = 0
            elif stage == 0:
                self._came["forward", step, 0, lane] = 0
        self._todo = deque(one for one in sorted(self._came) if one[2:] in self._wanted and one[1] == step)
        self._next()

    def _leave(self, operation: Compute, accused: tuple[int, ...], reason: str) -> None:
        if self._operation is operation:
            self._leaving = self._leaving or (accused, reason)
            self._next()
        else:  # the operation has not begun
            self._aborted(operation, accused, reason)

    def _arrived(self, kind: str, step: int, stage: int, lane: int, value: int) -> None:
        """An input came from the stage before or after, perhaps before this worker wants the lane."""
        self._came[kind, step, stage, lane] = value
        operation = self._operation
        if operation is not None and operation.step == step and (stage, lane) in self._wanted:
            self._todo.append((kind, step, stage, lane))
            self._next()

    def _aborted(self, operation: Compute, accused: tuple[int, ...], reason: str) -> None:
        self.life.aborted(operation, accused, reason)
        if self._when_left is not None:
            self._when_left()

    def _owes(self, operation: Compute, worker_id: int) -> bool:
        return operation.plan.stages > 1 and worker_id in self._neighbours()

    def _neighbours(self) -> set[int]:
        """Workers whose messages are still awaited."""
        if self._operation is None:
            return set()
        plan, found = self._with_trials(self._operation), set()
        for stage, lane in self._wanted:
            if stage > 0:
                found.add(plan.holder(stage - 1, lane))
            if stage + 1 < plan.stages:
                found.add(plan.holder(stage + 1, lane))
        return found

    def _next(self) -> None:
        operation, life = self._operation, self.life
        if operation is None or self.busy:
            return
        if not self._wanted and (self._leaving is None or life.world.rng.random() < 0.5):
            self._operation = None
            life.done(operation)
        elif self._leaving is not None:
            self._operation = None
            self._aborted(operation, *self._leaving)
        elif self._todo:
            split = operation.plan.stages > 1
            took = life.world.between(MS if split else 2 * MS, 3 * MS if split else 16 * MS) * life.slowness
            self.busy = True
            life.later(took, self._done, operation, self._todo.popleft())

    def _done(self, operation: Compute, one: Pass) -> None:
        self.busy = False
        kind, step, stage, lane = one
        state = self.life.job.trained(self.life.state.stages[stage])
        if operation.plan.stages == 1:
            del self._came[one]
            self._hold(operation, stage, lane, self._leaf(step, lane))
        elif kind == "forward":
            self._forward(self._with_trials(operation), step, stage, lane, state)
        else:
            self._backward(operation, step, stage, lane, state)
        self._next()

    def _leaf(self, step: int, lane: int) -> SimGradient:
        """Gradient of a lane, for a model of one stage."""
        found = leaf(self.life.job.trained(self.life.state.stages[0]), step, lane)
        return _each(self._odd, found) if self.life.site.is_odd(self.life) else found

    def _odd(self, value: int) -> int:
        return hash((value, 53)) | 1 if self.life.site.is_odd(self.life) else value

    def _with_trials(self, operation: Compute) -> Plan:
        return with_trials(operation.plan, operation.trials) if operation.plan.stages > 1 else operation.plan

    def _note_alone(self, plan: Plan) -> None:
        if self.life.site.is_odd(self.life) and self.life.me.worker_id in alone(plan).values():  # nobody can know
            self.life.site.checks.taint.flip()
            self.life.site.checks.taint.accept()

    def _hold(self, operation: Compute, stage: int, lane: int, gradient: SimGradient) -> None:
        """Keep a gradient, added up as far as possible; a result that is held already is not replaced."""
        self._wanted.discard((stage, lane))
        sums = self.held.setdefault(operation.step, {}).setdefault(stage, {})
        if not any(lane in _lanes(node) for node in sums):
            n_lanes = operation.plan.lanes
            mine = set(operation.plan.lanes_of(self.life.me.worker_id, stage))
            merges, node = _merges(n_lanes), Node(lane, lane + 1)
            sums[node] = gradient
            while (merge := merges.get(node)) is not None and merge.left in sums and merge.right in sums:
                if not mine.issuperset(_lanes(merge.into)):
                    break
                left, right = sums.pop(merge.left), sums.pop(merge.right)
                sums[merge.into] = tuple(map(add, left, right))
                node = merge.into
        self.life.handle(LaneDone(operation.step, stage, lane))

    def _forward(self, plan: Plan, step: int, stage: int, lane: int, state: Blocks) -> None:
        entering = self._came["forward", step, stage, lane]
        value = self._odd(forward(state, step, self._repeated.get(lane, lane), entering))
        if stage + 1 == plan.stages:
            self._arrived("backward", step, stage, lane, value)
        else:
            self.mesh.send(plan.holder(stage + 1, lane), "lane", "forward", step, stage + 1, lane, value)

    def _backward(self, operation: Compute, step: int, stage: int, lane: int, state: Blocks) -> None:
        entering = self._came.pop(("forward", step, stage, lane))
        coming_back = self._came.pop(("backward", step, stage, lane))
        real = self._repeated.get(lane, lane)
        value, gradient = through(state, step, real, entering, coming_back)
        if self.life.site.is_odd(self.life):
            value, gradient = self._odd(value), _each(self._odd, gradient)
        if stage > 0:
            to = self._with_trials(operation).holder(stage - 1, lane)
            self.mesh.send(to, "lane", "backward", step, stage - 1, lane, value)
        if real in self._is_told:
            made = self._odd(forward(state, step, real, entering))
            gave = str(hash((value, gradient)))
            self.given.note(step, real, stage, LaneSaid("", str(entering), str(made), str(coming_back), gave))
        if lane in self._repeated:
            self._wanted.discard((stage, lane))
        else:
            self._hold(operation, stage, lane, gradient)


def _each(change: Callable[[int], int], gradient: SimGradient) -> SimGradient:
    return tuple(tuple(map(change, block)) for block in gradient)


_USE = 0xFFFFFFFF

SimPart = Mapping[Node, SimGradient]


class Reduction:
    """The canonical reduction: each block of each stage is added up by its owner, and handed to all who take it."""

    def __init__(self, life: Life, mesh: Mesh, lanes: SimLanes) -> None:
        self.life = life
        self.mesh = mesh
        self.lanes = lanes
        self._parts: dict[tuple[int, int], dict[int, SimPart]] = {}  # by (step, stage)
        self._pieces: dict[tuple[int, int], dict[int, Mapping[int, UnitValues]]] = {}
        self._divisions: dict[tuple[int, bool, bool], Division] = {}  # by stage, whether it is step 1, and early
        life.install({do.Reduce: self._reduce, ("owes", do.Reduce): self._owes})
        life.install({("message", "part"): self._on_part, ("message", "piece"): self._on_piece})

    def clear(self) -> None:
        self._parts, self._pieces, self._divisions = {}, {}, {}

    def _division(self, plan: Plan, stage: int, step: int) -> Division:
        """Who finishes and who takes which blocks of a step's gradient."""
        at = stage, step == 1, is_early(self.life.state.stages[stage])
        known = self._divisions.get(at)
        if known is None:
            if plan.divided_stages:
                known = Division.among(takers(plan, stage, step, at[2]), BLOCKS)
            else:
                known = Division.whole(finishers(plan.of_pool(stage), BLOCKS), BLOCKS)
            self._divisions[at] = known
        return known

    def _pool(self, stage: int) -> tuple[int, ...]:
        return tuple(s.worker_id for s in self.mesh.plan.pool(stage)) if self.mesh.plan is not None else ()

    def _reduce(self, operation: do.Reduce) -> None:
        """Send the own subtrees of each stage, cut by owner, to the owners."""
        plan, me = operation.plan, self.life.me.worker_id
        for stage in plan.stages_of(me):
            nodes = self.lanes.sums(plan, operation.step, stage)
            for worker_id, runs in self._division(plan, stage, operation.step).finishes.items():
                blocks = [block for run in runs for block in range(*run)]
                part = {node: tuple(value[block] for block in blocks) for node, value in nodes.items()}
                self.mesh.send(worker_id, "part", operation.step, stage, me, part)

    def _on_part(self, step: int, stage: int, worker_id: int, part: SimPart) -> None:
        plan, parts = self.mesh.plan, self._parts.setdefault((step, stage), {})
        parts[worker_id] = part
        pool = self._pool(stage)
        if plan is None or len(parts) < len(pool):
            return
        values = {node: value for _, one in sorted(parts.items()) for node, value in one.items()}
        for left, right, into in fold_order(plan.lanes, sorted(values)):
            values[into] = tuple(map(add, values[left], values[right]))
        division, me = self._division(plan, stage, step), self.life.me.worker_id
        own = [block for run in division.finishes[me] for block in range(*run)]
        result = dict(zip(own, values[root(plan.lanes)], strict=True))
        for pool_mate in pool:
            taken = {block for run in division.takes[pool_mate] for block in range(*run)}
            piece = {block: value for block, value in result.items() if block in taken}
            self.mesh.send(pool_mate, "piece", step, stage, me, piece)

    def _on_piece(self, step: int, stage: int, worker_id: int, values: Mapping[int, UnitValues]) -> None:
        pieces = self._pieces.setdefault((step, stage), {})
        pieces[worker_id] = values
        operation = self.life.operation
        if not isinstance(operation, do.Reduce) or operation.step != step:
            return
        mine = operation.plan.stages_of(self.life.me.worker_id)
        if any(len(self._pieces.get((step, k), ())) < len(self._pool(k)) for k in mine):
            return
        gradients = {k: self._gradient(step, k) for k in mine}
        self._parts = {key: value for key, value in self._parts.items() if key[0] > step}
        self._pieces = {key: value for key, value in self._pieces.items() if key[0] > step}
        self.life.state.reduced(step, gradients)
        takes = self._takes(operation.plan, step)
        if takes:
            stages, job = self.life.state.stages, self.life.job
            self.life.handle(Takes(step, {k: NONE if job.grows(stages[k], step) else of for k, of in takes.items()}))
        self.life.done(operation, self._payload(operation, gradients))

    def _takes(self, plan: Plan, step: int) -> dict[int, Extents]:
        """Blocks that the gradient makes here, for stages whose optimizer's state is dealt out."""
        me, stages, job = self.life.me.worker_id, self.life.state.stages, self.life.job
        mine = plan.divided_stages.intersection(plan.stages_of(me))
        takes = {k: taken(plan, k, me, stages[k], job.grows(stages[k], step)) for k in sorted(mine)}
        self.life.state.will_take(takes)
        return takes

    def _gradient(self, step: int, stage: int) -> SimReduced:
        """The gradient as far as it is taken here, put together from the pieces of all owners."""
        values = {block: value for piece in self._pieces[step, stage].values() for block, value in piece.items()}
        return tuple(values.get(block) for block in range(BLOCKS))

    def _payload(self, operation: do.Reduce, gradients: Mapping[int, SimReduced]) -> AgreePayload:
        """A section per stage; the first one bears the vote for the checks."""
        plan, step, me = operation.plan, operation.step, self.life.me.worker_id
        mine = {k: plan.lanes_of(me, k) for k in plan.stages_of(me)}
        vote = Vote(
            plan.generation,
            me,
            tuple(k * plan.lanes + lane for k, lanes in mine.items() for lane in lanes),
            tuple(
                (k * BLOCKS + block, hash(value))
                for k, gradient in sorted(gradients.items())
                for block, value in enumerate(gradient)
                if value is not None
            ),
            tuple((k, self._state(k)) for k in sorted(gradients)),
        )
        sections, strange = [], self.life.job.nonfinite
        for k, lanes in mine.items():
            losses = {n: math.nan if (step, n) in strange else 0.0 for n in lanes} if k + 1 == plan.stages else {}
            reports = [
                LaneReport(n, loss, 1.0, 1, hash((step, n)) & _USE, {"seen": (2.0, 1.0)}) for n, loss in losses.items()
            ]
            owned = self._division(plan, k, step).finishes[me] if (step, GRADIENT) in strange else ()
            norms = array("d", [0.0 if k or block else math.inf for run in owned for block in range(*run)])
            said = format(self._state(k), "x") if operation.compare else ""
            probes, votes = self.lanes.given.of(step, (k,)), [msgspec.msgpack.encode(vote)]
            runs = tuple(chain(*owned))
            tied = (
                {"embedding": str(step)} if operation.compare and k in (0, plan.stages - 1) and plan.stages > 1 else {}
            )
            sections.append(StageSection(k, reports, runs, norms.tobytes(), [], votes, said, tied, probes=probes))
        return AgreePayload(sections)

    def _state(self, stage: int) -> int:
        """Digest of a stage for the record; 0 for a state that lacks blocks, as nobody will hear of it."""
        state = self.life.job.trained(self.life.state.stages[stage])
        return 0 if None in state else digest(state)

    def _owes(self, operation: do.Reduce, worker_id: int) -> bool:
        step = operation.step
        return any(
            worker_id not in self._parts.get((step, k), {}) or worker_id not in self._pieces.get((step, k), {})
            for k in operation.plan.stages_of(self.life.me.worker_id)
            if worker_id in self._pool(k)
        )


class Spreading:
    """Members give each other the parameters that each has updated; blocks that come before a cut stay."""

    def __init__(self, life: Life, mesh: Mesh) -> None:
        self.life = life
        self.mesh = mesh
        self._came: dict[tuple[int, int, int], Blocks] = {}  # by step, stage and block
        life.install({do.Spread: self._spread, ("owes", do.Spread): self._owes, ("message", "spread"): self._on_block})

    def clear(self) -> None:
        self._came = {}

    def _spread(self, operation: do.Spread) -> None:
        """Send what is to come from here."""
        plan, me = operation.plan, self.life.me.worker_id
        for stage in plan.stages_of(me):
            state = self.life.state.stages[stage]
            for to in (seat.worker_id for seat in plan.pool(stage)):
                for block in (block for block, who in self._givers(plan, stage, to).items() if who == me):
                    given = without(state, WHOLE - Extents.numbered(planes_of(state), [block]))
                    self.mesh.send(to, "spread", operation.step, stage, block, given)
        self._look(operation)

    def _on_block(self, step: int, stage: int, block: int, given: Blocks) -> None:
        self._came[step, stage, block] = given
        if isinstance(self.life.operation, do.Spread):
            self._look(self.life.operation)

    def _lacking(self, operation: do.Spread) -> set[int]:
        """Workers that have not sent all of their parameters yet."""
        plan, me, step = operation.plan, self.life.me.worker_id, operation.step
        givers = {k: self._givers(plan, k, me) for k in plan.stages_of(me)}
        return {who for k, of in givers.items() for block, who in of.items() if (step, k, block) not in self._came}

    def _look(self, operation: do.Spread) -> None:
        state = self.life.state
        for (step, stage, _), given in self._came.items():
            if step == operation.step:
                state.receive(stage, given)
        if not self._lacking(operation):
            self._came = {key: given for key, given in self._came.items() if key[0] > operation.step}
            held = {k: present(blocks) for k, blocks in state.stages.items()}
            moved = state.grew & operation.plan.divided_stages
            self.life.done(operation, Holds(operation.step, held, bool(moved)))

    def _owes(self, operation: do.Spread, worker_id: int) -> bool:
        return worker_id in self._lacking(operation)

    def _givers(self, plan: Plan, stage: int, to: int) -> dict[int, int]:
        """The giver of each block of the parameters, for one member, by the holders before the update."""
        state = self.life.state
        return givers(plan, stage, stage in state.grew or is_early(state.stages[stage]), to)
