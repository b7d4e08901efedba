"""The shortest schedule that still fails: faults of a failing seed are left out, and its setup made plainer, as long
as it fails in the same way.

Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (2002), for the faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, NamedTuple

from everstep.sim.rules import USUAL
from everstep.sim.setups import Setup

MOST_RUNS = 2000
"""Simulations that may be run for one seed."""


class Shrunk(NamedTuple):
    """The plainest setup that was found, and the number of simulations that it took."""

    setup: Setup
    runs: int


def shrink(setup: Setup, fails: Callable[[Setup], bool], most_runs: int = MOST_RUNS) -> Shrunk:
    """Make a setup that fails shorter. Leaving out any one of the faults that are left no longer fails, unless
    `most_runs` ended the search before."""
    search = _Search(setup, fails, most_runs)
    while search.leave_out_faults() or search.take_plainer(_plainer_setups) or search.take_plainer(_plainer_faults):
        pass
    return Shrunk(search.setup, search.runs)


class _Search:
    def __init__(self, setup: Setup, fails: Callable[[Setup], bool], most_runs: int) -> None:
        self.setup, self.runs = setup, 0
        self._fails, self._most_runs = fails, most_runs
        self._tried: set[str] = set()

    def leave_out_faults(self) -> bool:
        """Leave out runs of faults: all, then half, then fewer and fewer. Returns whether any could be left out."""
        before = size = len(self.setup.faults)
        while size:
            first = 0
            while first < len(self.setup.faults):
                left = (*self.setup.faults[:first], *self.setup.faults[first + size :])
                if not self._try(replace(self.setup, faults=left)):
                    first += size
            size //= 2
        return len(self.setup.faults) < before

    def take_plainer(self, offers: Callable[[Setup], Iterator[Setup]]) -> bool:
        """Take the first of the plainer setups that fails. Returns whether there was one."""
        return any(self._try(offer) for offer in offers(self.setup))

    def _try(self, setup: Setup) -> bool:
        known = repr(setup)
        if known in self._tried or self.runs >= self._most_runs:
            return False
        self._tried.add(known)
        self.runs += 1
        if not self._fails(setup):
            return False
        self.setup = setup
        return True


def _plainer_setups(setup: Setup) -> Iterator[Setup]:
    """Setups with one thing less: what is switched off first, then fewer workers, hosts and steps. A job that dies as a
    whole keeps its checkpoints, and one that compares states the steps that this takes."""
    job, dies = setup.job, any(fault.kind == "launcher" for fault in setup.faults)
    off: dict[str, Any] = {
        "spares": 0,
        "active": 0,
        "disk_hosts": None,
        "save_ms": 0,
        "verify_every": 0,
        "donors": 1,
        "differs": None,
        "rules": USUAL,
        "on_failure": "replace",
        "min_workers": 1,
    }
    for name, value in off.items():
        if getattr(setup, name) != value:
            yield replace(setup, **{name: value})
    of_job: dict[str, Any] = {
        "nonfinite": frozenset(),
        "leaves_after": 0,
        "keep_every": 0,
        "write_every": job.write_every if dies else 0,
        "gather_every": 3,
        "state_bytes": -1,
        "on_nonfinite": "warn",
        "nonfinite_limit": 0,
    }
    for name, value in of_job.items():
        if getattr(job, name) != value:
            yield replace(setup, job=replace(job, **{name: value}))
    if setup.hosts > 1:
        yield replace(setup, hosts=setup.hosts - 1)
    if setup.workers > max(1, setup.min_workers):
        yield replace(setup, workers=setup.workers - 1)
    if job.steps > max(1, job.leaves_after + 1, 2 * setup.verify_every):
        yield replace(setup, job=replace(job, steps=job.steps - 1))


def _plainer_faults(setup: Setup) -> Iterator[Setup]:
    """Setups in which one fault is plainer: it does not wait, or strikes the first time, or the first target."""
    plain: dict[str, Any] = {"delay_us": 0, "count": 1, "pick": 0, "same": False, "phase": ""}
    for at, fault in enumerate(setup.faults):
        for name, value in plain.items():
            if getattr(fault, name) != value:
                changed = replace(fault, **{name: value})
                yield replace(setup, faults=(*setup.faults[:at], changed, *setup.faults[at + 1 :]))


def source_of(value: Any) -> str:
    """A value of a setup as Python, without what is as usual: to be kept as a scenario with a name."""
    if isinstance(value, tuple):
        return f"({', '.join(map(source_of, value))}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value):
        return repr(value)
    named = {known.name: getattr(value, known.name) for known in fields(value)}
    usual = {known.name: known.default for known in fields(value) if known.default is not MISSING}
    given = [f"{name}={source_of(one)}" for name, one in named.items() if name not in usual or usual[name] != one]
    return f"{type(value).__name__}({', '.join(given)})"
