"""A step's way through a worker: what is reduced and said of it, in which order it is applied, and what is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.base.cause import Cause
from everstep.base.errors import RepeatedOtherwise
from everstep.base.plan import Member, Plan, Seat
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.nonfinite import Nonfinite
from everstep.protocol.driver.records import AgreePayload, GatherPayload, LaneReport, StageSection, StepOutcome, encode
from everstep.protocol.step_types import Discard, Key, LaneSaid, Record, Release
from everstep.train import updates as updates_module
from everstep.train.elastic import ElasticOrder
from everstep.train.heal import StageGradient
from everstep.train.updates import Updates
from transferring import Recorder

ME = 1
MS = 1_000_000
PLAN = Plan(
    3,
    "because",
    (Member(0, 0, "host"), Member(1, 0, "host")),
    (Seat(0, 0, "active", (0, 1)), Seat(1, 0, "active", (2, 3)), Seat(1, 1, "active", (0, 1, 2, 3))),
    4,
    stages=2,
)
ALONE = replace(PLAN, members=PLAN.members[1:], seats=PLAN.seats[1:])
RECORDS = {7: Record(0, b"of the step")}
OUTCOME = StepOutcome(
    4, (LaneReport(0, 1.0, 1.0, 2, 0), LaneReport(1, 1.0, 1.0, 3, 0)), {0: 0, 1: 1}, 1.0, 2.0, 1.0, {}, {}
)


class Lanes(Recorder):
    """Of one stage."""

    def presence(self, number: int, lanes: tuple[int, ...]) -> dict[Any, Any]:
        return {f"node {n}": number for n in lanes}


class Replica:
    """A stage that remembers what is asked of it."""

    def __init__(self, calls: list[tuple[Any, ...]], stage: int) -> None:
        self._calls, self._stage = calls, stage
        self.lanes = Lanes(calls, f"lanes {stage}")
        self.layout = SimpleNamespace(numel=100 * (stage + 1))
        self.spec = SimpleNamespace(ties=(), parts=(stage,))
        self.handover = SimpleNamespace(present=lambda reduced, received: ("present", reduced, received))
        self.slow = ""
        self.sections: list[tuple[Any, ...]] = []

    def how_set(self) -> bytes:
        return b"set %d" % self._stage

    def compared(self, step: int) -> str:
        return f"digest {self._stage} of {step}"

    def said(self, step: int) -> StageSection:
        return StageSection(self._stage, [], (), b"", [], [], self.compared(step))

    def section(self, *args: Any) -> StageSection:
        self.sections.append(args)
        return StageSection(self._stage, [], (), b"", [], [], args[2])

    def apply(self, outcome: Any, reduced: Any, workers: int, received: Any, dealt: Any) -> dict[str, Any]:
        self._calls.append((f"apply {self._stage}", outcome, reduced, workers, received, dealt()))
        return {"lr": [0.5], "slow_offload": self.slow}


class Updating:
    """A worker that holds these stages. calls: what all its parts were told, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stages: tuple[int, ...] = (0, 1), plan: Plan = PLAN) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.clock_ns = 1_000 * MS
        clock = SimpleNamespace(monotonic_ns=lambda: self.clock_ns, time_ns=lambda: 7 * MS)
        monkeypatch.setattr(updates_module, "time", clock)
        self.replicas = {k: Replica(self.calls, k) for k in stages}
        kept = lambda wanted: self.calls.append(("keep", wanted))  # noqa: E731
        self.held: Any = type("Held", (dict,), {"keep": lambda held, wanted: kept(wanted)})(self.replicas)
        self.machine = SimpleNamespace(generation=3, settled=True, position=Key(5, 0), records={})
        progress = lambda *about: ("progress", *about)  # noqa: E731
        self.view: Any = SimpleNamespace(
            me=ME,
            plan=plan,
            step=9,
            is_main=True,
            stages=self.held,
            order=SimpleNamespace(samples=lambda step, lane: [(0, 100 * step + 10 * lane + n) for n in range(20)]),
            driver=SimpleNamespace(machine=self.machine, progress=progress),
            transport=SimpleNamespace(
                reduce=lambda stage, number, offered: ("reduced", stage, number, *offered),
                channel=Recorder(self.calls, "channel"),
                void=lambda: self.calls.append(("void",)),
            ),
            publisher=Recorder(self.calls, "publisher"),
            link=SimpleNamespace(
                row=SimpleNamespace(
                    set=lambda **facts: self.calls.append(("row", facts["phase"])),
                    sent=lambda *what: self.calls.append(("sent", *what)),
                ),
                log=Recorder(self.calls, "log"),
                tell=lambda message: self.calls.append(("tell", *message)),
            ),
            phase=lambda *about: self.calls.append(("phase", *about)),
        )
        dealing = Recorder(self.calls, "dealing", of=lambda number, stage: ("dealt", number, stage))
        loop = Recorder(self.calls, "loop", fed=lambda number: b"fed %d" % number)
        parts: list[Any] = [Recorder(self.calls, name) for name in ("donor", "keeper", "saver")]
        self.updates = Updates(self.view, *parts, loop, dealing)  # type: ignore[arg-type]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def said(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of all calls of this name."""
        return [call[1:] for call in self.calls if call[0] == name]


