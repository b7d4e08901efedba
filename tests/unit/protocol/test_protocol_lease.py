"""Which of several coordinators decides: lease, journal and order of effects, as plain functions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everstep.base.cause import Cause
from everstep.base.config_keys import HeartbeatConfig
from everstep.base.plan import Member, Plan, Seat
from everstep.protocol import messages as wire
from everstep.protocol.coordinator.coordinator import Coordinator
from everstep.protocol.coordinator.restoring import restore
from everstep.protocol.coordinator.types import CoordinatorConfig, Persist, Send
from everstep.protocol.lease.candidate import GONE_PART, SECOND_NS, Candidate
from everstep.protocol.lease.held import HeldEffects
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
    Look,
    Renew,
    Renewed,
    StoreAnswer,
    Taken,
    TooMuch,
    Unanswered,
)
from everstep.protocol.lease.terms import Terms
from everstep.protocol.lease.writer import Writer, compacted

MINE = Holder("me", {}, lease=7, term=40)
OTHER = Holder("other", {}, lease=3, term=30)


def led(now_ns: int = 0) -> Candidate:
    """One that has taken the free lease."""
    candidate = Candidate("me", {}, ttl_s=2)
    for expected, answer in (
        (Look(), HolderSeen(None)),
        (Campaign("me", {}, 2), Appended()),
        (Look(), HolderSeen(MINE)),
        (Renew(7), Renewed(2)),
    ):
        assert candidate.request(now_ns) == expected
        assert not candidate.holds(now_ns)
        candidate.answered(now_ns, answer)
    assert candidate.holds(now_ns)
    assert candidate.term == 40
    return candidate


def test_a_free_lease_is_taken_and_counts_until_before_its_end() -> None:
    candidate = led(0)
    assert candidate.holds(int(1.39 * SECOND_NS))
    assert candidate.deposed(int(1.4 * SECOND_NS))
    assert candidate.request(int(1.4 * SECOND_NS)) is None, "who is deposed asks for nothing any more"


def test_times_are_in_nanoseconds_and_those_of_a_lease_in_seconds() -> None:
    """As the clock has them that is read for it."""
    assert led(10**9).until_ns == 10**9 + 1_400_000_000
    assert standing_by().due_ns == 200_000_000


def test_the_time_of_a_renewal_is_that_of_its_question() -> None:
    """The answer may have been under way for long, and the lease counts from when the question came at the latest."""
    candidate = led(0)
    assert candidate.request(int(0.4 * SECOND_NS)) == Renew(7)
    candidate.answered(int(1.3 * SECOND_NS), Renewed(2))
    assert candidate.until_ns == int(0.4 * SECOND_NS) + int(1.4 * SECOND_NS)


def test_a_campaign_without_an_answer_may_have_been_won() -> None:
    candidate = Candidate("me", {}, ttl_s=2)
    candidate.request(0)
    candidate.answered(0, HolderSeen(None))
    assert isinstance(candidate.request(0), Campaign)
    candidate.answered(0, Unanswered("late"))
    assert candidate.request(0) == Look()
    candidate.answered(0, HolderSeen(MINE))
    assert candidate.request(0) == Renew(7)


def test_the_next_life_of_a_holder_says_where_it_is_and_goes_on() -> None:
    candidate = Candidate("me", {"port": 2}, ttl_s=2)
    mine = Holder("me", {"port": 1}, lease=7, term=40)
    candidate.request(0)
    candidate.answered(0, HolderSeen(mine))
    assert candidate.request(0) == Claim("me", {"port": 2}, 7, 40)
    candidate.answered(0, Unanswered("late"))
    assert candidate.request(0) == Look()
    candidate.answered(0, HolderSeen(Holder("me", {"port": 2}, lease=7, term=40)))
    assert candidate.request(0) == Renew(7)


def test_who_stands_by_looks_often_and_asks_for_nothing_else() -> None:
    candidate = Candidate("me", {}, ttl_s=2)
    now_ns = 0
    for _ in range(5):
        assert candidate.request(now_ns) == Look()
        assert candidate.request(now_ns) is None, "one thing at a time"
        candidate.answered(now_ns, HolderSeen(OTHER))
        assert candidate.request(now_ns) is None
        now_ns = candidate.due_ns
    assert now_ns == SECOND_NS
    assert candidate.holder == OTHER
    assert not candidate.holds(now_ns)
    assert not candidate.deposed(now_ns)


def test_a_lease_that_has_ended_deposes_at_once() -> None:
    candidate = led(0)
    candidate.request(candidate.due_ns)
    candidate.answered(candidate.due_ns, Renewed(0))
    assert candidate.deposed(candidate.due_ns)


def test_silence_of_the_store_deposes_in_time() -> None:
    candidate, now_ns, asked = led(0), 0, 0
    while not candidate.deposed(now_ns):
        if candidate.request(now_ns) is not None:
            asked += 1
            candidate.answered(now_ns, Unanswered("nobody there"))
        now_ns = max(now_ns + 1_000_000, min(candidate.due_ns, candidate.until_ns))
    assert now_ns < 1.41 * SECOND_NS
    assert asked > 10


# ---- a holder that is gone before its lease is over

THERE = Holder("other", {"port": 1}, lease=3, term=30)
MOVED = Holder("other", {"port": 2}, lease=3, term=30)
GONE_NS = int(GONE_PART * 2 * SECOND_NS)


def standing_by(holder: Holder = THERE, *, listens: bool | None = True) -> Candidate:
    """One that has looked once, and probed the port."""
    candidate = Candidate("me", {}, ttl_s=2)
    candidate.request(0)
    candidate.answered(0, HolderSeen(holder))
    candidate.port_probed(0, holder.where, listens)
    return candidate


def asked_until(candidate: Candidate, end_ns: int, holder: Holder = THERE) -> list[object]:
    """What it asks until then, if the holder is always the same and says nothing."""
    asked: list[object] = []
    while candidate.due_ns < end_ns:
        now_ns = candidate.due_ns
        asked.append(candidate.request(now_ns))
        candidate.answered(now_ns, HolderSeen(holder) if asked[-1] == Look() else Unanswered("no leader"))
    return asked


def test_a_holder_that_is_gone_is_deposed_when_its_job_had_time_to_start_it_again() -> None:
    candidate = standing_by()
    candidate.port_probed(100, THERE.where, listens=False)
    assert set(asked_until(candidate, GONE_NS)) == {Look()}
    assert not candidate.sudden
    now_ns = GONE_NS + SECOND_NS // 10
    assert candidate.request(now_ns) == Depose(3)
    candidate.answered(now_ns, Appended())
    assert candidate.request(now_ns) == Look(), "whatever was answered"
    candidate.answered(now_ns, HolderSeen(None))
    assert candidate.request(now_ns) == Campaign("me", {}, 2) and candidate.sudden


def test_to_depose_is_asked_again_after_a_look_when_it_was_not_answered() -> None:
    candidate = standing_by()
    candidate.port_probed(100, THERE.where, listens=False)
    asked_until(candidate, GONE_NS)
    later = asked_until(candidate, GONE_NS + SECOND_NS)
    first = later.index(Depose(3))
    assert later[first + 1] == Look() and later.count(Depose(3)) > 1


@pytest.mark.parametrize("said", [True, None])
def test_who_answers_meanwhile_or_may_is_not_gone(said: bool | None) -> None:
    candidate = standing_by()
    candidate.port_probed(100, THERE.where, listens=False)
    candidate.port_probed(GONE_NS - 100, THERE.where, said)
    candidate.port_probed(GONE_NS, THERE.where, listens=False)
    assert set(asked_until(candidate, 2 * GONE_NS - 100)) == {Look()}


def test_who_was_never_seen_to_listen_may_be_about_to() -> None:
    for listens in (None, False):
        candidate = standing_by(listens=listens)
        candidate.port_probed(100, THERE.where, listens=False)
        assert set(asked_until(candidate, 4 * GONE_NS)) == {Look()}


def test_the_next_life_of_a_holder_is_another_place() -> None:
    candidate = standing_by()
    candidate.port_probed(100, THERE.where, listens=False)
    assert set(asked_until(candidate, 2 * GONE_NS, MOVED)) == {Look()}
    candidate.port_probed(2 * GONE_NS, THERE.where, listens=False)
    candidate.port_probed(2 * GONE_NS, MOVED.where, listens=False)
    assert set(asked_until(candidate, 6 * GONE_NS, MOVED)) == {Look()}


def test_a_lease_that_ends_by_itself_after_that_was_sudden_too_and_others_are_not() -> None:
    for listens, sudden in ((False, True), (None, False), (True, False)):
        candidate = standing_by()
        candidate.port_probed(100, THERE.where, listens)
        candidate.request(candidate.due_ns)
        candidate.answered(candidate.due_ns, HolderSeen(None))
        assert candidate.sudden is sudden


def test_a_holder_that_lives_is_deposed_by_the_store_alone() -> None:
    """Something on the way may refuse what the holder would not: it hears that when it prolongs its lease."""
    candidate = led(0)
    candidate.port_probed(0, MINE.where, listens=True)
    candidate.port_probed(1, MINE.where, listens=False)
    assert candidate.request(candidate.due_ns) == Renew(7)
    candidate.answered(candidate.due_ns, Renewed(0))
    assert candidate.deposed(candidate.due_ns)


# ---- the journal


def entry(number: int) -> JournalEntry:
    return {"kind": "ticket", "ticket": number}


def test_entries_are_written_in_order_one_request_at_a_time() -> None:
    writer = Writer(40, 5, [])
    assert writer.request() is None
    writer.put([entry(1)])
    assert writer.request() == Append(40, 5, [entry(1)])
    writer.put([entry(2), entry(3)])
    assert writer.waiting == 3
    assert writer.answered(Appended()) == 1
    assert writer.request() == Append(40, 6, [entry(2), entry(3)])
    assert writer.answered(Appended()) == 2
    assert writer.request() is None


def test_what_was_not_answered_is_asked_again_to_the_letter() -> None:
    """So what took effect is found under its number, and never written twice."""
    writer = Writer(40, 5, [])
    writer.put([entry(1)])
    first = writer.request()
    writer.put([entry(2)])
    assert writer.answered(Unanswered("late")) == 0
    assert writer.request() == first
    assert writer.answered(Taken([entry(1)])) == 1
    assert writer.request() == Append(40, 6, [entry(2)])


@pytest.mark.parametrize("answer", [Fenced(), Taken([entry(9)])])
def test_whoever_is_fenced_writes_no_more(answer: StoreAnswer) -> None:
    writer = Writer(40, 5, [])
    writer.put([entry(1)])
    writer.request()
    assert writer.answered(answer) == 0
    assert writer.fenced
    assert writer.request() is None


def test_the_journal_is_shortened_now_and_then() -> None:
    writer, asked = Writer(40, 1, [], compact_every=3), []
    for number in range(7):
        writer.put([entry(number)])
        while (request := writer.request()) is not None:
            asked.append(request)
            writer.answered(Appended())
    short = [request for request in asked if isinstance(request, Compact)]
    assert short == [Compact(40, 3, [entry(2)]), Compact(40, 6, [entry(5)])]
    assert [r.number for r in asked if isinstance(r, Append)] == list(range(1, 8))


def long(number: int, size: int = 100) -> JournalEntry:
    return {"kind": "note", "number": number, "text": "x" * size}


def test_a_request_takes_so_many_bytes_or_one_entry() -> None:
    """A store does not take any amount at once, and what has piled up while it was away has to be written."""
    writer, counts = Writer(40, 1, [], most_bytes=1000), []
    writer.put([*(long(number) for number in range(20)), long(20, 5000), long(21), long(22)])
    while (request := writer.request()) is not None:
        assert isinstance(request, Append)
        counts.append(len(request.entries))
        assert len(request.entries) == 1 or len(json.dumps(request.entries, separators=(",", ":"))) <= 1000 + 10
        writer.answered(Appended())
    assert counts == [7, 7, 6, 1, 2]


def test_a_long_journal_is_shortened_in_parts_while_entries_go_first() -> None:
    writer, asked = Writer(40, 1, [], compact_every=3, most_bytes=300), []
    for number in range(3):
        writer.put([long(number)])
        writer.request()
        writer.answered(Appended())
    while (request := writer.request()) is not None:
        asked.append(request)
        if len(asked) == 1:
            assert writer.answered(Unanswered("late")) == 0 and writer.request() == request
            writer.put([long(3)])
        writer.answered(Appended())
    first, between, second, last = asked
    assert isinstance(first, CompactPart) and isinstance(second, CompactPart) and isinstance(last, Compact)
    assert between == Append(40, 4, [long(3)])
    assert (first.number, first.entries) == (0, [long(0), long(1)]) and first.digest == last.digest
    assert second == CompactPart(40, 3, first.digest, 1, [long(2)]) and last == Compact(40, 3, [], 2, first.digest)


def test_parts_of_other_entries_have_another_name() -> None:
    """Those of an earlier life may still arrive, under the same term."""
    names = set()
    for size in (200, 201):
        writer = Writer(40, 1, [long(0, size), long(1)], compact_every=1, most_bytes=300)
        writer.put([long(2)])
        writer.request()
        writer.answered(Appended())
        request = writer.request()
        assert isinstance(request, CompactPart) and request.through == 1
        names.add(request.digest)
    assert len(names) == 2


def test_what_is_too_much_at_once_goes_in_less() -> None:
    entries, kept = [long(number) for number in range(10)], list[JournalEntry]()
    writer = Writer(40, 1, [])
    writer.put(entries)
    while (request := writer.request()) is not None:
        assert isinstance(request, Append)
        few = len(request.entries) <= 3
        kept += request.entries if few else []
        writer.answered(Appended() if few else TooMuch("request is too large"))
    assert kept == entries and not writer.waiting and not writer.refused


def test_one_entry_that_is_too_much_ends_it_with_words() -> None:
    writer = Writer(40, 1, [])
    writer.put([long(1)])
    writer.request()
    assert writer.answered(TooMuch("request is too large")) == 0
    assert "entry (note)" in writer.refused and "--max-request-bytes" in writer.refused
    assert writer.request() is None and not writer.fenced
    writer.put([entry(2)])
    assert writer.request() is None and writer.waiting == 1, "nothing goes on behind an entry that is lacking"


def test_a_store_takes_a_request_as_it_is_started_by_default() -> None:
    writer, entries = Writer(40, 1, []), [long(number, 100_000) for number in range(60)]
    writer.put(entries)
    while (request := writer.request()) is not None:
        assert isinstance(request, Append)
        assert len(json.dumps(request.entries)) < 3 << 19, "etcd: --max-request-bytes"
        writer.answered(Appended())
    assert not writer.waiting


def test_a_journal_that_cannot_be_shortened_in_one_goes_on_and_is_so_later_in_parts() -> None:
    writer, asked = Writer(40, 1, [], compact_every=2), []
    for number in range(4):
        writer.put([long(number)])
        while (request := writer.request()) is not None:
            asked.append(request)
            whole = isinstance(request, Compact) and request.entries
            writer.answered(TooMuch("request is too large") if whole else Appended())
    kinds = [type(request).__name__ for request in asked]
    assert kinds[:5] == ["Append", "Append", "Compact", "Append", "Append"]
    assert set(kinds[5:-1]) == {"CompactPart"} and kinds[-1] == "Compact"


def plan(generation: int, members: dict[int, int], *, prepared: bool = False) -> JournalEntry:
    """A plan of these workers, by incarnation, as an entry."""
    import msgspec

    first = min(members)
    made = Plan(
        generation=generation,
        reason="a test",
        members=tuple(Member(w, i, "host") for w, i in sorted(members.items())),
        seats=tuple(
            Seat(w, 0, "active" if w == first else "standby", (0, 1) if w == first else ()) for w in sorted(members)
        ),
        lanes=2,
        prepared=prepared,
        cause=Cause.JOINED,
    )
    return {"kind": "plan", "plan": msgspec.to_builtins(made), "agents": {str(w): "host" for w in members}}


CONFIG = CoordinatorConfig(
    lanes=2,
    stages=1,
    workers=2,
    min_workers=1,
    on_failure="replace",
    hang_limit_ns=None,
    heartbeat_floor_ns=int(HeartbeatConfig().floor_s * 1e9),
    heartbeat_ceiling_ns=int(HeartbeatConfig().ceiling_s * 1e9),
    heartbeat_interval_ns=None,
    quorum_wait_ns=0,
)
LIFE: list[JournalEntry] = [
    {"kind": "target", "target": 2, "slots": [0, 1]},
    plan(1, {0: 0, 1: 0}),
    {"kind": "evict", "worker_id": 1, "incarnation": 0, "cause": "killed"},
    plan(2, {0: 0}),
    {"kind": "ticket", "ticket": 3},
    plan(3, {0: 0, 1: 1}, prepared=True),
    {"kind": "entered", "generation": 3},
    {"kind": "from a newer version", "x": 1},
    {"kind": "from a newer version", "x": 2},
    {"kind": "evict", "worker_id": 1, "incarnation": 1, "cause": "hung"},
    plan(4, {0: 0}),
    {"kind": "ticket", "ticket": 4},
    plan(5, {0: 0, 1: 2}, prepared=True),
    {"kind": "target", "target": 1, "slots": [0]},
    {"kind": "entered", "generation": 5},
    plan(6, {0: 0}, prepared=True),
    {"kind": "slot_lost", "worker_id": 1, "reason": "it died again and again"},
    {"kind": "let_go", "worker_id": 2, "agent_id": "a1", "process": "p", "reason": "it died again and again"},
    {"kind": "let_go", "worker_id": 2, "agent_id": "a2", "process": "p", "reason": "it died again and again"},
    {"kind": "ended", "state": "completed", "reason": "done", "exit_code": 0},
]


def known(journal: list[JournalEntry]) -> dict[str, Any]:
    """What a coordinator knows by its journal."""
    job = Coordinator(CONFIG, journal).job
    members = job.membership
    return {
        "plan": job.agreement.plan,
        "prepared": job.agreement.prepared,
        "generation": job.agreement.generation,
        "lives": sorted(w.key for w in members.workers.values()),
        "agents": sorted((w.key, w.agent_id) for w in members.workers.values()),
        "fenced": [(w, i) for w in range(3) for i in range(4) if members.is_fenced(Member(w, i, "").key)],
        "target": job.slots.target,
        "lost": job.slots.lost,
        "given up": job.slots.owners.nobodys({0, 1, 2}),
        "ended": job.progress.ended,
        "broken": job.agreement.broken,
    }


@pytest.mark.parametrize("length", range(len(LIFE) + 1))
def test_a_shortened_journal_says_the_same(length: int) -> None:
    journal = LIFE[:length]
    short = compacted(journal)
    assert known(short) == known(journal)
    assert compacted(short) == short
    assert [e for e in short if "newer" in e["kind"]] == [e for e in journal if "newer" in e["kind"]]
    assert len(short) <= len(journal)


def test_a_journal_that_is_not_understood_is_not_shortened() -> None:
    journal: list[JournalEntry] = [plan(1, {0: 0}), {"kind": "plan", "plan": "none"}, entry(1), entry(2)]
    assert compacted(journal) == journal


def test_of_takeovers_only_the_highest_term_is_kept() -> None:
    journal: list[JournalEntry] = [{"kind": "term", "term": term} for term in (1, 3, 2, "x")]
    assert compacted([plan(1, {0: 0}), *journal])[1:] == [journal[1], journal[3]]


def test_a_plan_says_itself_which_doubts_were_over_before_it() -> None:
    over: list[JournalEntry] = [{"kind": "settled", "generation": generation} for generation in (1, 2)]
    for since in ([], over[1:]):
        short = compacted([plan(1, {0: 0}), over[0], plan(2, {0: 0}), *since])
        assert [entry["plan"]["generation"] for entry in short[:1]] == [2] and short[1:] == since
        assert restore(CONFIG, short)[2] == []


# ---- the order of effects


def effect(name: str) -> Send:
    return Send(name, wire.JobEnded(state="completed", reason="", exit_code=0))


def test_effects_wait_for_the_entries_before_them() -> None:
    held, ticking = HeldEffects(), Send("agent", wire.Pong(seq=1))
    assert held.take([effect("a")]) == ([], [effect("a")])
    assert held.take([Persist(entry(1)), effect("b"), ticking]) == ([entry(1)], [ticking])
    assert held.take([effect("c")]) == ([], [])
    assert held.take([Persist(entry(2)), Persist(entry(3)), effect("d")]) == ([entry(2), entry(3)], [])
    assert held.written(1) == [effect("b"), effect("c")]
    assert held.written(1) == []
    assert held.written(1) == [effect("d")]
    assert len(held) == 0


# ---- whom to believe


def planned(term: int, generation: int) -> wire.PlanNow:
    return wire.PlanNow(plan=Plan(generation, "a test", (), (), 1, term=term))


def test_an_older_coordinator_is_not_listened_to() -> None:
    terms = Terms()
    assert not terms.refusal(wire.TermBegun(term=5))
    assert not terms.refusal(planned(5, 1))
    assert not terms.refusal(wire.TermBegun(term=9))
    assert not terms.refusal(planned(5, 2)), "the next one goes on with the plans of the one before"
    assert "term is 5" in terms.refusal(wire.TermBegun(term=5))
    assert not terms.refusal(planned(9, 3))
    assert "a plan of term 5" in terms.refusal(planned(5, 4))
    assert not terms.refusal(wire.TermBegun(term=9)), "over another connection"


def test_who_does_not_say_its_term_orders_nothing_once_another_has_said_one() -> None:
    """A kill, a dismissal or the end bears no term; a coordinator of term 0 says so, too."""
    orders = [wire.Dismissed(reason="", drained=False), wire.JobEnded(state="failed", reason="", exit_code=3)]
    for order in orders:
        terms = Terms()
        terms.connected()
        assert not terms.refusal(order), "nobody has said a term"
        terms.connected()
        assert not terms.refusal(wire.TermBegun(term=1)) and not terms.refusal(order)
        terms.connected()
        assert "does not say its term" in terms.refusal(order)
        terms.connected()
        assert "its term is 0" in terms.refusal(wire.TermBegun(term=0)) and terms.refusal(order)
        terms.connected()
        assert not terms.refusal(wire.TermBegun(term=1)) and not terms.refusal(order)


def test_without_a_lease_nothing_is_refused() -> None:
    terms = Terms()
    assert not any(terms.refusal(planned(0, generation)) for generation in (1, 2, 2, 1))
