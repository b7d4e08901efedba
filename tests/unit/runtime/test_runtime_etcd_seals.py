"""Who can write into etcd, and has kept what a job wrote there under the same token, has none of it believed."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etcd_in_memory import EtcdInMemory, Value
from everstep.base.errors import ProtocolError
from everstep.protocol.lease.requests import (
    Append,
    Appended,
    Campaign,
    Claim,
    Compact,
    CompactPart,
    Fenced,
    Holder,
    HolderSeen,
    JournalEntry,
    Load,
    Loaded,
    Look,
    StoreAnswer,
    Taken,
    Unanswered,
)
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.lead.etcd_gateway import NoReply
from everstep.runtime.lead.etcd_seals import Chain, EtcdSeals, NewestEntry

TOKEN, P = b"t" * 32, "/jobs/x"
WHERE = {"pid": 1, "host": "10.0.0.1", "port": 1, "tls": "off", "ca": ""}
THERE = {**WHERE, "host": "10.0.0.2"}


def entry(number: int) -> JournalEntry:
    return {"kind": "ticket", "ticket": number}


def key(number: int) -> str:
    return f"{P}/journal/{number:010d}"


def begun(there: EtcdInMemory, owner: str = "one") -> str:
    """A job that begins, and lets go of its lease. Returns its name."""
    first = there.client(TOKEN)
    assert first.begin({"run_dir": f"/{owner}"}, owner, 30) is None
    lease = int(there.rows[f"{P}/lease"].lease)
    first.resign(lease)
    return first.job


def held(etcd: Etcd, owner: str = "one", where: JournalEntry = WHERE) -> Holder:
    assert isinstance(etcd.ask(Look()), HolderSeen)
    assert etcd.ask(Campaign(owner, where, 30)) == Appended()
    seen = etcd.ask(Look())
    assert isinstance(seen, HolderSeen) and seen.holder is not None
    return seen.holder


def led(there: EtcdInMemory, job: str, entries: int = 6, note: Path | None = None) -> tuple[Etcd, int]:
    """A coordinator that has written so many entries; its term."""
    etcd = there.client(TOKEN, job=job, note=note)
    term = held(etcd).term
    loaded = etcd.ask(Load())
    assert isinstance(loaded, Loaded)
    for number in range(loaded.number, loaded.number + entries):
        assert etcd.ask(Append(term, number, [entry(number)])) == Appended()
    return etcd, term


Harm = Callable[[EtcdInMemory, dict[str, Value]], None]


def left_out(there: EtcdInMemory, kept: dict[str, Value]) -> None:
    for number in range(3, 6):
        there.put(key(number), there.rows[key(number + 1)].value)
    there.drop(key(6))


def reordered(there: EtcdInMemory, kept: dict[str, Value]) -> None:
    three, four = there.rows[key(3)].value, there.rows[key(4)].value
    there.put(key(3), four)
    there.put(key(4), three)


def repeated(there: EtcdInMemory, kept: dict[str, Value]) -> None:
    there.put(key(7), there.rows[key(6)].value)


def gone(there: EtcdInMemory, kept: dict[str, Value]) -> None:
    there.drop(key(4))


def of_another_run(there: EtcdInMemory, kept: dict[str, Value]) -> None:
    """The same entry of a job before, under the same token and prefix."""
    there.put(key(4), kept[key(4)].value)


def all_of_another_run(there: EtcdInMemory, kept: dict[str, Value]) -> None:
    for number in range(1, 7):
        there.put(key(number), kept[key(number)].value)


def snapshot_of_another_run(there: EtcdInMemory, kept: dict[str, Value]) -> None:
    there.put(f"{P}/snapshot", kept[f"{P}/snapshot"].value)


HARMS: list[Harm] = [left_out, reordered, repeated, gone, of_another_run, all_of_another_run, snapshot_of_another_run]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_no_journal_that_was_changed_is_believed(harm: Harm) -> None:
    there = EtcdInMemory()
    before, term = led(there, begun(there))
    kept = there.all()
    assert before.ask(Compact(term, 5, [entry(5)])) == Appended()
    kept |= {name: row for name, row in there.rows.items() if name.endswith("/snapshot")}
    before.resign(held(before).lease)
    job = begun(there, "two")
    led(there, job)
    reader = there.client(TOKEN, job=job)
    assert isinstance(reader.ask(Load()), Loaded)
    harm(there, kept)
    with pytest.raises(ProtocolError, match=r"is of no job with this token|the entries between are gone"):
        there.client(TOKEN, job=job).ask(Load())


def test_a_journal_is_read_across_its_snapshot_and_by_the_next_coordinator() -> None:
    there = EtcdInMemory()
    job = begun(there)
    etcd, term = led(there, job)
    assert etcd.ask(CompactPart(term, 4, "d", 0, [entry(40)])) == Appended()
    assert etcd.ask(Compact(term, 4, [entry(41)], 1, "d")) == Appended()
    assert etcd.ask(Append(term, 7, [entry(7)])) == Appended()
    expected = Loaded([entry(40), entry(41), *map(entry, (5, 6, 7))], 8)
    assert etcd.ask(Load()) == expected
    etcd.resign(held(etcd).lease)
    other, later = led(there, job, 2)
    assert etcd.ask(Append(term, 8, [entry(80)])) == Fenced()
    assert other.ask(Compact(later, 9, [entry(9)])) == Appended()
    assert other.ask(Append(later, 10, [entry(10)])) == Appended()
    assert other.ask(Load()) == Loaded([entry(9), entry(10)], 11)


def test_a_snapshot_is_followed_by_its_own_entries_alone() -> None:
    there = EtcdInMemory()
    job = begun(there)
    etcd, term = led(there, job)
    kept = there.all()
    assert etcd.ask(Compact(term, 6, [entry(6)])) == Appended()
    there.put(key(7), kept[key(6)].value)
    with pytest.raises(ProtocolError, match="of no job with this token"):
        there.client(TOKEN, job=job).ask(Load())


def test_an_entry_of_a_coordinator_that_was_deposed_takes_the_place_of_none() -> None:
    """It was on its way when another one wrote under its number, and somebody has read it there."""
    there = EtcdInMemory()
    job = begun(there)
    etcd, term = led(there, job, 5)
    post, sent = etcd._keys.post, list[str]()

    def read_on_the_way(what: str, asked: dict[str, Any]) -> object:
        sent.append(asked["success"][0]["request_put"]["value"])
        raise NoReply("lost")

    etcd._keys.post = read_on_the_way  # type: ignore[method-assign,assignment]
    assert isinstance(etcd.ask(Append(term, 6, [entry(66)])), Unanswered)
    etcd._keys.post = post  # type: ignore[method-assign]
    etcd.resign(held(etcd).lease)
    led(there, job, 2)
    there.put(key(6), sent[0])
    with pytest.raises(ProtocolError, match="0000000007 is of no job with this token"):
        there.client(TOKEN, job=job).ask(Load())


def roll_back(there: EtcdInMemory, number: int) -> None:
    """To an earlier journal that has nothing wrong with it."""
    for late in range(number + 1, 7):
        there.drop(key(late))


def test_who_wrote_the_journal_sees_that_its_end_was_cut_off() -> None:
    there = EtcdInMemory()
    etcd, term = led(there, begun(there))
    roll_back(there, 4)
    with pytest.raises(ProtocolError, match=r"entry 6 of the journal .* differs from the entry of this coordinator"):
        etcd.ask(Append(term, 7, [entry(7)]))
    with pytest.raises(ProtocolError, match="ends with entry 4, or has another entry 6 than this host has seen"):
        etcd.ask(Load())
    assert key(7) not in there.rows


def test_who_wrote_the_journal_sees_that_its_last_entry_was_put_back() -> None:
    there = EtcdInMemory()
    etcd, term = led(there, begun(there))
    there.put(key(6), there.rows[key(5)].value)
    with pytest.raises(ProtocolError, match="differs from the entry of this coordinator"):
        etcd.ask(Append(term, 7, [entry(7)]))


def test_the_next_coordinator_in_the_same_directory_sees_that_the_end_was_cut_off(tmp_path: Path) -> None:
    there, note = EtcdInMemory(), tmp_path / "journal-newest"
    job = begun(there)
    etcd = led(there, job, note=note)[0]
    assert note.stat().st_mode & 0o077 == 0
    assert isinstance(there.client(TOKEN, job=job, note=note).ask(Load()), Loaded)
    roll_back(there, 4)
    assert there.client(TOKEN, job=job).ask(Load()) == Loaded([*map(entry, range(1, 5))], 5), "nobody can know"
    with pytest.raises(ProtocolError, match=r"only a new job can go on \(--fresh\)"):
        there.client(TOKEN, job=job, note=note).ask(Load())
    etcd.close()


def test_a_snapshot_stands_for_what_a_directory_remembers(tmp_path: Path) -> None:
    there, note = EtcdInMemory(), tmp_path / "journal-newest"
    job = begun(there)
    etcd, term = led(there, job, note=note)
    assert etcd.ask(Compact(term, 6, [entry(6)])) == Appended()
    assert there.client(TOKEN, job=job, note=note).ask(Load()) == Loaded([entry(6)], 7)
    assert etcd.ask(Append(term, 7, [entry(7)])) == Appended()


@pytest.mark.parametrize("text", ["", "x" * 300, "ab 7 cd\n", f"{'0' * 32} 0000000099 {'1' * 64}\n"])
def test_a_note_that_is_of_no_use_is_none(tmp_path: Path, text: str) -> None:
    """Torn, foreign, or of a job before in the same directory."""
    there, note = EtcdInMemory(), tmp_path / "journal-newest"
    job = begun(there)
    led(there, job)
    note.write_text(text)
    assert isinstance(there.client(TOKEN, job=job, note=note).ask(Load()), Loaded)


def test_what_a_full_disk_does_not_note_is_written_all_the_same(tmp_path: Path) -> None:
    there = EtcdInMemory()
    etcd, term = led(there, begun(there), note=tmp_path / "absent" / "journal-newest")
    assert etcd.ask(Append(term, 7, [entry(7)])) == Appended()


def test_what_was_not_answered_is_read_back_and_goes_on() -> None:
    there = EtcdInMemory()
    etcd, term = led(there, begun(there))
    post, lost = etcd._keys.post, list[str]()

    def losing(what: str, asked: dict[str, object]) -> object:
        lost.append(what)
        post(what, asked)
        raise NoReply("lost")

    for again, request in ((Taken([entry(7)]), Append(term, 7, [entry(7)])), (Appended(), Compact(term, 7, []))):
        etcd._keys.post = losing  # type: ignore[method-assign,assignment]
        assert isinstance(etcd.ask(request), Unanswered)
        etcd._keys.post = post  # type: ignore[method-assign]
        assert etcd.ask(request) == again
    assert etcd.ask(Append(term, 8, [entry(8)])) == Appended()
    assert etcd.ask(Load()) == Loaded([entry(8)], 9)


def test_a_frozen_request_of_an_earlier_life_may_shorten_the_journal() -> None:
    """Of the same term; that is nobody's harm."""
    there = EtcdInMemory()
    job = begun(there)
    etcd, term = led(there, job)
    post, frozen = etcd._keys.post, list[tuple[str, dict[str, object]]]()

    def freezing(what: str, asked: dict[str, object]) -> object:
        if what == "kv/txn":
            frozen.append((what, asked))
            raise NoReply("frozen")
        return post(what, asked)

    etcd._keys.post = freezing  # type: ignore[method-assign,assignment]
    assert isinstance(etcd.ask(Compact(term, 6, [entry(6)])), Unanswered)
    later = there.client(TOKEN, job=job)
    assert isinstance(later.ask(Load()), Loaded)
    there.post(*frozen[0])
    answers: list[StoreAnswer] = [later.ask(Append(term, 7, [entry(7)])) for _ in range(2)]
    assert isinstance(answers[0], Unanswered) and answers[1] == Appended()
    assert later.ask(Load()) == Loaded([entry(6), entry(7)], 8)