def gradients(*stages: int) -> dict[int, StageGradient]:
    return {k: StageGradient(f"reduced {k}", {f"place {k}": None}) for k in stages}  # type: ignore[arg-type,dict-item]


# ---- reduce


@pytest.mark.parametrize("compare", [False, True])
def test_each_own_stage_is_reduced_and_said(monkeypatch, compare: bool) -> None:
    at = Updating(monkeypatch)
    monkeypatch.setattr(updates_module, "exchange_ties", lambda view, plan, step, reduced: {1: {"tied": None}})
    at.updates.given.note(4, 2, 1, LaneSaid("data"))
    said = at.updates.reduce(do.Reduce(1, 3, PLAN, 4, compare))
    assert said == AgreePayload([StageSection(k, [], (), b"", [], [], f"digest {k} of 3" * compare) for k in (0, 1)])
    of = {0: ("reduced", 0, 4, "node 2", "node 3"), 1: ("reduced", 1, 4, *(f"node {n}" for n in range(4)))}
    assert [one.sections for one in at.replicas.values()] == [
        [(of[0], (2, 3), "digest 0 of 3" * compare, {}, compare, b"set 0", {})],
        [
            (
                of[1],
                (0, 1, 2, 3),
                "digest 1 of 3" * compare,
                {"tied": None},
                compare,
                b"set 1",
                {2: {1: LaneSaid("data")}},
            )
        ],
    ]
    assert at.said("phase") == [("reduce", 4, PLAN)] and at.said("dealing.reduced") == [
        (PLAN, 4, {0: ("present", of[0], {}), 1: ("present", of[1], {"tied": None})})
    ]
    assert at.said("sent") == [("reduce", 4 * (100 * 2 + 200 * 4))]
    update = do.Update(2, 3, 4, RECORDS, OUTCOME, (0, 1))
    at.updates.update(update)
    assert [at.said(f"apply {k}")[0][1:4] for k in (0, 1)] == [(of[0], 0, {}), (of[1], 0, {"tied": None})]


def test_who_reduces_alone_sends_nothing(monkeypatch) -> None:
    at = Updating(monkeypatch, plan=ALONE)
    at.updates.reduce(do.Reduce(1, 3, ALONE, 4))
    assert not at.said("sent")


@pytest.mark.parametrize("left", [False, True])
def test_last_states_are_told_where_there_is_somebody_to_compare_with(monkeypatch, left: bool) -> None:
    at = Updating(monkeypatch)
    assert [one.digest for one in at.updates.last_states(left)] == ["digest 0 of 9", "digest 1 of 9"]
    assert at.names() == ["lanes 0.drop", "lanes 1.drop"] * left
    for plan in (None, ALONE):
        at.view.plan = plan
        assert at.updates.last_states(left) == ()


# ---- update


def test_an_update_is_passed_on_first_and_told_last(monkeypatch) -> None:
    at = Updating(monkeypatch)
    at.updates._reduced = {3: (2, gradients(0, 1)), 4: (3, gradients(0, 1)), 5: (3, {})}
    assert at.updates.update(do.Update(1, 3, 4, RECORDS, OUTCOME, (0, 1))) == 7 * MS
    assert at.names() == [
        *("phase", "keep", "row", "donor.feed", "donor.busy_snapshot", "keeper.stand_still", "saver.before_update"),
        *("row", "dealing.of", "apply 0", "dealing.of", "apply 1", "dealing.updated"),
        *("loop.remember", "log.at", "publisher.hold", "saver.prepare", "publisher.committed"),
    ]
    assert at.said("phase") == [("update", 4, PLAN)] and at.said("keep") == [((0, 1),)]
    assert at.said("row") == [("stall",), ("update",)]
    ((number, records, held, numel, application, *_),) = at.said("donor.feed")
    assert (number, records, held, numel) == (4, RECORDS, gradients(0, 1), {0: 100, 1: 200})
    assert application() == b"fed 4"
    assert at.said("apply 1") == [(OUTCOME, "reduced 1", 0, {"place 1": None}, ("dealt", 4, 1))]
    assert at.said("dealing.updated") == at.said("log.at") == [(4,)] and at.said("loop.remember")[0][0] == 4
    assert at.said("publisher.hold") == [(OUTCOME, 3, {"lr": [0.5]})]
    assert at.said("publisher.committed") == [(4, 7 * MS)]
    assert at.updates.outcome is OUTCOME and sorted(at.updates._reduced) == [4, 5]


