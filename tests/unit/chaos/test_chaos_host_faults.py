"""Faults of hosts and links: how they are said, when a worker says that one is due, and what became of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.base.cause import Cause
from everstep.base.errors import ConfigError
from everstep.base.plan import Member, Plan, Seat, WorkerKey
from everstep.base.strikes import Strike
from everstep.chaos.fault_account import account
from everstep.chaos.inject import Injector
from everstep.chaos.spec import parse, parse_now, strikes_of
from everstep.protocol.messages import StrikeNow
from everstep.runtime.host import packet_faults
from everstep.runtime.host.admission import cannot_strike

ALL = (
    "kill:target=host:b,at=3; cut:target=link:a-b,at=4,for=2; oneway:target=link:node-1-node-2,at=5,for=1,phase=reduce;"
    " drop:target=host:10.0.0.2,at=6,for=1,p=0.25; slow:target=link:a-b,at=7,for=1,by=0.05;"
    " narrow:target=host:b,at=8,for=2,mbit=10"
)


def test_what_is_said_is_what_is_meant() -> None:
    faults = parse(ALL)
    assert parse("; ".join(map(str, faults))) == faults
    kill, cut, oneway, drop, slow, narrow = strikes_of((*faults, *parse("kill:target=worker:1,at=2")))
    assert (kill.kind, kill.target, kill.link, kill.means, kill.index) == ("kill", "b", False, "", 0)
    assert (cut.target, cut.link, cut.for_s, cut.means) == ("a-b", True, 2.0, "drop")
    assert oneway.ends(("node-1", "node-2", "node")) == ("node-1", "node-2") and oneway.ends(("node-1",)) == ()
    itself = strikes_of(parse("cut:target=link:a-a,at=4,for=2"))[0]
    assert itself.ends(("a", "b")) == (), "a host with itself is no link"
    assert (drop.share, slow.by_s, slow.means, narrow.mbit, narrow.means) == (0.25, 0.05, "delay", 10.0, "rate")
    assert cut.acts("a") and not cut.acts("b") and slow.acts("a") and slow.acts("b") and not slow.acts("c")
    for strike in (kill, cut, oneway, drop, slow, narrow):
        assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(vars(strike))), Strike) == strike
    request = parse_now("cut:target=host:b,for=3").request()
    assert request["strike"]["kind"] == "cut" and "workers" not in request


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cut:target=worker:1,at=2,for=1", "kinds for a worker are kill, stop, raise"),
        (
            "raise:target=host:b,at=2",
            "kinds for a host are kill, slow, cut, oneway, drop, narrow; raise is for a worker",
        ),
        (
            "kill:target=link:a-b,at=2",
            "kinds for a link are slow, cut, oneway, drop, narrow; kill is for a host or a worker",
        ),
        ("cut:target=link:ab,at=2,for=1", "a link is between two hosts, link:NAME-NAME"),
        ("cut:target=link:a-b,at=2", "it must say for=SECONDS"),
        ("drop:target=link:a-b,at=2,for=1", "it must say p=SHARE"),
        ("drop:target=link:a-b,at=2,for=1,p=0", "p is a share of packets"),
        ("drop:target=link:a-b,at=2,for=1,p=1.5", "p is a share of packets"),
        ("narrow:target=host:b,at=2,for=1,mbit=0", "mbit must be greater than 0"),
        ("slow:target=host:b,at=2,for=1", "it must say by=SECONDS, by which each packet is late"),
        ("slow:target=worker:1,at=2,for=1", "it must say by=SECONDS, by which each forward pass takes longer"),
        ("cut:target=host:a+host:b,at=2,for=1", "target 'host:a' stands alone: several with + are workers only"),
        ("kill:target=worker:1+coordinator,at=2", "target 'coordinator' stands alone: several with + are workers only"),
        ("slow:target=host:b,at=2,by=1", "it must say for=SECONDS"),
        ("kill:target=host:b,at=2,mbit=4", "mbit=NUMBER belongs to narrow, not to kill"),
        ("kill:target=host:,at=2", "unknown target 'host:'"),
        ("kill:target=host:a/b,at=2", "host:NAME"),
    ],
)
def test_what_makes_no_sense_is_one_line(spec: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(spec)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_every_worker_says_once_that_one_is_due(tmp_path: Path) -> None:
    told: list[tuple[int, int, str, int]] = []
    plan = Plan(4, "r", (Member(1, 0, "h", 1),), (Seat(1, 0, "active", (0,)),), 1)
    injector = Injector(parse(ALL), tmp_path, WorkerKey(1, 0), lambda kind, **fields: None)
    injector.strike_due = lambda index, step, phase, plan: told.append((index, step, phase, plan.generation))
    for step in (1, 2, 3, 4, 5):
        for phase in ("load", "forward", "reduce"):
            injector.at(step, phase, plan)
    assert told == [(0, 3, "load", 4), (1, 4, "load", 4), (2, 5, "reduce", 4)]
    assert not (tmp_path / "chaos").exists(), "the coordinator knows which have struck"


def test_one_of_the_coordinator_is_asked_for_at_once_or_for_when_workers_say_so() -> None:
    for text, key in (
        ("kill:target=coordinator", "strike"),
        ("throttle:target=coordinator,for=2", "strike"),
        ("stop:target=coordinator,at=3,for=2", "due"),
        ("kill:target=coordinator,phase=reduce", "due"),
    ):
        request = parse_now(text).request()
        assert set(request) == {"fault", key} and request["fault"] == text
        assert request[key]["coordinator"] and Strike(**request[key]).possible
    scripted = strikes_of(parse("kill:target=coordinator,at=2; random:p=0.5; raise:at=3; stop:target=coordinator,at=4"))
    assert [(s.kind, s.index, s.coordinator) for s in scripted] == [
        ("kill", 0, True),
        ("kill", 1, True),
        ("stop", 3, True),
    ]
    assert not any(s.acts("coordinator") or s.means for s in scripted), "no host needs anything for them"


def test_who_cannot_strike_says_so_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    strikes = strikes_of(parse(ALL))
    monkeypatch.setattr(packet_faults.os, "geteuid", lambda: 1000)
    words = cannot_strike(strikes, ("a", "10.0.0.1"))
    assert (
        words.startswith("chaos fault 'cut:target=link:a-b,at=4,for=2' cannot strike here: only root")
        and "\n" not in words
    )
    assert cannot_strike(strikes, ("c", "10.0.0.3")) == "", "nobody asks it to"
    assert cannot_strike(strikes_of(parse("kill:target=host:a,at=1")), ("a",)) == "", "its own processes it may kill"
    monkeypatch.setattr(packet_faults.os, "geteuid", lambda: 0)
    monkeypatch.setattr(packet_faults.shutil, "which", lambda name: None)
    assert "iproute2" in cannot_strike(strikes, ("a", "10.0.0.1"))


def test_the_filters_that_lose_packets() -> None:
    both = packet_faults.drops("eth0", 7, "10.77.0.2", one_way=False, share=1.0)
    to = "4,32 0 0 4293918736,21 0 1 172818434,6 0 0 2,6 0 0 4294967295"
    come = to.replace("4293918736", "4293918732")
    assert [command[-1] for command in both[1:]] == [to, come]
    assert [command[5] for command in both[1:]] == ["egress", "ingress"] and both[1][7] == "ip"
    all_of_it = packet_faults.drops("eth0", 7, "", one_way=True, share=1.0)
    assert len(all_of_it) == 2 and all_of_it[1][-1] == "2,6 0 0 2,6 0 0 4294967295" and all_of_it[1][7] == "all"
    half = packet_faults.drops("eth0", 7, "10.77.0.2", one_way=True, share=0.5)[1][-1].split(",")
    assert half[0] == "6" and half[2] == "21 0 3 172818434" and half[3] == "32 0 0 4294963256"
    assert half[4] == "53 1 0 2147483647", "from there on it passes"
    narrow = packet_faults.narrows("eth0", "10.77.0.2", mbit=8.0)
    assert narrow[1][-2:] == ["rate", "8mbit"] and narrow[2][-2:] == ["flowid", "e57:1"]
    assert len(packet_faults.narrows("eth0", "", mbit=8.0)) == 2


def test_the_filters_of_a_peer_with_an_ipv6_address() -> None:
    to, come = packet_faults.drops("eth0", 7, "fd00:77::2", one_way=False, share=1.0)[1:]
    words = [int(code.split()[3]) - 0xFFF00000 for code in to[-1].split(",")[1:9:2]]
    assert words == [24, 28, 32, 36] and to[7] == come[7] == "ipv6"
    assert [code.split()[2:] for code in to[-1].split(",")[2:10:2]] == [
        ["7", str(0xFD000077)],
        ["5", "0"],
        ["3", "0"],
        ["1", "2"],
    ]
    assert [int(code.split()[3]) - 0xFFF00000 for code in come[-1].split(",")[1:9:2]] == [8, 12, 16, 20]
    assert "ipv6" in packet_faults.narrows("eth0", "fd00:77::2", mbit=8.0)[2]


def test_the_filter_that_has_packets_take_a_detour() -> None:
    up, place, to = packet_faults.delays("eth0", 7, "10.77.0.2", "evs0", 9000)
    assert " ".join(up) == "ip link set dev evs0 mtu 9000 txqueuelen 10000 up" and place[-1] == "clsact"
    marked, peer = "32 0 0 4294963220,21 3 0 1702261620", "32 0 0 4293918736,21 0 1 172818434"
    assert to[-8:-6] == ["bytecode", f"6,{marked},{peer},6 0 0 4294967295,6 0 0 0"], "those that come back pass"
    assert " ".join(to[-6:]) == "action mirred egress redirect dev evs0" and to[5:8] == ["egress", "protocol", "ip"]
    everybody = packet_faults.delays("eth0", 7, "", "evs0", 1500)[2]
    assert everybody[7] == "all" and everybody[-7].startswith("4,32 0 0 4294963220,21 1 0 1702261620,6 ")


SHOWN = """filter protocol ip pref 6 bpf chain 0
filter protocol ip pref 6 bpf chain 0 handle 0x1 not_in_hw bytecode '4,32 0 0 4294963220,21 1 0 {},6 0 0 0,6 0 0 0'
\taction order 1: mirred (Egress Redirect to device {}) stolen
\tindex 1 ref 1 bind 1