# ---- the lease


def replay(there: EtcdInMemory, kept: dict[str, Value], lease: str = "") -> None:
    there.put(f"{P}/lease", kept[f"{P}/lease"].value, lease or kept[f"{P}/lease"].lease)


def test_an_older_lease_is_not_believed_by_who_has_seen_a_newer_one() -> None:
    there = EtcdInMemory()
    job = begun(there)
    one, two, looks = (there.client(TOKEN, job=job) for _ in range(3))
    first = held(one, "one", WHERE)
    kept = there.all()
    one.resign(first.lease)
    second = held(two, "two", THERE)
    assert looks.ask(Look()) == HolderSeen(second)
    newer = there.all()
    replay(there, kept)
    with pytest.raises(ProtocolError, match="somebody has restored it"):
        looks.ask(Look())
    there.drop(f"{P}/lease")
    for past in (kept, newer):  # as a new one
        replay(there, past)
        with pytest.raises(ProtocolError, match="somebody has restored it"):
            looks.ask(Look())
        there.drop(f"{P}/lease")
    assert looks.ask(Look()) == HolderSeen(None)
    assert held(looks, "three").owner == "three", "the next one is believed"


def test_an_older_place_of_the_holder_is_not_believed() -> None:
    there = EtcdInMemory()
    etcd = there.client(TOKEN, job=begun(there))
    holder = held(etcd)
    kept = there.all()
    assert etcd.ask(Claim("one", THERE, holder.lease, holder.term)) == Appended()
    seen = etcd.ask(Look())
    assert isinstance(seen, HolderSeen) and seen.holder is not None and seen.holder.where == THERE
    replay(there, kept)
    with pytest.raises(ProtocolError, match="somebody has restored it"):
        etcd.ask(Look())


