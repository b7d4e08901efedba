"""Who may say what to the coordinator: every message has its roles, and nobody speaks for somebody else."""

from __future__ import annotations

import pytest
from coordinator_harness import World, member, running

from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m
from everstep.protocol import roles
from everstep.protocol.coordinator import user_commands
from everstep.protocol.coordinator.coordinator import FROM_AGENTS, FROM_ANYBODY, FROM_WORKERS
from everstep.protocol.coordinator.types import Close, Connected, Received, Send

EXITED = {"reason": "killed", "died_unix_ns": 1}


def test_every_message_that_the_coordinator_hears_has_its_roles() -> None:
    heard = {*FROM_ANYBODY, *FROM_AGENTS, *FROM_WORKERS, m.StoreGet, m.Ping, m.AgentNotice, m.Goodbye}
    heard |= {m.HostPlace, m.FilePieces, m.HostTold, m.ClaimFault, m.StandbyHello, m.FilesHeld}
    assert heard == set(roles.SAYS)
    assert set(roles.SAYS) < set(m.KINDS)
    assert set().union(*roles.SAYS.values()) == roles.CONTROL_ROLES
    assert set(roles.COMMANDS) == {*user_commands._ACTS, *user_commands._APART, "logs", "about"}, (
        "the last is answered before it"
    )


def connected(world: World, role: str, who: str) -> str:
    world.handle(Connected("x", role, who))
    return "x"


def verdict(world: World, role: str, who: str, message: m.AnyMessage) -> str:
    """The reason for which the connection is closed, "" if it is not."""
    effects = world.handle(Received(connected(world, role, who), message))
    closed = [effect for effect in effects if isinstance(effect, Close) and effect.connection == "x"]
    assert all(effect.foul for effect in closed)
    return closed[0].reason if closed else ""


def test_a_worker_speaks_for_its_own_life_alone() -> None:
    world = running()
    fault = m.PeerFault(worker_id=1, incarnation=0, generation=1, accused=[0], reason="lies")
    assert "expected worker '2.0' to speak for itself, it spoke as '1.0'" in verdict(world, "worker", "2.0", fault)
    hello = m.WorkerHello(member=member(1), step=0)
    assert "it spoke as '1.0'" in verdict(world, "worker", "1.1", hello)
    assert "from agent, got it from the role 'worker'" in verdict(
        world, "worker", "1.0", m.WorkerExited(agent_id="a1", worker_id=2, incarnation=0, **EXITED)
    )
    assert world.plan.generation == 1 and world.plan.worker_ids == (0, 1, 2)
    assert verdict(world, "worker", "1.0", hello) == ""


LIFE = m.WorkerLife(worker_id=0, incarnation=0, pid=4)
OWN = m.WorkerLife(worker_id=2, incarnation=0, pid=1020)
HUNG = m.WorkerPulse(worker_id=0, incarnation=0, step=1, phase="load", still_ms=10**9, samples_per_s=0.0)


def test_an_agent_speaks_for_its_own_workers_alone() -> None:
    world = running(elsewhere=(2,))
    for i in (0, 1):
        foreign = [
            m.WorkerExited(agent_id="a2", worker_id=i, incarnation=0, **EXITED),
            m.WorkerStarted(agent_id="a2", worker=m.WorkerLife(worker_id=i, incarnation=0, pid=4)),
        ]
        for message in foreign:
            assert f"about worker {i}.0 from its own agent 'a1'" in verdict(world, "agent", "a2", message)
    assert "it spoke as 'a1'" in verdict(world, "agent", "a2", m.HostFailed(agent_id="a1", reason="lies"))
    assert world.plan.generation == 1 and world.plan.worker_ids == (0, 1, 2)
    own = m.WorkerExited(agent_id="a2", worker_id=2, incarnation=0, **EXITED)
    world.say("a2", own)
    assert world.plan.worker_ids == (0, 1)


