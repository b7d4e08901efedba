"""Setups of simulations: how large a job is, what it is told to do, and the faults that strike it; drawn from a seed.

Each kind of trouble is drawn by a generator of its own, so that another kind leaves what seeds had before as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from everstep.base.plan import WorkerKey
from everstep.sim import odd_messages
from everstep.sim.damaging import draw_damage
from everstep.sim.faults import SimFault, draw, draw_losses, draw_more, draw_one, draw_split
from everstep.sim.holders import draw_holders
from everstep.sim.leases import draw_leases, draw_small
from everstep.sim.model import GRADIENT, SimJob
from everstep.sim.operating import WITHOUT_LEASE, draw_operated
from everstep.sim.rules import USUAL, Rules, draw_rules, more_rules
from everstep.sim.starving import draw_starved
from everstep.sim.world import World

_OF_HOSTS = ("host", "host", "isolate", "cut_workers", "host_workers", "given_up", "worn")
_AT_THE_END = ("signal", "scale", "drain", "save", "kill", "coordinator", "freeze")


@dataclass(frozen=True)
class Setup:
    """Setup of a simulation. `hosts` worker hosts share the slots; `spares` are started beyond `workers`."""

    workers: int
    spares: int
    hosts: int
    min_workers: int
    on_failure: str
    job: SimJob
    faults: tuple[SimFault, ...]
    active: int = 0  # of each pool; the others stand by; 0: all of them
    disk_hosts: int | None = None  # number of hosts that see the checkpoints; None: all
    save_ms: int = 0  # limit of the last checkpoint of a worker that has raised; 0: none is taken
    rewindable: bool = True  # applications can go on from an earlier step, in place
    verify_every: int = 0  # steps between comparisons of the copies; 0: none
    donors: int = 1  # number of sources asked for a state at once
    # A worker whose first life builds another initial state than all others; or whose script changes its state in each
    # step; or the first of the lives of a slot that compute lanes otherwise.
    differs: int | Literal["leader", "healed"] | WorkerKey | None = None
    rules: Rules = USUAL

    def with_odd(self, seed: int) -> Setup:
        """The setup, now and then with a slot whose lives compute otherwise, from the first or the second one on."""
        rng = Random(f"odd {seed}")
        if self.workers < 2 or rng.random() > 0.12 or self.differs is not None:
            return self
        odd = WorkerKey(rng.randrange(self.workers), rng.choice((0, 1, 1)))
        return replace(self, differs=odd, min_workers=1, on_failure=self.on_failure.replace("wait", "shrink"))

    def with_nonfinite(self, seed: int) -> Setup:
        """The same; now and then with losses or gradients that are not finite, some steps in a row and perhaps another
        one, and any rule of what follows."""
        rng, steps = Random(f"nonfinite {seed}"), self.job.steps
        if rng.random() > 0.2:
            return self
        first, lanes = rng.randint(1, steps), (GRADIENT, *range(self.job.lanes))
        row = range(first, first + rng.choice((1, 1, 2, 3, 4)))
        strange = frozenset((step, rng.choice(lanes)) for step in (*row, *row, rng.randint(1, steps)) if step <= steps)
        mode, limit = rng.choice(("warn", "skip", "skip", "stop")), rng.choice((0, 0, 2, 3))
        job = replace(self.job, nonfinite=strange, on_nonfinite=mode, nonfinite_limit=limit)
        return replace(self, job=job)

    def with_losses(self, seed: int, horizon_ms: int) -> Setup:
        """The setup, now and then with lost blocks of snapshots, several donors asked at once, or damaged answers."""
        rng = Random(f"blocks {seed}")
        faults = (*self.faults, *draw_losses(rng, horizon_ms), *draw_damage(rng, horizon_ms))
        donors = rng.choice((1, 1, 2, 3))
        return replace(self, donors=donors, faults=tuple(sorted(faults, key=lambda f: f.at_ms)))

    def with_more(self, seed: int, horizon_ms: int) -> Setup:
        """The setup, now and then with users' commands, with hosts, disks and whole jobs that fail, and with a worker
        that builds another initial state."""
        rng, compared = Random(f"more {seed}"), bool(self.verify_every)
        more = draw_more(rng, horizon_ms, resumes=not compared)
        job, dies = self.job, any(fault.kind == "launcher" for fault in more)
        if dies and not job.write_every:
            job = replace(job, write_every=rng.choice((1, 2, 3)))
        differs = self.workers - 1 if rng.random() < 0.15 and self.workers > 1 and not compared else None
        if job.stages > 1:
            more, job = _cut_anew(rng, more, job)
        faults = tuple(sorted((*self.faults, *more), key=lambda f: f.at_ms))
        return replace(self, job=job, faults=faults, differs=differs)

    def with_leaving(self, seed: int, horizon_ms: int) -> Setup:
        """The setup, now and then with all loops left before the last step, or one of them."""
        rng = Random(f"leaving {seed}")
        drawn = rng.random()
        if self.verify_every or drawn > 0.16:
            return self
        if drawn > 0.06:
            return replace(self, job=replace(self.job, leaves_after=rng.randint(1, self.job.steps - 1)))
        one = replace(draw_one(rng, rng.randint(20, horizon_ms)), kind="leave", count=1)
        phase = rng.choice(("", "settling", "gathering", "computing"))  # at that moment, or during the recovery
        second = replace(draw_one(rng, one.at_ms + rng.randint(0, 30), phase), kind="kill")
        faults = (*self.faults, one, *((second,) if rng.random() < 0.4 else ()))
        return replace(self, faults=tuple(sorted(faults, key=lambda f: f.at_ms)))

    def with_ending(self, seed: int) -> Setup:
        """The setup, now and then with commands and deaths while the job ends."""
        rng = Random(f"ending {seed}")
        if rng.random() > 0.15:
            return self
        drawn = (replace(draw_one(rng, 0, "ending"), kind=rng.choice(_AT_THE_END)) for _ in range(rng.choice((1, 2))))
        return replace(self, faults=tuple(sorted((*self.faults, *drawn), key=lambda f: f.at_ms)))

    def with_operated(self, seed: int, horizon_ms: int) -> Setup:
        """The setup with people who ask for things, hosts that leave, and other rules."""
        rng = Random(f"operated {seed}")
        faults = (*self.faults, *draw_operated(rng, horizon_ms))
        rules = draw_rules(rng, self.hosts, self.workers + self.spares, self.rules.lasting_ms)
        rules = more_rules(rules, Random(f"more rules {seed}"), self.hosts)
        faults = (*faults, *odd_messages.draw_odd(Random(f"odd acts {seed}"), horizon_ms))
        return replace(self, rules=rules, faults=tuple(sorted(faults, key=lambda f: f.at_ms)))

    def with_spanning(self, seed: int) -> Setup:
        """The setup with workers that lie on two or three hosts each, which die or are cut off now and then."""
        rng = Random(f"spans {seed}")
        span, late_ms, workers = rng.choice((2, 2, 3)), 200 + self.job.steps * 40, min(self.workers, 3)
        lost = [
            SimFault(
                rng.choice(_OF_HOSTS), rng.randint(40, late_ms), pick=rng.randrange(99), for_ms=rng.randint(5, 3000)
            )
            for _ in range(rng.randint(1, 3))
        ]
        job = replace(self.job, write_every=self.job.write_every or rng.choice((1, 2, 3)))
        return replace(
            self,
            hosts=span + rng.randint(0, 2),
            workers=workers,
            spares=0,
            differs=None,
            min_workers=min(self.min_workers, workers),
            job=job,
            faults=tuple(sorted((*self.faults, *lost), key=lambda fault: fault.at_ms)),
            rules=replace(self.rules, shared=True, room=0, degree=1, first="", patience_ms=1500, span=span),
        )

    def with_starved(self, seed: int, horizon_ms: int) -> Setup:
        """The setup, now and then with processes that get no processor."""
        faults = (*self.faults, *draw_starved(Random(f"starved {seed}"), horizon_ms))
        return replace(self, faults=tuple(sorted(faults, key=lambda f: f.at_ms)))

    def with_state_of(self, size: int) -> Setup:
        """The setup with workers whose state has this many bytes."""
        return replace(self, job=replace(self.job, state_bytes=size))

    def with_corruption(self, rng: Random) -> Setup:
        """The setup, now and then with comparisons of copies, kept right states, and a flipped bit of one copy."""
        every = rng.choice((0, 0, 0, 0, 0, 1, 2, 3))
        if not every or 2 * every > self.job.steps:
            return self
        kept = self.job.keep_every or rng.choice((0, 1, 2)), self.job.write_every or rng.choice((0, 0, 2, 3))
        job = replace(self.job, keep_every=kept[0], write_every=kept[1])
        faults = list(self.faults)
        if rng.random() < 0.85:
            horizon_ms = 40 + 20 * (job.steps - 2 * every)
            faults.append(replace(draw_one(rng, rng.randint(20, horizon_ms)), kind="flip", count=1))
        if rng.random() < 0.3:  # during the recovery
            faults = [f for f in faults if f.kind == "flip" or rng.random() < 0.2]
        return replace(self, job=job, verify_every=every, faults=tuple(sorted(faults, key=lambda f: f.at_ms)))

    def __str__(self) -> str:
        split = f"; {self.job}, {self.active} active, disk on {self.disk_hosts}" if self.job.stages > 1 else ""
        compared = f"; compared every {self.verify_every}" if self.verify_every else ""
        compared += f"; {self.donors} donors at once" if self.donors > 1 else ""
        compared += f"; worker {self.differs} begins differently" if isinstance(self.differs, int) else ""
        compared += f"; {self.differs} computes otherwise" if isinstance(self.differs, WorkerKey) else ""
        compared += f"; {self.job.copies} copies of each segment" if self.job.copies else ""
        compared += f"; a part of it comes in step {self.job.late[0]}" if self.job.late[0] else ""
        compared += f"; all loops are left after step {self.job.leaves_after}" if self.job.leaves_after else ""
        if self.job.nonfinite:
            compared += f"; not finite {sorted(self.job.nonfinite)}"
            compared += f" ({self.job.on_nonfinite}, limit {self.job.nonfinite_limit})"
        compared += f"; {self.rules}" if self.rules != USUAL else ""
        compared += "; two coordinators and a lease" if isinstance(self, LeasedSetup) else ""
        lines = [
            f"{self.workers} workers and {self.spares} spares on {self.hosts} hosts, at least {self.min_workers}, "
            f"on_failure {self.on_failure}; {self.job.steps} steps of {self.job.lanes} lanes{split}{compared}"
        ]
        return "\n".join(lines + [f"  {fault}" for fault in self.faults])


class UnlikeSetup(Setup):
    """A setup in which the last host computes with other kernels than all others."""


class LeasedSetup(Setup):
    """A setup with two coordinators, of which the holder of the lease decides."""


def _cut_anew(rng: Random, faults: Iterable[SimFault], job: SimJob) -> tuple[tuple[SimFault, ...], SimJob]:
    """Give resumed jobs another number of stages, mostly: any, as far as the units of the model go."""
    units = rng.randint(job.stages, 4)
    drawn = [replace(f, stages=rng.choice((0, *range(1, units + 1)))) if f.kind == "launcher" else f for f in faults]
    cut = any(fault.stages for fault in drawn)
    return tuple(drawn), replace(job, units=units) if cut else job


def _grown_late(rng: Random, job: SimJob) -> SimJob:
    """Now and then with a part of the optimizer's state that comes in a later step, in all stages or in one of them."""
    late, one = rng.choice((0, rng.randint(2, job.steps))), rng.randrange(job.stages)
    return replace(job, late=(late, -1 if job.units else rng.choice((-1, one))))


