"""Lease and journal in a real etcd of three members."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from etcd_members import LIMIT_S, EtcdMembers, etcd_there
from everstep.base.errors import NoHead, ProtocolError
from everstep.base.etcd_address import EtcdAddress
from everstep.protocol.lease.requests import (
    Append,
    Appended,
    Campaign,
    Claim,
    Compact,
    CompactPart,
    Depose,
    Fenced,
    Holder,
    HolderSeen,
    JournalEntry,
    Load,
    Loaded,
    Look,
    Renew,
    Renewed,
    Taken,
    TooMuch,
    Unanswered,
)
from everstep.protocol.lease.writer import Writer
from everstep.runtime.lead import etcd_journal
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.etcd_gateway import NoReply, Reply
from everstep.runtime.lead.etcd_keys import PARTS

TOKEN = b"t" * 32
WHERE = {"pid": 1, "host": "10.0.0.1", "port": 1, "tls": "off", "ca": ""}


@pytest.fixture(scope="module")
def members() -> Iterator[EtcdMembers]:
    etcd_there()
    found = EtcdMembers()
    found.wait()
    yield found
    found.close()


def client(members: EtcdMembers, prefix: str, token: bytes = TOKEN, job: str = "") -> Etcd:
    return Etcd(EtcdAddress.parse("a test", members.url(prefix)), token, 5.0, job)


def entry(number: int) -> JournalEntry:
    return {"kind": "ticket", "ticket": number, "reason": "é" * number}


def held(etcd: Etcd, owner: str, ttl_s: int = 30) -> Holder:
    """The holder after somebody has tried to become that."""
    assert etcd.ask(Campaign(owner, WHERE, ttl_s)) == Appended()
    seen = etcd.ask(Look())
    assert isinstance(seen, HolderSeen)
    assert seen.holder is not None
    return seen.holder


def test_who_is_deposed_though_it_lives_can_neither_write_nor_prolong_its_lease(members: EtcdMembers) -> None:
    first, second = client(members, "/deposed"), client(members, "/deposed")
    mine = held(first, "one")
    assert first.ask(Append(mine.term, 1, [entry(1)])) == Appended()
    assert second.ask(Depose(mine.lease)) == Appended()
    assert first.ask(Append(mine.term, 2, [entry(2)])) == Fenced()
    assert first.ask(Renew(mine.lease)) == Renewed(0)
    assert isinstance(second.ask(Depose(mine.lease)), Unanswered), "it is over already: a look says so"
    theirs = held(second, "two")
    assert theirs.owner == "two" and second.ask(Load()) == Loaded([entry(1)], 2)
    assert isinstance(first.ask(Depose(mine.lease)), Unanswered) and held(first, "one") == theirs


def test_one_of_two_gets_the_lease(members: EtcdMembers) -> None:
    first, second = client(members, "/lease"), client(members, "/lease")
    assert first.ask(Look()) == HolderSeen(None)
    mine = held(first, "one")
    assert held(second, "two") == mine == Holder("one", WHERE, mine.lease, mine.term)
    assert first.ask(Renew(mine.lease)) == Renewed(30)
    first.resign(mine.lease)
    assert first.ask(Renew(mine.lease)) == Renewed(0)
    next_one = held(second, "two")
    assert next_one.owner == "two"
    assert next_one.term > mine.term


def test_only_the_holder_writes_and_each_number_once(members: EtcdMembers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_journal, "_PAGE", 10)
    etcd = client(members, "/journal")
    assert etcd.ask(Load()) == Loaded([], 1)
    assert etcd.ask(Append(1, 1, [entry(1)])) == Fenced(), "nobody holds the lease"
    term = held(etcd, "one").term
    assert etcd.ask(Append(term, 1, [entry(1), entry(2)])) == Appended()
    assert etcd.ask(Append(term, 1, [entry(9)])) == Taken([entry(1), entry(2)])
    assert etcd.ask(Append(term - 1, 2, [entry(9)])) == Fenced()
    for number in range(2, 40):
        assert etcd.ask(Append(term, number, [entry(number % 7)])) == Appended()
    loaded = etcd.ask(Load())
    assert isinstance(loaded, Loaded)
    assert loaded.number == 40
    assert loaded.entries == [entry(1), *(entry(n % 7) for n in (2, *range(2, 40)))]
    assert etcd.ask(Compact(term - 1, 35, [])) == Fenced()
    assert etcd.ask(Compact(term, 38, [entry(5)])) == Appended()
    assert etcd.ask(Load()) == Loaded([entry(5), entry(39 % 7)], 40)


def test_what_shortens_the_journal_late_does_not_put_an_older_one_back(
    members: EtcdMembers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that was frozen goes on with what it was asked before."""
    etcd = client(members, "/late")
    term, sent = held(etcd, "one").term, []
    for number in range(1, 4):
        assert etcd.ask(Append(term, number, [entry(number)])) == Appended()
    post = etcd._keys.post

    def frozen(what: str, asked: dict[str, Any]) -> Reply:
        if what == "kv/txn":
            sent.append(asked)
            raise NoReply("frozen")
        return post(what, asked)

    monkeypatch.setattr(etcd._keys, "post", frozen)
    early = Compact(term, 2, [entry(2)])
    assert isinstance(etcd.ask(early), Unanswered)
    monkeypatch.setattr(etcd._keys, "post", post)
    assert etcd.ask(early) == Appended()
    assert etcd.ask(Append(term, 4, [entry(4)])) == Appended()
    assert etcd.ask(Compact(term, 4, [entry(4)])) == Appended()
    loaded = Loaded([entry(4)], 5)
    assert etcd.ask(Load()) == loaded
    assert not post("kv/txn", sent[0]).succeeded and etcd.ask(Load()) == loaded
    assert etcd.ask(early) == Appended() and etcd.ask(Load()) == loaded, "it is done, by a later one"