def test_a_stage_that_is_held_no_more_is_neither_fed_nor_updated(monkeypatch) -> None:
    at = Updating(monkeypatch, (1,))
    at.updates.apply(OUTCOME, RECORDS, gradients(0, 1), 3)
    assert [call[2] for call in at.said("donor.feed")] == [gradients(1)] and "apply 0" not in at.names()


def test_a_slow_disk_is_told_of_as_a_warning(monkeypatch) -> None:
    at = Updating(monkeypatch)
    at.replicas[0].slow = "updates wait for the disk"
    heard: list[Any] = []
    at.view.publisher.emit = lambda kind, **facts: heard.append((kind, facts))
    at.updates.apply(OUTCOME, RECORDS, gradients(0, 1), 3)
    assert heard == [("warning", {"step": 4, "cause": Cause.SLOW, "reason": "updates wait for the disk"})]
    assert at.said("publisher.hold") == [(OUTCOME, 3, {"lr": [0.5]})]


def test_an_elastic_order_goes_on_by_the_samples_and_the_workers_that_there_were(monkeypatch) -> None:
    at = Updating(monkeypatch)
    at.view.order = order = ElasticOrder(0, 1000, 4, 2, 4, 100, None)
    order.advance(3, 0, 6)
    at.updates.apply(replace(OUTCOME, workers={0: 0, 1: 1, 2: 1}), RECORDS, gradients(0, 1), 3)
    assert at.said("apply 0")[0][2] == 6  # by which the step was computed
    assert (order.step, order.position, order.workers) == (4, 5, 2)


@pytest.mark.parametrize("main", [False, True])
def test_the_jobs_leader_tells_which_lanes_were_compared_and_who_is_alone(monkeypatch, main: bool) -> None:
    at = Updating(monkeypatch)
    at.view.is_main, said = main, LaneSaid("data")
    probes = {(2, 0): {0: said, 1: said}, (2, 1): {1: said, 3: said}, (0, 1): {1: said}}
    heard: list[Any] = []
    at.view.publisher.emit = lambda kind, **facts: heard.append((kind, facts))
    at.updates.apply(replace(OUTCOME, probes=probes), RECORDS, gradients(0, 1), 3)
    same = {"step": 4, "generation": 3, "equal": True, "alone": [1]}
    right = [
        ("probe_done", {**same, "lane": 0, "workers": [1]}),
        ("probe_done", {**same, "lane": 2, "workers": [0, 1, 3]}),
    ]
    assert heard == right * main


def test_what_is_not_finite_is_told_with_the_first_samples_of_its_lanes(monkeypatch) -> None:
    at = Updating(monkeypatch)
    odd = replace(OUTCOME, nonfinite=Nonfinite("the loss is nan", (1, 3), 2))
    samples = [*range(410, 430), *range(430, 442)]
    strange = {"lanes": [1, 3], "samples": samples, "in_a_row": 2}
    assert at.updates.strange(odd) == {"nonfinite": "the loss is nan", "strange": strange} and len(samples) == 32
    assert at.updates.strange(OUTCOME) == {}
    at.updates.apply(odd, RECORDS, gradients(0, 1), 3)
    assert at.said("publisher.hold")[0][2] == {"lr": [0.5], "nonfinite": "the loss is nan", "strange": strange}


@pytest.mark.parametrize(("step", "known"), [(3, True), (4, False), (5, False)])
def test_an_elastic_order_knows_the_samples_of_coming_steps_alone(monkeypatch, step: int, known: bool) -> None:
    at = Updating(monkeypatch)
    at.view.order = order = ElasticOrder(0, 1000, 4, 2, 4, 100, None)
    order.advance(step, 0, 4)
    odd = replace(OUTCOME, nonfinite=Nonfinite("the loss is nan", (1,), 1))
    assert len(at.updates.strange(odd)["strange"]["samples"]) == 2 * known


# ---- what is told, and what is dropped


def decided(at: Updating, key: Key, *, first: bool) -> None:
    at.updates.handlers()[do.Decided](do.Decided(key, 3, first))


def test_the_first_decision_of_a_generation_is_told_at_once_by_the_jobs_leader(monkeypatch) -> None:
    at = Updating(monkeypatch)
    decided(at, Key(4, 0), first=True)
    assert at.calls == [("channel.forget", 4), ("tell", "progress", 4, 0.0, 7 * MS)]
    at.calls.clear()
    decided(at, Key(4, 1), first=False)  # a gather: the step's messages may still be wanted
    at.view.is_main = False
    decided(at, Key(4, 2), first=True)
    assert at.calls == []


def agreed(*committed_ns: int) -> dict[int, Record]:
    return {i: Record(0, encode(AgreePayload([], at))) for i, at in enumerate(committed_ns)}


