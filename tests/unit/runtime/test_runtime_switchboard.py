"""Who hears what, of a job's process and the agents that have joined it."""

from __future__ import annotations

import msgspec

from everstep.base.cause import Cause
from everstep.base.config import load_config, to_dict
from everstep.protocol import messages as m
from everstep.runtime.lead.coordinator_main import Switchboard
from everstep.runtime.link.head_facts import FULL_PACKETS_BYTES, heard_of

FACTS = m.JobFacts(task="t", argv=[], config={}, run_dir="/r", coordinator_file="/r/c", job_pid=1, machine="m")


def hello(agent_id: str, process: str = "17-a") -> m.AgentHello:
    about = {"address": "10.0.0.2"}
    return m.AgentHello(agent_id=agent_id, host=agent_id, workers=[], slots=0, process=process, about=about)


def test_agents_are_told_of_the_job_and_the_job_of_agents() -> None:
    board = Switchboard(FACTS)
    assert board.take("j", m.JobHello()) == ([("j", m.AgentCount(agent_ids=[]))], True)
    led = Switchboard(msgspec.structs.replace(FACTS, place="word")).take("j", m.JobHello())
    assert led == ([("j", m.AgentCount(agent_ids=[], place="word"))], True), "it may be in another directory"
    assert board.take("c1", hello("a")) == ([("c1", FACTS), ("j", m.AgentCount(agent_ids=["a"]))], True)
    assert board.take("j2", m.JobHello()) == ([("j2", m.AgentCount(agent_ids=["a"]))], True)
    assert board.gone("j") == []
    assert board.gone("c1") == [("j2", m.AgentCount(agent_ids=[]))]


def test_notices_and_pings_are_nothing_for_the_coordinator() -> None:
    board = Switchboard(FACTS)
    board.take("j", m.JobHello())
    notice = m.AgentNotice(agent_id="a", kind="worker_started", fields={"worker_id": 1})
    assert board.take("c1", notice) == ([("j", notice)], False)
    assert board.take("j", m.Ping(seq=4)) == ([("j", m.Pong(seq=4))], False)
    assert board.take("w", m.StoreGet(request=1, generation=1, keys=[])) == ([], True)


def test_what_a_host_asks_before_it_joins_is_answered_without_the_coordinator() -> None:
    config = to_dict(load_config([]))
    facts = m.JobFacts(
        **{f: getattr(FACTS, f) for f in FACTS.__struct_fields__} | {"config": config, "versions": {"torch": "1"}}
    )
    asked = m.Command(request=7, name="about", args={"padding": "x" * 100_000})
    [(to, reply)], for_coordinator = Switchboard(facts, lambda: 5_000_000_000).take("p", asked)
    assert to == "p" and not for_coordinator and isinstance(reply, m.CommandReply) and reply.request == 7
    assert len(reply.result["padding"]) == FULL_PACKETS_BYTES, "nobody gets back more than that"
    heard = heard_of(reply, 1_000_000_000, 3_000_000_000)
    assert (heard.rtt_s, heard.ahead_s, heard.versions) == (2.0, 3.0, {"torch": "1"}) and heard.mtu > 0


def test_two_agents_of_one_name_are_told_apart_from_one_that_comes_back() -> None:
    board = Switchboard(FACTS)
    board.take("c1", hello("a"))
    assert board.take("c2", hello("a"))[1], "the same process, whose old connection is not known to be gone"
    sends, for_coordinator = board.take("c3", hello("a", "18-b"))
    assert not for_coordinator and isinstance(sends[0][1], m.AgentRefused)
    assert "at 10.0.0.2, process 17" in sends[0][1].reason and "--host-name" in sends[0][1].reason
    assert board.gone("c3") == []
    board.gone("c1")
    board.gone("c2")
    assert board.take("c4", hello("a", "18-b"))[1]


def test_notices_wait_for_a_job_that_is_away() -> None:
    board = Switchboard(FACTS)
    notices = [m.AgentNotice(agent_id="a", kind="worker_started", fields={"worker_id": i}) for i in range(2)]
    for notice in notices:
        assert board.take("c1", notice) == ([], False)
    assert board.take("j", m.JobHello())[0] == [("j", m.AgentCount(agent_ids=[])), *(("j", n) for n in notices)]
    board.gone("j")
    assert board.take("j2", m.JobHello())[0] == [("j2", m.AgentCount(agent_ids=[]))], "once"


def test_a_goodbye_reaches_all_agents_before_the_job_hears_that_it_has() -> None:
    board = Switchboard(FACTS)
    board.take("a2", hello("b"))
    board.take("a1", hello("a"))
    board.take("j", m.JobHello())
    said = m.Goodbye(cause=Cause.INTERRUPTED, reason="the job's process has ended")
    assert board.take("j", said) == ([("a1", said), ("a2", said), ("j", said)], False)
