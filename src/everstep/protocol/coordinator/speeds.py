"""Speeds of the workers, and lanes laid out by them. Pure.

A worker's speed is measured by the time of its forward and backward passes per lane; the number of its lanes and its
waits for others do not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from everstep.base.domains import Domains
from everstep.base.plan import Plan, Seat, WorkerKey
from everstep.placement.lanes import place
from everstep.protocol.coordinator.environment import Alarm, Environment
from everstep.protocol.coordinator.membership import Agents, Membership

_ABOUT_EQUAL = 1.1
_LOOKS = 6


class Speeds:
    """in_force: lanes per second by worker id, by which lanes are laid out; empty: evenly. watching: some worker has
    reported its speed, so the speeds are checked now and then."""

    def __init__(self, env: Environment, membership: Membership, agents: Agents) -> None:
        self.in_force: Mapping[int, float] = {}
        self._env, self._membership, self._agents = env, membership, agents
        self._newest_ms: dict[WorkerKey, float] = {}  # per lane, as each last said; 0: unknown
        self._looks_ms: dict[WorkerKey, deque[float]] = {}  # at the last looks at the speeds
        self._idle = (0, False)  # the generation that was checked, and the result
        self.watching = False
        self._uneven_since_ns: int | None = None  # since when other lanes would shorten the steps by much
        self._changed_ns: int | None = None

    # ---- placement

    def seats(
        self,
        worker_ids: Sequence[int],
        previous: Sequence[Seat],
        *,
        anew: bool = False,
        speeds: Mapping[int, float] | None = None,
    ) -> tuple[Seat, ...]:
        """Placement by the job's config. speeds: used instead of those in force."""
        config = self._env.config
        speeds = self.in_force if speeds is None else speeds
        known = {i: speeds[i] for i in worker_ids if i in speeds}
        lanes, stages, wish = config.lanes, config.stages, config.wish
        where = self.domains(worker_ids)
        return place(
            *(worker_ids, lanes),
            stages=stages,
            speeds=known,
            previous=previous,
            wish=wish,
            anew=anew,
            domains=where,
        )

    def domains(self, worker_ids: Iterable[int]) -> dict[int, Domains]:
        """Failure domains of these workers, as far as they are known."""
        workers = self._membership.workers
        return {i: self._agents.domains(workers[i]) for i in worker_ids if i in workers}

    def of(self, worker_ids: Iterable[int]) -> tuple[tuple[int, float], ...]:
        """The speeds in force, in the form that a placement of these workers takes."""
        return tuple((i, self.in_force[i]) for i in sorted(worker_ids) if i in self.in_force)

    def idle_members(self, plan: Plan) -> bool:
        """Whether repairs have left seats without lanes that would get some if lanes were laid out again."""
        if all(s.lanes for s in plan.seats):
            return False
        if self._idle[0] != plan.generation:
            without = {(s.worker_id, s.stage) for s in plan.seats if not s.lanes}
            again = self.seats(plan.worker_ids, plan.seats, anew=True)
            self._idle = (plan.generation, any((s.worker_id, s.stage) in without and s.lanes for s in again))
        return self._idle[1]

    # ---- measurements

    def say(self, key: WorkerKey, ms_per_lane: float) -> None:
        """A worker reports its time per lane, 0 if unknown. The first report starts the checks."""
        self._newest_ms[key] = ms_per_lane
        if ms_per_lane > 0 and not self.watching:
            self.watching = True
            self.look_later()

    def look_later(self) -> None:
        """Ring for the next check of the speeds."""
        self._env.alarms.set(Alarm.SPEEDS, self._env.now + self._env.config.look_ns)

    def measured(self, plan: Plan) -> dict[int, float] | None:
        """ms per lane by member: the median over the checks, including this one; None while one is unknown. A member
        without lanes counts as an average one."""
        alive = self._membership.alive
        self._newest_ms = {key: ms for key, ms in self._newest_ms.items() if alive(key) is not None}
        self._looks_ms = {key: looks for key, looks in self._looks_ms.items() if alive(key) is not None}
        known: dict[int, float] = {}
        for member in plan.members:
            if alive(member.key) is None:
                return None
            looks = self._looks_ms.setdefault(member.key, deque(maxlen=_LOOKS))
            if (newest := self._newest_ms.get(member.key, 0.0)) > 0:
                looks.append(newest)
            if looks:
                known[member.worker_id] = median(looks)
            elif any(seat.lanes for seat in plan.seats_of(member.worker_id)):
                return None
        if not known:
            return None
        typical = median(known.values())
        return {i: known.get(i, typical) for i in plan.worker_ids}

    def forget(self, worker_id: int) -> None:
        """A worker was lost: the next life of its slot may be faster or slower."""
        self.in_force = {i: speed for i, speed in self.in_force.items() if i != worker_id}

    def replay_plan(self, plan: Plan) -> None:
        """Take the speeds that the journal's newest plan was made with."""
        self.in_force = dict(plan.speeds)

    # ---- a gain that lasts

    def even(self) -> None:
        """Other lanes would gain nothing at the moment."""
        self._uneven_since_ns = None

    def uneven(self) -> bool:
        """Other lanes would shorten the steps by much. Returns whether that has lasted, and the last change has,
        too."""
        now, lasting_ns = self._env.now, self._env.config.lasting_ns
        if self._uneven_since_ns is None:
            self._uneven_since_ns = now
        lasted = now - self._uneven_since_ns >= lasting_ns
        return lasted and (self._changed_ns is None or now - self._changed_ns >= lasting_ns)

    def change(self, speeds: Mapping[int, float], moving: WorkerKey | None) -> None:
        """From now on lanes are laid out by these speeds. moving: a worker that moves to another stage, where a lane
        takes another time."""
        self._uneven_since_ns, self._changed_ns = None, self._env.now
        self.in_force = dict(speeds)
        if moving is not None:
            self._looks_ms.pop(moving, None)


def by_speed(ms_per_lane: Mapping[int, float]) -> dict[int, float]:
    """Lanes per second by worker; empty if all are about equally fast, so that lanes are spread evenly again."""
    slowest, fastest = max(ms_per_lane.values()), min(ms_per_lane.values())
    return {} if slowest <= fastest * _ABOUT_EQUAL else {i: 1000.0 / ms for i, ms in sorted(ms_per_lane.items())}


def reason(ms_per_lane: Mapping[int, float], now_ms: float, then_ms: float) -> str:
    """The reason for a plan that moves lanes."""
    slowest = max(ms_per_lane, key=lambda i: (ms_per_lane[i], -i))
    typical = median(ms_per_lane.values())
    return (
        f"lanes by speed: worker {slowest} takes {ms_per_lane[slowest]:.0f} ms per lane, the median is {typical:.0f};"
        f" the busiest worker will compute {then_ms:.0f} ms per step instead of {now_ms:.0f} ms, by "
        "the cost model"
    )