def test_the_holder_bound_to_another_lease_is_not_believed() -> None:
    """One that never ends, say."""
    there = EtcdInMemory()
    etcd = there.client(TOKEN, job=begun(there))
    held(etcd)
    replay(there, there.all(), "77")
    with pytest.raises(ProtocolError, match="somebody has restored it"):
        etcd.ask(Look())


def test_a_campaign_that_was_overtaken_has_no_effect() -> None:
    there = EtcdInMemory()
    job = begun(there)
    late, other = there.client(TOKEN, job=job), there.client(TOKEN, job=job)
    assert late.ask(Look()) == HolderSeen(None)
    other.resign(held(other, "other").lease)
    assert late.ask(Campaign("late", WHERE, 30)) == Appended()
    assert late.ask(Look()) == HolderSeen(None), "it was free, but of another term by then"
    assert held(late, "late").owner == "late"


# ---- the job


def test_a_job_that_was_put_back_is_none_of_who_takes_part_in_a_later_one() -> None:
    there = EtcdInMemory()
    begun(there, "one")
    kept = there.all()
    job = begun(there, "two")
    bound, looks = there.client(TOKEN, job=job), there.client(TOKEN)
    assert looks.announced() is not None and bound.ask(Look()) == HolderSeen(None)
    there.put(f"{P}/job", kept[f"{P}/job"].value)
    for ask in (lambda: bound.ask(Look()), bound.announced):
        with pytest.raises(ProtocolError, match="another job has begun, or was restored"):
            ask()
    assert bound.ask(Campaign("one", WHERE, 30)) == Appended()
    assert f"{P}/lease" not in there.rows