def set_up(seed: int) -> Setup:
    """The setup of a seed."""
    rng = World(seed).rng
    workers = rng.randint(2, 5)
    steps = rng.randint(4, 12)
    lanes = rng.randint(max(4, workers), 8)
    chosen = Setup(
        workers=workers,
        spares=rng.choice((0, 0, 0, 1, 2)),
        hosts=rng.randint(1, 3),
        min_workers=rng.choice((1, 1, 1, min(2, workers), workers)),
        on_failure=rng.choice(("replace", "replace", "replace", "shrink", "wait")),
        job=SimJob(steps, lanes, rng.randint(2, 5)),
        faults=draw(rng, horizon_ms=60 + steps * 40),
        rewindable=rng.random() < 0.5,
        save_ms=rng.choice((0, 300)),
    )
    chosen = chosen.with_state_of(rng.choice((-1, 1))).with_corruption(rng).with_losses(seed, 60 + steps * 40)
    more = chosen.with_more(seed, 60 + steps * 40).with_leaving(seed, 60 + steps * 40)
    return more.with_starved(seed, 60 + steps * 40).with_odd(seed).with_nonfinite(seed).with_ending(seed)


def set_up_split(seed: int) -> Setup:
    """The setup of a seed, for a model in several stages; now and then with fewer workers than stages."""
    rng = World(seed).rng
    stages = rng.randint(2, 4)
    workers = rng.randint(1, stages) if rng.random() < 0.15 else min(7, stages * rng.randint(1, 3))
    steps = rng.randint(4, 9)
    lanes = rng.randint(3, 5)
    hosts = rng.randint(1, 3)
    chosen = Setup(
        workers=workers,
        spares=rng.choice((0, 0, 1, 1, 2)),
        hosts=hosts,
        min_workers=rng.choice((1, 1, 1, min(2, workers))),
        on_failure=rng.choice(("replace", "replace", "replace", "shrink", "wait")),
        job=SimJob(steps, lanes, rng.randint(2, 5), stages, rng.choice((0, 1, 2, 3)), rng.choice((0, 2, 3, 4))),
        faults=draw_split(rng, horizon_ms=60 + steps * 60),
        active=rng.choice((0, 0, 1)),
        disk_hosts=rng.choice((None, None, 1)),
        rules=Rules(lasting_ms=rng.choice((30_000, 0, 50))),
        save_ms=rng.choice((0, 300)),
    )
    chosen = chosen.with_state_of(rng.choice((-1, -1, 1))).with_corruption(rng).with_losses(seed, 60 + steps * 60)
    more = chosen.with_more(seed, 60 + steps * 60).with_leaving(seed, 60 + steps * 60)
    return more.with_starved(seed, 60 + steps * 60).with_odd(seed).with_nonfinite(seed).with_ending(seed)


