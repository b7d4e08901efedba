"""What must be true whatever happens: the promises, checked at every step of a simulation.

They look at what the workers do from outside and share no code with the machines under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.step_types import Key, Record
from everstep.sim.model import Gradient, Job, undisturbed


class PromiseBroken(AssertionError):
    """A promise did not hold; the message begins with its name."""


@dataclass(frozen=True)
class Vote:
    """What a record's payload says in the simulation: who contributed what, in which generation."""

    generation: int
    worker_id: int
    lanes: tuple[int, ...]
    gradient: int

    def encode(self) -> bytes:
        lanes = ",".join(map(str, self.lanes))
        return f"{self.generation};{self.worker_id};{lanes};{self.gradient}".encode()

    @staticmethod
    def decode(payload: bytes) -> Vote:
        generation, worker_id, lanes, gradient = payload.decode().split(";")
        return Vote(int(generation), int(worker_id), tuple(int(x) for x in lanes.split(",") if x), int(gradient))


@dataclass
class Checks:
    """The promises, over one simulation. `holders`: steps of live, reachable workers that follow some plan;
    `positions`: of all live workers that do.
    """

    job: Job
    holders: Callable[[], Mapping[WorkerKey, int]] = dict
    positions: Callable[[], Mapping[WorkerKey, Key]] = dict
    states: list[int] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    effects: dict[int, int] = field(default_factory=dict)
    released: dict[WorkerKey, int] = field(default_factory=dict)
    committed: int = 0
    finals: list[int] = field(default_factory=list)
    commits_by_generation: dict[int, int] = field(default_factory=dict)
    lost_everything: int = 0
    given_up: set[WorkerKey] = field(default_factory=set)
    newest: int = 0  # generation that anybody has entered

    def __post_init__(self) -> None:
        self.states = undisturbed(self.job)

    def require(self, condition: bool, promise: str, text: str) -> None:
        if not condition:
            raise PromiseBroken(f"{promise}: {text}")

    # ---- P3: one plan

    def plan(self, plan: Plan) -> None:
        """A plan was sent to, or taken in by, somebody."""
        known = self.plans.setdefault(plan.generation, plan)
        if known is plan:
            self._new_plan(plan)
        elif known != plan:
            raise PromiseBroken(f"P3: two plans of generation {plan.generation}: {known} and {plan}")

    def _new_plan(self, plan: Plan) -> None:
        text = f"generation {plan.generation}: {plan}"
        self.require(bool(plan.members), "P3", f"no members in {text}")
        self.require(plan.generation >= 1, "P3", f"not a generation in {text}")
        for stage in range(plan.stages):
            pool = plan.pool(stage)
            lanes = sorted(lane for seat in pool for lane in seat.lanes)
            self.require(lanes == list(range(plan.lanes)), "P3", f"lanes {lanes} in {text}")
            self.require({s.worker_id for s in pool} <= set(plan.worker_ids), "P3", f"a stranger has a seat in {text}")
            self.require(plan.leader(stage) in plan.worker_ids, "P3", f"no leader in {text}")

    def decision(self, generation: int, key: Key, records: Mapping[int, Record], handed: bool) -> None:
        """A worker took a decision; `handed`: with records of an older generation that a peer gave it."""
        votes = [Vote.decode(r.payload) for r in records.values()]
        generations = {v.generation for v in votes}
        self.require(len(generations) == 1, "P3", f"{key} decided with records of generations {sorted(generations)}")
        made_in = generations.pop()
        fits = made_in <= generation if handed else made_in == generation
        self.require(fits, "P3", f"{key} decided in generation {generation} with records of {made_in}")
        plan = self.plans[made_in]
        needed = key.step if key.seq else key.step - 1
        positions = self.positions()
        behind = [m.key for m in plan.members if positions.get(m.key, key).step < needed]
        self.require(not behind, "P2", f"{key} was decided while members {behind} had not decided step {needed}")
        who = tuple(sorted(v.worker_id for v in votes))
        self.require(who == plan.worker_ids, "P3", f"{key} decided by {who}, the plan says {plan.worker_ids}")
        if key.seq == 0:
            lanes = sorted(lane for v in votes for lane in v.lanes)
            self.require(lanes == list(range(self.job.lanes)), "P2", f"step {key.step} committed with lanes {lanes}")
            self.require(len({v.gradient for v in votes}) == 1, "P1", f"step {key.step}: gradients differ")
            self.committed = max(self.committed, key.step)
            newest = self.commits_by_generation.get(made_in, 0)
            self.commits_by_generation[made_in] = max(newest, key.step)

    # ---- P1: exact

    def state(self, who: WorkerKey, step: int, state: int) -> None:
        """A worker's state is now that of `step`."""
        self.require(
            0 <= step <= self.job.steps and self.states[step] == state, "P1", f"{who}: wrong state of step {step}"
        )

    def reduced(self, who: WorkerKey, step: int, state: int, gradient: Gradient) -> None:
        """A worker holds the reduced gradient of `step`, computed from `state`."""
        self.require(hash((state, step, *gradient)) == self.states[step], "P1", f"{who}: wrong gradient of step {step}")

    # ---- P2: exactly once, and nothing lost

    def release(self, who: WorkerKey, position: Key, step: int, effect: int) -> None:
        """The effects of a step leave a worker that has decided `position`."""
        self.require(position > Key(step, 0), "P2", f"{who} released step {step} at {position}: others may lack it")
        known = self.effects.setdefault(step, effect)
        self.require(known == effect, "P2", f"{who} released other effects of step {step}")
        self.require(step <= self.committed, "P2", f"{who} released step {step}, which nobody had committed")
        self.require(step > self.released.get(who, 0), "P2", f"{who} released step {step} twice or out of order")
        self.released[who] = step

    def entered(self, who: WorkerKey, generation: int, step: int) -> None:
        """A worker goes on in a generation from the state of `step`."""
        self.newest = max(self.newest, generation)
        floor = max(self.effects, default=0)
        if step >= floor or generation < self.newest:  # one that slept through a change gets nowhere in an old one
            return
        ahead = sorted(str(k) for k, at in self.holders().items() if at >= floor and k not in self.given_up)
        self.require(
            not ahead, "P2", f"{who} enters {generation} at step {step}, {floor} was released and {ahead} hold it"
        )
        self.lost_everything += 1

    def evicted(self, who: WorkerKey, others: bool) -> None:
        """A worker was given up; `others`: members are left, as far as the coordinator can know. Then it is no loss."""
        if others:
            self.given_up.add(who)

    # ---- the end

    def final(self, who: WorkerKey, step: int, state: int) -> None:
        """The leader wrote the result."""
        self.require(step == self.job.steps, "P1", f"{who} finished at step {step} of {self.job.steps}")
        self.state(who, step, state)
        self.finals.append(state)

    def finish(self) -> None:
        """The job is said to be completed."""
        self.require(bool(self.finals), "P1", "completed without a result")
        missing = [s for s in range(1, self.job.steps + 1) if s not in self.effects]
        self.require(not missing, "P2", f"completed, but the effects of steps {missing} never left")
