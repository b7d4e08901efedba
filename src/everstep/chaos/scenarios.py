"""The failure suite as data: for each scenario the faults, the job, and the expected effects. Pure.

Every scenario ends with the bits of the undisturbed run on one worker, or, where it says so, with a job that cannot go
on and says why. Scenarios in which a worker comes back slow stage 0 down until that has been reported, so that they
need neither long jobs nor luck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.base.cause import Cause
from everstep.base.errors import ConfigError, did_you_mean

SIX_AS_3x2: Mapping[str, Any] = {"stages": 3, "workers": 6}
SIX_AS_2x3: Mapping[str, Any] = {"stages": 2, "workers": 6}
QUICK: Mapping[str, Any] = {
    "heartbeat.interval_s": 0.1,
    "heartbeat.floor_s": 0.5,
    "heartbeat.ceiling_s": 1,
    "backoff.initial_s": 0.05,
}
"""Limits at which hangs and partitions become too long within a scenario of seconds."""
TASK = "transformer-text"
TINY: Mapping[str, Any] = {
    "task.width": 32,
    "task.heads": 2,
    "task.layers": 3,
    "task.context": 16,
    "task.limit_bytes": 60_000,
    "lanes": 4,
    "micro_batch": 2,
    "steps": 30,
}
"""The default task, made small: a step takes milliseconds."""
LEADER_LOST: Mapping[str, int] = {"worker_evicted": 1, "leader_changed": 1, "recovery_completed": 1}
COMEBACK = "slow:target=leader:0,at=5,by=0.04,for=8,until=worker_healed*{}"


@dataclass(frozen=True)
class Scenario:
    """One row of the suite.

    chaos: faults, as for `--chaos`. shape: stages and workers. settings: further config keys. expects: kinds of events,
    with their least numbers. bears: by kind, fields that one event of it has to have. never: kinds of events that must
    not occur. fails: the job cannot go on, for this cause; None: it ends with the right bits.
    """

    name: str
    about: str
    chaos: str
    expects: Mapping[str, int]
    shape: Mapping[str, Any] = field(default_factory=lambda: SIX_AS_3x2)
    settings: Mapping[str, Any] = field(default_factory=dict)
    bears: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    never: tuple[str, ...] = ("fallback",)
    fails: Cause | None = None

    def config(self) -> dict[str, Any]:
        """The config keys that the scenario sets, beyond those of the task."""
        return {**QUICK, **self.shape, **self.settings, "chaos": self.chaos}


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "single_failure",
        "one worker dies",
        f"kill:target=worker:3,at=6,phase=backward; {COMEBACK.format(1)}",
        {"worker_evicted": 1, "recovery_completed": 1, "worker_healed": 1},
    ),
    Scenario(
        "multi_failure",
        "three workers of three stages die at the same step",
        f"kill:target=worker:1+worker:3+worker:4,at=6; {COMEBACK.format(3)}",
        {"fault_injected": 4, "worker_evicted": 3, "recovery_completed": 1, "leader_changed": 1, "worker_healed": 3},
    ),
    Scenario(
        "cascading_failures",
        "a leader dies, then its successor, then the next: the last of the pool goes on",
        "kill:target=leader:1,at=6,phase=forward; kill:target=leader:1,at=6,phase=reduce; "
        f"kill:target=leader:1,at=6,phase=update; {COMEBACK.format(3)}",
        {"worker_evicted": 3, "leader_changed": 3, "worker_healed": 3},
        {**SIX_AS_2x3, "map": [{"workers": [0, 1]}, {"workers": [2, 3, 4, 5]}]},
    ),
    Scenario(
        "leader_recovery",
        "a leader that hangs is replaced; another, cut off, comes back, finds itself fenced, heals as a backup, and "
        "leads again once it takes part, for its id is the first of its pool",
        "stop:target=leader:1,at=6,for=3; partition:target=leader:2,at=8,for=1.5; "
        "slow:target=leader:0,at=5,by=0.04,for=9,until=worker_healed*2",
        {"worker_evicted": 2, "leader_changed": 4, "worker_healed": 2},
        settings={"hang_limit_s": 1},
        bears={"worker_evicted": {"cause": Cause.SILENT}, "leader_changed": {"cause": Cause.JOINED}},
    ),
    Scenario(
        "all_backup_failure",
        "all backups of a stage die, then its leader: every stage goes back to the copy in another pool's memory",
        "kill:target=backups:1,at=10,phase=forward; kill:target=leader:1,at=10,phase=reduce",
        {"worker_evicted": 3, "fallback": 1},
        SIX_AS_2x3,
        settings={"checkpoint.memory.every_steps": 4},
        bears={"fallback": {"cause": Cause.KILLED, "source": "copy"}},
        never=(),
    ),
    Scenario(
        "pool_lost_without_copy",
        "a whole pool dies, and there is neither a copy nor a checkpoint: every stage begins again, to the same bits",
        "kill:target=worker:2+worker:3,at=6,phase=backward",
        {"worker_evicted": 2, "fallback": 1},
        settings={"checkpoint.enabled": False},
        bears={"fallback": {"cause": Cause.KILLED, "source": "start"}},
        never=(),
    ),
    Scenario(
        "too_few_left",
        "a whole pool dies and may not be restarted, and the others are fewer than the job may run with: it says so",
        "kill:target=worker:2+worker:3,at=6",
        {"fault_injected": 2},
        settings={"max_restarts": 0, "min_workers": 5},
        never=(),
        fails=Cause.QUORUM,
    ),
    Scenario(
        "network_partition",
        "two workers of two stages are cut off and come back, a third only loses its connection for a moment",
        "partition:target=worker:1+worker:3,at=6,for=1.5; disconnect:target=worker:5,at=7,for=0.5; "
        "slow:target=leader:0,at=5,by=0.04,for=9,until=worker_healed*2",
        {"fault_injected": 4, "worker_evicted": 2, "worker_healed": 2},
        bears={"worker_evicted": {"cause": Cause.SILENT}},
    ),
    Scenario(
        "death_in_forward",
        "the leader of the first stage dies in a forward pass",
        "kill:target=leader:0,at=6,phase=forward",
        LEADER_LOST,
    ),
    Scenario(
        "death_in_backward",
        "the leader of a middle stage dies in a backward pass",
        "kill:target=leader:1,at=6,phase=backward",
        LEADER_LOST,
    ),
    Scenario(
        "death_in_reduction",
        "the leader of the last stage dies when it begins to reduce, and another before the step is agreed on",
        "kill:target=leader:2,at=6,phase=reduce; kill:target=leader:0,at=9,phase=agree",
        {"worker_evicted": 2, "leader_changed": 2, "recovery_completed": 2},
    ),
    Scenario(
        "death_in_update",
        "the leader of a middle stage dies when the step is decided and not yet applied by it",
        "kill:target=leader:1,at=6,phase=update",
        LEADER_LOST,
    ),
    Scenario(
        "death_in_promotion",
        "a leader dies, and its successor while the others settle with it as their leader",
        "kill:target=leader:1,at=6,phase=backward; kill:target=leader:1,at=5,phase=settle",
        {"worker_evicted": 2, "leader_changed": 2, "recovery_completed": 1},
        SIX_AS_2x3,
        bears={"fault_injected": {"phase": "settle"}},
    ),
    Scenario(
        "death_in_heal",
        "a worker dies, and its next life while it heals",
        "kill:target=worker:3,at=6,phase=forward; kill:target=worker:3,at=5,phase=heal; "
        "slow:target=leader:0,at=5,by=0.04,for=8,until=worker_healed",
        {"fault_injected": 3, "worker_evicted": 1, "worker_healed": 1},
        bears={"fault_injected": {"phase": "heal"}},
    ),
)


def named(names: Iterable[str]) -> tuple[Scenario, ...]:
    """Scenarios with these names, in the order of the suite; all of them for no name.

    Raises: ConfigError for an unknown name; it names the nearest.
    """
    known = {scenario.name: scenario for scenario in SCENARIOS}
    wanted = set(names)
    for name in sorted(wanted - known.keys()):
        raise ConfigError(f"no scenario is called {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}")
    return tuple(s for s in SCENARIOS if not wanted or s.name in wanted)
