"""Which roles may send which messages to the coordinator. Pure.

Each role has a token of its own (`runtime.handshake.role_token`), so a role is a permission that can be handed out
alone. Agents and the job's process have the job's token, from which all others are made; a worker has its own life's
token and the peers'.
"""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m
from everstep.protocol.following import PlanShown, StatesAlike
from everstep.protocol.messages_base import CellSought

AGENT = "agent"
WORKER = "worker"
JOB = "job"
READ = "read"
OPERATE = "operate"
INJECT = "inject"

PEOPLE = (READ, OPERATE, INJECT)
"""Roles of people and their programs; their tokens are in the run directory."""

CONTROL_ROLES = frozenset({AGENT, WORKER, JOB, *PEOPLE})

COMMANDS = {
    "status": READ,
    "hosts": READ,
    "about": READ,
    "logs": READ,
    "scale": OPERATE,
    "drain": OPERATE,
    "checkpoint": OPERATE,
    "stop": OPERATE,
    "profile": OPERATE,
    "chaos": INJECT,
}
"""The role that a command needs. A role that may send any command may also send those of `READ`."""

_JOBS_OWN = frozenset({"stop", "checkpoint"})

SAYS: dict[type[m.AnyMessage], frozenset[str]] = {
    **dict.fromkeys(
        (
            *(m.AgentHello, m.Heartbeat, m.WorkerStarted, m.WorkerExited, m.SlotLost, m.HostFailed, m.HostLeaving),
            *(m.HostRefused, m.HostsProbed, m.HostEmptied, m.AgentNotice),
        ),
        frozenset({AGENT}),
    ),
    **dict.fromkeys((m.HostPlace, m.FilePieces, m.HostTold), frozenset({AGENT})),
    **dict.fromkeys(
        (
            *(m.WorkerHello, m.WorkerHealed, m.HealFailed, m.GenerationEntered, m.Progress, m.PeerFault),
            *(m.WorkerFailed, m.WorkerDone, m.SettleAgain, m.Saved, m.Profiled, m.StrikeDue, m.StoreSet, m.StoreGet),
            *(m.ClaimFault, m.Imported, m.Divided, m.LoopLeft, CellSought, PlanShown, StatesAlike),
        ),
        frozenset({WORKER}),
    ),
    **dict.fromkeys((m.JobHello, m.Ping, m.Goodbye, m.StandbyHello, m.FilesHeld), frozenset({JOB})),
    m.Command: frozenset({JOB, *PEOPLE}),
}
"""The roles that may send a message. Messages that are missing here come from the coordinator."""


def refusal(role: str, who: str | None, message: m.AnyMessage) -> str:
    """Why a client with this role and name may not send this message; "" if it may. who: an agent's id, or a
    worker's life as `WorkerKey` writes it; None if names are not proven."""
    kind = type(message)
    if role not in SAYS.get(kind, ()):
        allowed = " or ".join(sorted(SAYS.get(kind, ()))) or "nobody but the coordinator"
        return f"expected {kind.__name__} from {allowed}, got it from the role {role!r}"
    said = _speaker(message)
    if who is not None and said is not None and said != who:
        return f"expected {role} {who!r} to speak for itself, it spoke as {said!r}"
    return ""


def command_refusal(role: str, name: str) -> str:
    """Why this role may not send this command, in one line for people; "" if it may."""
    needed = COMMANDS.get(name, OPERATE)
    if needed in (role, READ) or (role == JOB and name in _JOBS_OWN):
        return ""
    return f"expected the token for {needed!r} with the command {name!r}, got that for {role!r}"


def _speaker(message: m.AnyMessage) -> str | None:
    """The agent or worker that a message speaks for; None if none in particular."""
    if isinstance(message, m.FromAgent):
        return message.agent_id
    if isinstance(message, m.WorkerHello):
        return str(WorkerKey(message.member.worker_id, message.member.incarnation))
    if isinstance(message, m.OfLife):
        return str(WorkerKey(message.worker_id, message.incarnation))
    return None