def test_until_its_own_agent_is_back_no_other_host_speaks_for_a_worker() -> None:
    """A coordinator without a journal learns from the worker alone where it runs."""
    before = running(elsewhere=(2,))
    world = before.restart([])
    world.agent(2, name="a2", host="a2")
    world.hello(0, plan=before.plan, step=5)
    for message in (
        m.WorkerExited(agent_id="a2", worker_id=0, incarnation=0, **EXITED),
        m.WorkerStarted(agent_id="a2", worker=LIFE),
    ):
        assert "about worker 0.0 from the agent of its host 'a1'" in verdict(world, "agent", "a2", message)
    for name in ("a2", "a3"):
        named = m.AgentHello(agent_id=name, host="a1", workers=[LIFE], slots=1)
        reason = f"from an agent that has its host's name, {name!r} named host 'a1'"
        assert reason in verdict(world, "agent", name, named)
    lists_others(world)
    assert "a1" not in world.coordinator.job.agents.known
    world.agent(0, 1)
    assert "a1" not in world.closed and "worker_evicted" not in world.kinds()
    world.exited(0)
    assert world.report("worker_evicted")["worker_id"] == 0


def lists_others(world: World) -> None:
    """Agent a2 says hello and sends a heartbeat, each with worker 0 of another host beside its own."""
    pulse = m.WorkerPulse(worker_id=2, incarnation=0, step=7, phase="load", still_ms=0, samples_per_s=0.0)
    hello = m.AgentHello(agent_id="a2", host="a2", workers=[LIFE, OWN], slots=1)
    assert verdict(world, "agent", "a2", hello) == ""
    for seq in (1, 2):
        world.say("x", m.Heartbeat(agent_id="a2", seq=seq, rtt_ms=0.0, workers=[HUNG, pulse]))
    job = world.coordinator.job
    assert "x" not in world.closed[-1:] and world.last(m.KillWorker) is None
    assert job.agents.known["a2"].lives == {WorkerKey(2, 0)} and job.membership.workers[2].step == 7
    assert job.membership.workers[0].agent_id != "a2" and not {"worker_suspected", "worker_evicted"} & set(
        world.kinds()
    )


def test_in_an_agents_lists_workers_of_others_are_passed_over() -> None:
    world = running(elsewhere=(2,))
    lists_others(world)
    world.say("x", m.Heartbeat(agent_id="a2", seq=3, rtt_ms=0.0, workers=[HUNG]))
    world.say("x", m.WorkerExited(agent_id="a2", worker_id=2, incarnation=0, **EXITED))
    assert world.plan.worker_ids == (0, 1)


@pytest.mark.parametrize("role", roles.PEOPLE)
def test_people_ask_for_what_their_token_is_for(role: str) -> None:
    for name, needed in roles.COMMANDS.items():
        world = running()
        effects = world.handle(Received(connected(world, role, "me"), m.Command(request=1, name=name, args={})))
        replies = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.CommandReply)]
        closed = any(isinstance(e, Close) for e in effects)
        allowed = needed in (role, roles.READ)
        assert closed is not allowed
        if not allowed:
            assert (
                replies[0].error
                == f"expected the token for {needed!r} with the command {name!r}, got that for {role!r}"
            )
            assert world.coordinator.job.progress.ended is None
        told = [r.fields for r in world.reports if r.kind == "commanded"]
        if needed == roles.READ:
            assert told == []
        else:
            assert [(t["command"], t["role"]) for t in told] == [(name, role)]
            assert (told[0]["cause"] == "refused") is not allowed


def test_what_only_the_coordinator_says_comes_from_nobody() -> None:
    world = running()
    for role in sorted(roles.CONTROL_ROLES):
        assert "nobody but the coordinator" in verdict(world, role, "a1", m.Pong(seq=1))


def test_the_jobs_own_process_may_end_and_save_the_job_and_look_at_it() -> None:
    for name, needed in roles.COMMANDS.items():
        refused = roles.command_refusal(roles.JOB, name)
        assert bool(refused) == (needed != roles.READ and name not in ("stop", "checkpoint")), name