def set_up_sharded(seed: int) -> Setup:
    """The setup of a seed of a whole model, or one in several stages, whose members have the optimizer's state in
    segments."""
    chosen, rng = (set_up_split if seed % 3 == 0 else set_up)(seed), Random(f"sharded {seed}")
    job = replace(chosen.job, copies=rng.choice((1, 2, 2, 3)), frees=Random(f"frees {seed}").random() < 0.5)
    job = _grown_late(Random(f"late {seed}"), job)
    faults = [fault for fault in chosen.faults if fault.kind != "flip"]
    faults += draw_holders(Random(f"holders {seed}"), 60 + job.steps * 50)
    at_last = tuple(sorted(faults, key=lambda f: f.at_ms))
    return replace(chosen, job=job, faults=at_last, differs=None, verify_every=0)


def set_up_leased(seed: int) -> Setup:
    """The setup of a seed, with two coordinators; every third is of a model in several stages."""
    chosen = set_up(seed) if seed % 3 else set_up_split(seed)
    horizon_ms = 60 + chosen.job.steps * 60
    faults = (*chosen.faults, *draw_leases(Random(f"leases {seed}"), horizon_ms))
    faults += draw_small(Random(f"small {seed}"), horizon_ms)
    return LeasedSetup(**{**vars(chosen), "faults": tuple(sorted(faults, key=lambda f: f.at_ms))})


def set_up_operated(seed: int) -> Setup:
    """The setup of a seed of any kind, with people who ask for things, hosts that leave, and rules of its own."""
    chosen = (set_up, set_up_split, set_up_leased)[seed % 3](seed)
    chosen = chosen.with_operated(seed, 60 + chosen.job.steps * 50)
    if not isinstance(chosen, LeasedSetup):
        drawn = Random(f"kinds of hosts {seed}").random()
        if drawn < 0.08 and chosen.hosts > 1:
            rules = replace(chosen.rules, least=1, first="")  # who is refused counts for neither
            # The only host that the job takes keeps its slots: nobody else could ever train it.
            kept = tuple(fault for fault in chosen.faults if fault.kind != "given_up")
            return UnlikeSetup(**{**vars(chosen), "min_workers": 1, "rules": rules, "faults": kept})
        return chosen.with_spanning(seed) if drawn > 0.7 and chosen.job.stages == 1 else chosen
    without = WITHOUT_LEASE | odd_messages.WITHOUT_LEASE
    return replace(chosen, faults=tuple(fault for fault in chosen.faults if fault.kind not in without))