def test_a_journal_of_which_something_is_gone_is_refused(members: EtcdMembers) -> None:
    etcd = client(members, "/gone")
    term = held(etcd, "one").term
    for number in (1, 2, 3):
        assert etcd.ask(Append(term, number, [entry(number)])) == Appended()
    etcd._keys.post("kv/deleterange", etcd._keys.span("/journal/0000000002"))
    with pytest.raises(ProtocolError, match=r"expected /journal/0000000002 .* found /journal/0000000003"):
        etcd.ask(Load())


def noise(number: int, count: int) -> JournalEntry:
    """So many bytes that do not get fewer."""
    return {"kind": "note", "number": number, "text": Random(number).randbytes(count // 2).hex()}


def test_what_piles_up_while_etcd_is_away_is_written_and_shortened(members: EtcdMembers) -> None:
    """More than etcd takes at once, several times."""
    etcd = client(members, "/large")
    term = held(etcd, "one").term
    entries = [noise(number, 800_000) for number in range(8)]
    for life, more in enumerate((entries[:5], entries[5:]), 1):
        loaded = etcd.ask(Load())
        assert isinstance(loaded, Loaded)
        writer, asked = Writer(term, loaded.number, loaded.entries, compact_every=3), []
        writer.put(more)
        while (request := writer.request()) is not None:
            answer = etcd.ask(request)
            assert answer == Appended(), answer
            asked.append(type(request).__name__)
            writer.answered(answer)
        assert asked == ["Append"] * len(more) + ["CompactPart"] * (5 if life == 1 else 8) + ["Compact"]
        assert etcd.ask(Load()) == Loaded(entries[: 5 if life == 1 else 8], writer.number)
        kept = etcd._keys.post("kv/range", {**etcd._keys.span(PARTS, f"{PARTS}:"), "keys_only": True}).kvs
        assert len(kept) == asked.count("CompactPart"), "those of before are gone"
    etcd._keys.post("kv/deleterange", {"key": kept[3].key})
    with pytest.raises(ProtocolError, match="the entries between are gone"):
        etcd.ask(Load())
    etcd.resign(held(etcd, "one").lease)
    assert etcd.begin({"run_dir": "/two"}, "two", 30) is None
    assert etcd.ask(Load()) == Loaded([], 1)


def test_parts_alone_are_none_of_the_journal(members: EtcdMembers) -> None:
    etcd = client(members, "/parts")
    term = held(etcd, "one").term
    assert etcd.ask(Append(term, 1, [entry(1)])) == Appended()
    assert etcd.ask(CompactPart(term, 1, "d", 0, [entry(9)])) == Appended()
    assert etcd.ask(CompactPart(term - 1, 1, "d", 0, [entry(8)])) == Fenced()
    assert etcd.ask(Load()) == Loaded([entry(1)], 2)
    assert etcd.ask(Compact(term, 1, [entry(3)], 1, "d")) == Appended()
    assert etcd.ask(Load()) == Loaded([entry(9), entry(3)], 2)


@pytest.mark.parametrize("count", [1_700_000, 4_000_000])
def test_one_entry_that_is_too_much_for_etcd_is_said(members: EtcdMembers, count: int) -> None:
    etcd = client(members, f"/too-large-{count}")
    term = held(etcd, "one").term
    answer = etcd.ask(Append(term, 1, [noise(1, 2 * count)]))
    assert isinstance(answer, TooMuch), answer
    assert etcd.ask(Load()) == Loaded([], 1)


def test_a_job_begins_with_an_empty_journal_unless_one_runs(members: EtcdMembers) -> None:
    etcd, late = client(members, "/begin"), client(members, "/begin")
    assert etcd.announced() is None
    assert etcd.begin({"run_dir": "/one"}, "one", 30) is None
    etcd = client(members, "/begin", job=etcd.job)  # whoever begins lets go as soon as a coordinator holds the lease
    before = held(etcd, "one")
    assert before.where == {}
    assert etcd.ask(Claim("one", WHERE, before.lease, before.term)) == Appended()
    holder = held(etcd, "one")
    assert holder == Holder("one", WHERE, before.lease, before.term)
    assert etcd.ask(Claim("two", WHERE, before.lease, before.term - 1)) == Appended()
    assert held(etcd, "one") == holder, "of another term"
    assert etcd.ask(Append(holder.term, 1, [entry(1)])) == Appended()
    assert late.begin({"run_dir": "/two"}, "two", 30) == holder
    etcd.resign(holder.lease)
    assert late.begin({"run_dir": "/two"}, "two", 30) is None
    found = late.announced()
    assert found is not None
    assert (found.facts, found.job) == ({"run_dir": "/two"}, late.job)
    assert late.ask(Load()) == Loaded([], 1)
    late.resign(held(late, "two").lease)
    etcd.ask(Campaign("one", WHERE, 30))  # of the job that was there before
    assert late.ask(Look()) == HolderSeen(None)
    with pytest.raises(ProtocolError, match="another job has begun"):
        etcd.ask(Look())


def test_what_strangers_wrote_is_refused(members: EtcdMembers) -> None:
    held(client(members, "/token"), "one")
    with pytest.raises(ProtocolError, match="of no job with this token"):
        client(members, "/token", b"u" * 32).ask(Look())


@pytest.mark.longer
def test_one_member_of_three_may_be_lost_and_two_may_not() -> None:
    etcd_there()
    members = EtcdMembers()
    try:
        members.wait()
        etcd = client(members, "/members")
        term = held(etcd, "one").term
        members.signal(0, signal.SIGKILL)
        written = [etcd.ask(Append(term, 1, [entry(1)])) for _ in range(50)]
        assert written[-1] == Taken([entry(1)]), "whatever became of the first one, it is there once"
        members.signal(1, signal.SIGKILL)
        assert isinstance(etcd.ask(Append(term, 2, [entry(2)])), Unanswered)
        with pytest.raises(NoHead, match="etcd without a quorum: 2 of 3 members do not answer"):
            etcd.announced()
        members.start(0)
        members.start(1)
        members.wait()
        end_s = time.monotonic() + LIMIT_S
        while not isinstance(loaded := etcd.ask(Load()), Loaded):
            assert time.monotonic() < end_s, loaded  # who has just begun to lead may answer that it has
        assert loaded.entries[0] == entry(1)
    finally:
        members.close()