def gathered(*committed_ns: int) -> dict[int, Record]:
    return {i: Record(0, encode(GatherPayload(b"", at))) for i, at in enumerate(committed_ns)}


@pytest.mark.parametrize(
    ("position", "records", "committed_ns"),
    [
        (Key(5, 0), agreed(70, 60), 60),
        (Key(4, 1), gathered(80, 90), 80),
        (Key(4, 0), agreed(70), None),  # of the step itself: it says when the one before was committed
        (Key(5, 0), {}, None),
    ],
)
def test_a_step_was_committed_when_the_next_decision_says(
    monkeypatch, position: Key, records: Mapping[int, Record], committed_ns: int | None
) -> None:
    at = Updating(monkeypatch)
    at.machine.position, at.machine.records = position, records
    at.updates.handlers()[Release](Release(4))
    assert at.said("publisher.committed") == [(4, committed_ns)] * (committed_ns is not None)
    assert at.said("publisher.release") == [(4, True)] and at.said("keeper.state") == [()]


@pytest.mark.parametrize(("main", "settled"), [(False, True), (True, False)])
def test_who_does_not_lead_or_has_not_settled_tells_nothing(monkeypatch, main: bool, settled: bool) -> None:
    at = Updating(monkeypatch)
    at.view.is_main, at.machine.settled = main, settled
    at.updates.handlers()[do.EnteredPlan](do.EnteredPlan(PLAN, 4))
    at.updates.release(Release(4))
    assert at.said("publisher.release") == [(4, False)] and not at.said("tell")


def repeats(monkeypatch, told: tuple[int, float, float] | None, **config: Any) -> Updating:
    at = Updating(monkeypatch)
    emit = lambda kind, **fields: at.calls.append(("emit", kind, fields["step"]))  # noqa: E731
    at.view.publisher = SimpleNamespace(release=lambda number, leads: told, emit=emit)
    changed = SimpleNamespace(changed=config.get("changed", "refuse"))
    at.view.config = SimpleNamespace(
        batch=config.get("batch", "constant"), hosts=SimpleNamespace(mixed=False), numerics=changed
    )
    return at


def test_a_step_that_is_repeated_with_another_loss_ends_an_exact_job(monkeypatch) -> None:
    with pytest.raises(RepeatedOtherwise, match=r"step 4 had the loss 0\.5 .* has 0\.75 now") as refused:
        repeats(monkeypatch, (4, 0.5, 0.75)).updates.release(Release(4))
    assert refused.value.exit_code == 2 and "numerics.changed=warn" in str(refused.value)
    repeats(monkeypatch, None).updates.release(Release(4))
    repeats(monkeypatch, (4, 0.5, 0.75), batch="per_worker").updates.release(Release(4))


def test_a_job_that_is_inexact_by_request_tells_once_that_a_loss_is_another(monkeypatch) -> None:
    at = repeats(monkeypatch, (4, 0.5, 0.75), changed="warn")
    for number in (4, 5):
        at.updates.release(Release(number))
    assert at.said("emit") == [("warning", 4)]


def test_progress_is_told_now_and_then_once_the_generation_goes_on(monkeypatch) -> None:
    at = Updating(monkeypatch)
    at.updates.begin_step()
    at.clock_ns += 300 * MS
    at.updates.release(Release(4))
    assert not at.said("tell")  # all have yet to settle
    at.updates.entered(do.EnteredPlan(PLAN, 4))
    at.updates.release(Release(4))
    assert at.said("tell") == [("progress", 4, 300.0, 0)]
    at.clock_ns += 200 * MS
    at.updates.release(Release(5))
    assert len(at.said("tell")) == 1
    at.clock_ns += 1
    at.updates.begin_step()
    at.clock_ns += 50 * MS
    at.updates.release(Release(6))
    assert at.said("tell")[1:] == [("progress", 6, 50.0, 0)]


def test_a_loop_that_raised_leaves_the_state_as_after_the_last_update(monkeypatch) -> None:
    at = Updating(monkeypatch)
    at.updates.handlers()[do.DropLanes](do.DropLanes())
    each = [f"lanes {k}.{what}" for k in (0, 1) for what in ("drop", "settle_buffers")]
    assert at.names() == ["saver.before_update", *each]


@pytest.mark.parametrize("undone", [False, True])
def test_what_a_step_that_is_done_again_was_reduced_to_is_dropped(monkeypatch, undone: bool) -> None:
    at = Updating(monkeypatch)
    at.updates._reduced = {4: (3, {})}
    at.updates.given.note(4, 2, 0, LaneSaid("data"))
    at.updates.handlers()[Discard](Discard(4, undone))
    assert at.names() == [f"lanes {k}.{'abandon' if undone else 'discard'}" for k in (0, 1)]
    assert not at.updates.given.has(4, 2) and bool(at.updates._reduced) is not undone
