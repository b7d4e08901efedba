"""Commands with values of any kind: each is answered, in one line, and one that is refused changes nothing."""

from __future__ import annotations

from typing import Any

from coordinator_harness import World, running
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.base.strikes import MEANS, OF_COORDINATOR
from everstep.protocol import messages as m
from everstep.protocol.coordinator.types import Persist, Report

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, -1, 0, 1, 2, 3, 9, 1 << 70, 0.5, float("nan"), float("inf"), "", "1", "a1", "x" * 600]
)
VALUES = st.recursive(ODD, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("k"), inner, max_size=1))
STRIKES = st.fixed_dictionaries(
    {
        "text": st.just("t") | ODD,
        "kind": st.sampled_from([*MEANS, *OF_COORDINATOR, "x"]) | ODD,
        "target": st.sampled_from(["a1", "a2", "a1-a2", "a1-a1", "a2-a1", "-", ""]) | ODD,
    },
    optional={
        "link": st.booleans() | ODD,
        "coordinator": st.booleans() | ODD,
        **dict.fromkeys(("for_s", "by_s", "mbit", "share", "index"), ODD),
    },
)
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("status", {}),
    ("hosts", {}),
    ("scale", {"workers": 2}),
    ("drain", {"worker_id": 1}),
    ("drain", {"host": "a2"}),
    ("checkpoint", {"cause": "requested", "reason": "why"}),
    ("chaos", {"fault": "kill:target=worker:1", "workers": [1], "stages": [0]}),
    ("chaos", {"fault": "kill:target=coordinator", "due": {"text": "t", "kind": "kill", "target": "coordinator"}}),
    ("chaos", {"strike": {}}),
    ("profile", {"steps": 2, "folder": "f", "workers": [0, 2], "memory": True}),
    ("stop", {"grace_s": 5, "exit_code": 143, "cause": "requested", "reason": "why"}),
    ("nothing", {"workers": 2}),
]
"""Commands as they are meant."""


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """One as it is meant, with one or two values of another kind."""
    name, whole = draw(st.sampled_from(WHOLE))
    args = dict(whole)
    for key in draw(st.sets(st.sampled_from(sorted(args) or ["more"]), max_size=2)):
        args[key] = draw(STRIKES | VALUES if key in ("strike", "due") else VALUES)
    return name, args


def two_hosts() -> World:
    world = running(elsewhere=[2], min_workers=2, save_ns=1)
    world.connect("j1", "job")
    return world


@settings(max_examples=100)
@example(("profile", {"steps": 2, "folder": "f", "workers": [[]]}), "operate")
@example(("drain", {"worker_id": True}), "operate")
@given(commands(), st.sampled_from(["operate", "operate", "job", "read"]))
def test_each_is_answered_and_a_refused_one_changes_nothing(command: tuple[str, dict[str, Any]], role: str) -> None:
    (name, args), world = command, two_hosts()
    before = world.command("status").result
    world.clear()
    world.connect("c2", role)
    effects = world.say("c2", m.Command(request=7, name=name, args=args))
    replies = world.messages(m.CommandReply, "c2")
    if name == "checkpoint":  # it is answered once there is one
        assert len(replies) == (role == "read")
        return
    [reply] = replies
    assert reply.request == 7 and reply.ok == (not reply.error) and "\n" not in reply.error
    if reply.ok:
        numbers = [args.get("worker_id"), args.get("steps"), *([args.get("workers")] if name == "scale" else [])]
        assert all(one is None or type(one) is int for one in numbers if "host" not in args and name != "stop")
        return
    assert not [e for e in effects if isinstance(e, Persist)] and reply.result == {}
    assert {e.kind for e in effects if isinstance(e, Report)} <= {"commanded"}
    assert [message for _, message in world.sent] == [reply]
    assert world.command("status").result == before
