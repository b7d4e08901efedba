"""What the head has to do with files besides: pages, claims, and logs of hosts that keep them."""

from __future__ import annotations

from pathlib import Path

from everstep.protocol import messages as m
from everstep.runtime.files.claim_files import forget_claims
from everstep.runtime.files.head_files import HeadFiles


def test_all_agents_hear_where_each_host_keeps_its_files_and_the_pages_that_they_do_not_see(tmp_path: Path) -> None:
    files = HeadFiles(tmp_path)
    here = m.HostPlace(agent_id="a", apart=False, disk="job")
    there = m.HostPlace(agent_id="b", apart=True, disk="host b", address="b:1")
    assert files.take("c1", here) == [("c1", m.HostsThere(places={"a": here}))]
    both = m.HostsThere(places={"a": here, "b": there})
    assert files.take("c2", there) == [("c1", both), ("c2", both)]
    assert files.changed_pages() == []
    (tmp_path / "rehearsed.json").write_text("{}")
    page = m.JobPage(name="rehearsed.json", text="{}")
    assert files.changed_pages() == [("c2", page)] and files.changed_pages() == []
    assert (files.take("c2", there) or [])[-1] == ("c2", page), "it is a new connection"
    assert files.gone("c2") == [("c1", m.HostsThere(places={"a": here}))] and files.apart == []


def test_a_fault_is_claimed_once_in_a_job(tmp_path: Path) -> None:
    files = HeadFiles(tmp_path)

    def claim(name: str, text: str) -> list[tuple[str, m.AnyMessage]] | None:
        return files.take("w", m.ClaimFault(worker_id=1, incarnation=0, request=4, name=name, text=text))

    assert claim("0", "[1,2]") == [("w", m.FaultClaimed(request=4, first=True, text="[1,2]"))]
    assert claim("0", "[3]") == [("w", m.FaultClaimed(request=4, first=False, text="[1,2]"))]
    assert HeadFiles(tmp_path).take("w", m.ClaimFault(worker_id=1, incarnation=0, request=5, name="0", text="")) == [
        ("w", m.FaultClaimed(request=5, first=False, text="[1,2]"))
    ], "another coordinator knows it too"
    for name in ("../x", "", "a", "0/1"):
        assert claim(name, "") == []
    assert sorted(path.name for path in (tmp_path / "chaos").iterdir()) == ["0"]
    forget_claims(tmp_path)
    assert claim("0", "[3]") == [("w", m.FaultClaimed(request=4, first=True, text="[3]"))], "it is another fault"


def test_who_asks_for_logs_is_answered_by_the_host_or_told_that_it_is_gone(tmp_path: Path) -> None:
    files = HeadFiles(tmp_path)
    ask = m.Command(request=7, name="logs", args={"host": "host2", "name": "worker-1.jsonl", "start": 30})
    refused = files.take("p", ask)
    assert refused is not None and isinstance(refused[0][1], m.CommandReply) and "everstep hosts" in refused[0][1].error
    files.take("a", m.HostPlace(agent_id="host2", apart=True, disk="host host2"))
    assert files.take("p", ask) == [("a", m.HostAsk(request=1, name="worker-1.jsonl", start=30))]
    assert files.take("b", m.HostTold(agent_id="host3", request=2)) == [], "nobody asked"
    answer = m.HostTold(agent_id="host2", request=1, logs={"worker-1.jsonl": (5, 31)}, data=b"x")
    result = {"logs": {"worker-1.jsonl": (5, 31)}, "data": b"x"}
    assert files.take("a", answer) == [("p", m.CommandReply(request=7, ok=True, error="", result=result))]
    files.take("p", ask)
    gone = files.gone("a")
    assert [name for name, _ in gone] == ["p"] and not getattr(gone[0][1], "ok", True)
    assert files.take("p", m.Command(request=8, name="status", args={})) is None