def test_a_job_of_an_older_version_is_refused_with_words() -> None:
    there = EtcdInMemory()
    begun(there)
    seals = EtcdSeals(TOKEN, P)
    there.put(f"{P}/job", base64.b64encode(seals.closed("/job", {"run_dir": "/old"})).decode())
    for ask in (there.client(TOKEN).announced, lambda: there.client(TOKEN).ask(Look())):
        with pytest.raises(ProtocolError, match=r"an older version of Everstep began: .*etcdctl del --prefix /jobs/x/"):
            ask()


def test_what_a_job_asks_costs_no_more_requests() -> None:
    there = EtcdInMemory()
    job = begun(there)
    etcd, term = led(there, job)
    post, asked = etcd._keys.post, list[str]()

    def counting(what: str, said: dict[str, object]) -> object:
        asked.append(what)
        return post(what, said)

    etcd._keys.post = counting  # type: ignore[method-assign,assignment]
    for request, count in (
        (Look(), 1),
        (Append(term, 7, [entry(7)]), 1),
        (Compact(term, 7, [entry(7)]), 2),
        (Append(term, 8, [entry(8)]), 1),
        (Load(), 2),
        (Campaign("two", WHERE, 30), 3),
        (Claim("one", THERE, int(there.rows[f"{P}/lease"].lease), term), 1),
    ):
        asked.clear()
        etcd.ask(request)
        assert len(asked) == count, request


def test_an_entry_that_is_not_known_has_no_next() -> None:
    chain = Chain("a" * 32, None)
    chain.loaded([NewestEntry()])
    with pytest.raises(ProtocolError, match="expected entry 4 of the journal to be known"):
        chain.tag(4)
