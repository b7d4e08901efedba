"""What the pure machines say does not depend on where their clock began, whenever what happens."""

from __future__ import annotations

from typing import Any

from coordinator_harness import MS, S, drop, running
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.protocol.detector import PhiDetector
from everstep.protocol.patience import Figures, Patience

LATER_S = 1 << 20
FIGURES = st.none() | st.builds(
    Figures, st.sampled_from("SRDT"), *[st.integers(0, 9).map(float)] * 4, read_bytes=st.integers(0, 9)
)
LOOKS = st.tuples(st.sampled_from(["ask", "ask", "ask", "answered", "killed", "begins"]), st.integers(0, 200), FIGURES)


def said_by_patience(looks: list[tuple[str, int, Figures | None]], origin_s: float) -> list[Any]:
    patience, now_s, said = Patience(2.0), origin_s, list[Any]()
    for what, passed, figures in looks:
        now_s += passed / 8  # exact sums
        if what == "ask":
            said.append(patience.ask(now_s, figures, passed / 16))
        elif what == "killed":
            patience.killed(now_s)
        else:
            getattr(patience, what)()
        facts = patience.silence_s, patience.stopped_s, patience.limit_s, patience.too_long(), patience.kills
        said += [*facts, patience.due_in(now_s) if what == "ask" else None]
    return said


@given(st.lists(LOOKS, max_size=25))
def test_patience(looks: list[tuple[str, int, Figures | None]]) -> None:
    assert said_by_patience(looks, 1.0) == said_by_patience(looks, LATER_S)


def said_by_detector(beats: list[tuple[str, int, int]], origin_ns: int) -> list[Any]:
    now_ns, said = origin_ns, list[Any]()
    found = PhiDetector(floor_ns=2 * S, ceiling_ns=10 * S, interval_ns=S, now_ns=now_ns)
    for what, passed, waited in beats:
        now_ns += passed * 100 * MS
        if what == "heartbeat":
            found.heartbeat(now_ns, waited * 100 * MS)
        elif what == "resume":
            found.resume(now_ns)
        elif what == "pardon":
            found.pardon(min(waited * 100 * MS, found.silence_ns(now_ns)))
        else:
            said.append(found.suspicion(now_ns))
        said += [found.silence_ns(now_ns), found.next_change_ns(now_ns) - origin_ns, found.ceiling_at_ns - origin_ns]
    return said


BEATS = st.tuples(st.sampled_from(["heartbeat", "heartbeat", "look", "resume", "pardon"]), *[st.integers(0, 30)] * 2)


@given(st.lists(BEATS, max_size=25))
def test_a_detector(beats: list[tuple[str, int, int]]) -> None:
    assert said_by_detector(beats, S) == said_by_detector(beats, LATER_S * S)


ACTS = st.tuples(
    st.sampled_from(["wait", "beat", "silent", "dies", "fault", "drop", "save", "left", "enter"]), st.integers(0, 40)
)


def said_by_coordinator(acts: list[tuple[str, int]], origin_ns: int) -> list[Any]:
    """All that it sends, reports and journals, with restarts in between."""
    world = running(elsewhere=[2], now=origin_ns, save_ns=5 * S)
    said, worlds = list[Any](), [world]
    for what, number in acts:
        i = number % 3
        if what == "wait":
            world.wait(number * S // 4)
        elif what == "silent":
            world.wait(number * S // 2, beating=False)
        elif what == "beat":
            world.beat((i, 0, "compute", number * 500), agent="a2" if i == 2 else "a1")
        elif what == "dies":
            world.exited(i, agent="a2" if i == 2 else "a1")
        elif what == "fault":
            world.fault(i, world.plan.generation if world.plan else 1, (i + 1) % 3)
        elif what == "drop":
            drop(world, ("a1", "a2", "w1.0")[i])
        elif what == "save":
            said.append(world.command("stop", grace_s=number))
        elif what == "enter":
            world.entered(i, world.plan.generation if world.plan else 1, 1)
        else:
            world = world.restart()
            worlds.append(world)
        deadline_ns = world.coordinator.next_deadline_ns
        said.append(None if deadline_ns is None else deadline_ns - origin_ns)
    for one in worlds:
        said += [one.sent, [(r.kind, r.fields) for r in one.reports], one.journal, one.closed]
    return said


@settings(max_examples=40)
@given(st.lists(ACTS, max_size=12))
def test_the_coordinator(acts: list[tuple[str, int]]) -> None:
    assert said_by_coordinator(acts, S) == said_by_coordinator(acts, LATER_S * S)
