"""P3 and P6 for hosts: what one life of a coordinator orders of agents, and grants to people, seen from outside; and
faults of the script, which strike once in a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from everstep.base.plan import WorkerKey
from everstep.base.strikes import Strike
from everstep.protocol import messages as wire
from everstep.protocol.coordinator.job_state import JobState
from everstep.protocol.coordinator.types import (
    Close,
    CoordinatorEffect,
    CoordinatorEvent,
    Disconnected,
    Persist,
    Received,
    Send,
)
from everstep.sim.checks import SimRecords
from everstep.sim.promises import PromiseBroken, require


def ended_doubt(event: CoordinatorEvent, job: JobState) -> list[Any]:
    """The generation in which this event has ended a doubt, if it has: for the coordinator's effects, after those that
    the journal needs."""
    said = event.message if isinstance(event, Received) else None
    plan, open_still = job.agreement.plan, job.progress.sound >= 0
    here = isinstance(said, wire.GenerationEntered) and said.generation == plan.generation
    return [plan.generation] if here and plan.sound >= 0 and not open_still else []


def tells_of_doubt(event: CoordinatorEvent) -> bool:
    """Whether a worker reports with this event that states are in doubt: it may not have settled behind them yet."""
    said = event.message if isinstance(event, Received) else None
    return isinstance(said, wire.SettleAgain | wire.WorkerFailed) and said.sound >= 0


class Orders:
    """A slot is wanted of one host, of none that was drained, and a drained host is let go when nothing runs there."""

    def __init__(self, running: Callable[[str], list[WorkerKey]], stages: int) -> None:
        """running: live workers of an agent, by its name. stages: of the job."""
        self._running, self._stages = running, stages
        self._agents: dict[str, str] = {}  # name, by its newest connection
        self._told: dict[str, set[int]] = {}  # slots that an agent was told to keep filled, by its name
        self._drained: dict[str, set[int]] = {}  # slots that may still be wanted of a drained agent, by its name
        self._asked: dict[str, wire.Command] = {}  # command, by connection
        self._newest = (-1, 0)  # generation and members of the newest plan
        self._refused = ""  # connection over which something came that may not

    def refuses(self, connection: str) -> None:
        """What comes next over this connection must not; "": it may."""
        self._refused = connection

    def heard(self, event: CoordinatorEvent) -> None:
        match event:
            case Disconnected(connection=name):
                self._over(name)
            case Received(connection=name, message=wire.AgentHello() as hello):
                for earlier in [one for one, agent_id in self._agents.items() if agent_id == hello.agent_id]:
                    self._over(earlier)
                self._agents[name] = hello.agent_id
                if not hello.workers:  # a new process, or one that has nothing left
                    self._drained.pop(hello.agent_id, None)
            case Received(message=wire.WorkerExited() as left):
                if all(key.worker_id != left.worker_id for key in self._running(left.agent_id)):
                    self._drained.get(left.agent_id, set()).discard(left.worker_id)
            case Received(connection=name, message=wire.Command() as command):
                self._asked[name] = command

    def said(self, effects: Collection[CoordinatorEffect]) -> None:
        refused, self._refused = self._refused, ""
        if refused and not any(isinstance(one, Close) and one.connection == refused for one in effects):
            raise PromiseBroken(f"P7: what may not come over {refused} came, and did not end it: {effects}")
        for effect in effects:
            match effect:
                case Close(connection=name):
                    self._over(name)
                case Send(connection=name, message=wire.SetSlots(worker_ids=ids)) if name in self._agents:
                    self._wants(self._agents[name], set(ids))
                case Send(connection=name, message=wire.HostDismissed()):
                    left = self._running(self._agents.get(name, ""))
                    require(not left, "P3", f"{self._agents.get(name)} is to leave while {left} run there")
                case Persist(entry={"kind": "plan", "plan": plan}):  # nobody may be left to whom it is sent
                    self._newest = plan["generation"], len(plan["members"])
                case Send(message=wire.PlanNow(plan=plan)):
                    self._newest = max(self._newest, (plan.generation, len(plan.members)))
                case Send(connection=name, message=wire.CommandReply(ok=True, result=result)) if name in self._asked:
                    self._granted(self._asked[name], result)

    def _over(self, connection: str) -> None:
        """A connection has ended: what its agent does next is not known until it is back."""
        self._told.pop(self._agents.pop(connection, ""), None)
        self._asked.pop(connection, None)

    def _wants(self, agent: str, ids: set[int]) -> None:
        wanted = ids - self._drained.get(agent, ids)
        require(not wanted, "P3", f"slots {sorted(wanted)} are wanted of {agent}, which was drained")
        self._told[agent] = ids
        twice = sorted(i for other, theirs in self._told.items() if other != agent for i in theirs & ids)
        require(not twice, "P3", f"slots {twice} are wanted of two hosts: {self._told}")

    def _granted(self, command: wire.Command, result: dict[str, object]) -> None:
        workers, least = result.get("workers"), min(self._stages, self._newest[1])
        few = command.name in ("scale", "drain") and isinstance(workers, int) and workers < least
        require(not few, "P3", f"{workers} workers were granted by {command}, of {least} stages")
        if command.name == "drain" and "host" in command.args:
            host = str(command.args["host"])
            self._drained[host] = set(self._told.get(host, ()))


STRIKES = (
    Strike("the first host is cut off", "cut", "host0", for_s=0.1, index=0),
    Strike("the first two hosts are cut off from each other", "cut", "host0-host1", link=True, for_s=0.1, index=1),
)
"""Faults of the script, which workers report when they are due."""


class ScriptedStrikes:
    """Each fault of the script strikes once, whoever reports it, in whichever life of the coordinator; unless the
    journal has lost that."""

    def __init__(self, records: SimRecords) -> None:
        self._records = records
        self._targets: set[str] = set()

    def reported(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "fault_injected" and fields["phase"] and fields["target"] != "coordinator":
            twice = fields["target"] in self._targets and not self._records.forgetful
            require(not twice, "P2", f"the script's fault strikes a second time: {fields}")
            self._targets.add(fields["target"])

    def clear(self) -> None:
        self._targets.clear()
