"""The lives of workers, as the page draws them, beside the events that they follow from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.report.facts import facts_of
from told_events import KILLED, T0, S, event, plan

ORDERS = st.lists(
    st.tuples(st.sampled_from(["joined", "suspected", "evicted", "left", "plan", "step"]), st.integers(0, 3)),
    max_size=25,
)


def told(orders: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """The events, one per second; each life of a worker has the number after that of the last."""
    events, lives, generation = [event("job_started", 0, step=0, workers=4)], dict.fromkeys(range(4), -1), 0
    for at_s, (what, i) in enumerate(orders, 1):
        if what == "plan":
            generation += 1
            events.append(plan(at_s, generation, [[n for n in range(4) if n != i and lives[n] >= 0] or [3]]))
        elif what == "step":
            events.append(event("step_committed", at_s, step=at_s, loss=1.0, samples=8, generation=generation))
        else:
            lives[i] += what == "joined"
            about = {"worker_id": i, "incarnation": max(0, lives[i]), "pid": 7, "host": "a", **KILLED}
            events.append(event(f"worker_{what}", at_s, **about))
    return events


@given(ORDERS, st.booleans())
def test_a_worker_is_in_one_state_at_a_time_and_in_none_once_it_has_left(
    orders: list[tuple[str, int]], over: bool
) -> None:
    events, end_s = told(orders), len(orders) + 2
    if over:
        events.append(event("job_completed", end_s, step=99, state="completed", exit_code=0))
    crew = facts_of(events).crew
    for i, worker in crew.workers.items():
        spans = [span for span in crew.spans if span.worker_id == i]
        assert spans and spans[-1].state == worker.state and spans[-1].incarnation == worker.incarnation
        for span, later in pairwise(spans):
            assert span.end_ns == later.begin_ns or (span.state == "left" and span.end_ns == span.begin_ns)
            assert (span.state, span.incarnation) != (later.state, later.incarnation)
        last = spans[-1]
        assert last.end_ns == (last.begin_ns if last.state == "left" else T0 + end_s * S if over else None)
    if not over:
        longer = facts_of([*events, event("warning", end_s + 9, reason="x")]).crew
        assert list(longer.spans) == list(crew.spans), "what says nothing of workers changes no life"