filter protocol all pref 7 bpf chain 0
filter protocol all pref 7 bpf chain 0 handle 0x1 direct-action not_in_hw bytecode '2,6 0 0 2,6 0 0 4294967295'
"""


@pytest.mark.parametrize(
    ("mark", "to", "found"), [(0x65767374, "*", [6]), (0x65767374, "evs0", []), (7, "*", []), (0x65767374, "*x", [])]
)
def test_redirections_to_nowhere_are_known_by_their_mark(mark: int, to: str, found: list[int]) -> None:
    assert packet_faults.astray(SHOWN.format(mark, to)) == found and packet_faults.astray("") == []


def test_a_link_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"expected a link to other hosts, got 127\.0\.0\.1 on lo"):
        packet_faults.harm(StrikeNow(number=1, kind="cut", for_s=1.0), "127.0.0.1")
    with pytest.raises(ConfigError, match="expected the address of another host, got 'host2'"):
        packet_faults.drops("eth0", 1, "host2", one_way=True, share=1.0)


def test_what_became_of_them() -> None:
    def event(ns: int, kind: str, **fields: object) -> dict[str, object]:
        return {"time_unix_ns": ns * 1_000_000_000, "kind": kind, **fields}

    found = account(
        [
            event(1, "fault_injected", fault="cut", target="host:b", step=3, phase="load", cause=Cause.INJECTED),
            event(3, "worker_evicted", worker_id=2, incarnation=0, cause=Cause.HOST_LOST),
            event(3, "worker_evicted", worker_id=3, incarnation=0, cause=Cause.HOST_LOST),
            event(4, "step_committed", step=3),
            event(5, "fault_injected", fault="narrow", target="link:a-b", step=4, phase="load", cause=Cause.INJECTED),
            event(6, "fault_injected", fault="drop", target="link:a-b", step=5, phase="load", cause=Cause.INJECTED),
            event(7, "step_committed", step=5),
        ]
    )
    assert [(one.outcome, one.recovery_s) for one in found.hits] == [
        ("evicted worker 2, 3", 3.0),
        ("slowed down", None),
        ("went on", None),
    ]


def test_a_host_without_such_interfaces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet_faults, "_TUN", "/dev/null")
    with pytest.raises(ConfigError, match=r"^/dev/null: Inappropriate ioctl for device$"):
        packet_faults.Detour()
    monkeypatch.setattr(packet_faults, "_TUN", "/dev/net/no such")
    with pytest.raises(ConfigError, match=r"^/dev/net/no such: No such file or directory$"):
        packet_faults.Detour()
