"""Lane isolation of buffers, and what becomes of those that lanes change."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from everstep.base.errors import ConfigError
from everstep.exact.buffers import BufferGuard, BufferReport


class Counting(nn.Module):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("constant", torch.arange(100_000.0), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("scale", torch.tensor(1.5))

    count: torch.Tensor
    constant: torch.Tensor
    late: torch.Tensor | None
    scale: torch.Tensor


def lane(guard: BufferGuard) -> None:
    guard.begin_lane()


def test_each_lane_starts_from_the_steps_buffers() -> None:
    model = Counting()
    guard = BufferGuard(model)
    guard.begin_step(1)
    for _ in range(3):
        guard.begin_lane()
        assert model.count.item() == 0 and model.late is None
        model.count.add_(1)
        model.scale = model.scale * 2  # another tensor object
        model.late = torch.ones(3)
        assert sorted(guard.end_lane()) == ["count", "late", "scale"]
    report = guard.report()
    assert report.lanes == 3 and BufferReport.decode(report.encode()) == report
    guard.commit([report])
    assert model.count.item() == 1 and model.scale.item() == 3.0 and torch.equal(model.late, torch.ones(3))
    guard.begin_step(2)
    guard.begin_lane()
    assert guard.end_lane() == {}


def test_interrupted_lane_and_repeated_begin_do_not_leak() -> None:
    model = Counting()
    guard = BufferGuard(model)
    guard.begin_step(4)
    guard.begin_lane()
    model.count.add_(5)
    guard.begin_step(4)
    guard.begin_lane()
    assert model.count.item() == 0
    model.count.add_(7)
    guard.abandon()
    assert model.count.item() == 0


def test_changes_behind_the_version_counter_are_seen() -> None:
    model = Counting()
    guard = BufferGuard(model)
    guard.begin_step(1)
    guard.begin_lane()
    model.count.data.add_(1)
    model.constant.data[99_999] = 7.0
    assert sorted(guard.end_lane()) == ["constant", "count"]
    guard.begin_lane()
    assert model.count.item() == 0 and model.constant[99_999].item() == 99_999.0


def test_same_value_written_again_is_no_change() -> None:
    model = Counting()
    guard = BufferGuard(model)
    guard.begin_step(1)
    guard.begin_lane()
    model.count.add_(1).sub_(1)
    model.constant.mul_(1.0)
    model.scale = model.scale.clone()
    assert guard.end_lane() == {}
    guard.begin_lane()
    model.scale.neg_().neg_()
    model.scale.mul_(0.0).add_(1.5)
    assert guard.end_lane() == {}


def test_refuses_lanes_that_differ_by_name() -> None:
    model = Counting()
    guard = BufferGuard(model)
    guard.begin_step(1)
    guard.begin_lane()
    model.count.add_(1)
    guard.end_lane()
    guard.begin_lane()
    model.count.add_(2)
    with pytest.raises(ConfigError, match="count"):
        guard.end_lane()
    # one lane changes it, another does not
    guard = BufferGuard(model)
    guard.begin_step(1)
    guard.begin_lane()
    model.scale.add_(1)
    guard.end_lane()
    guard.begin_lane()
    with pytest.raises(ConfigError, match="scale"):
        guard.end_lane()


def test_workers_must_agree_and_those_without_lanes_learn() -> None:
    models = [Counting(), Counting(), Counting()]
    guards = [BufferGuard(m) for m in models]
    for k in (0, 1):
        guards[k].begin_step(1)
        guards[k].begin_lane()
        models[k].count.add_(1)
        guards[k].end_lane()
    reports = [g.report() for g in guards]
    assert reports[2].lanes == 0
    for guard in guards:
        guard.commit(reports)
    assert [m.count.item() for m in models] == [1, 1, 1]
    guards[0].begin_step(2)
    guards[0].begin_lane()
    models[0].scale.add_(1)
    guards[0].end_lane()
    guards[1].begin_step(2)
    guards[1].begin_lane()
    guards[1].end_lane()
    with pytest.raises(ConfigError, match="scale"):
        guards[0].commit([guards[0].report(), guards[1].report()])


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_who_has_no_lane_any_more_does_not_report_those_of_a_step_before(end: str) -> None:
    """A member that others have taken the lanes of begins no step."""
    model = Counting()
    guard = BufferGuard(model)
    guard.begin_step(1)
    guard.begin_lane()
    model.count.add_(1)
    guard.end_lane()
    guard.note_elsewhere(1, guard.report())
    if end == "commit":
        guard.commit([guard.report()])
    else:
        guard.abandon()
    assert guard.report() == BufferReport(0, ())


def test_a_changed_buffer_is_sent_up_to_a_mebibyte() -> None:
    models = [Counting(131_072), Counting(131_072)]
    guards = [BufferGuard(m, shared=True) for m in models]
    guards[0].begin_step(1)
    guards[0].begin_lane()
    models[0].count.add_(1)
    guards[0].end_lane()
    report = BufferReport.decode(guards[0].report().encode())
    for guard in guards:
        guard.commit([report])
    assert [m.count.sum().item() for m in models] == [131_072, 131_072]


def test_a_larger_one_is_refused_at_the_first_lane_wherever_others_may_need_it() -> None:
    for shared in (True, False):
        model = Counting(131_073)
        guard = BufferGuard(model, shared=shared)
        guard.begin_step(1)
        guard.begin_lane()
        model.count.add_(1)
        with pytest.raises(ConfigError, match=r"count.*1048584 bytes") if shared else contextlib.nullcontext():
            guard.end_lane()


def test_a_buffer_that_begins_to_exist_in_a_lane_may_be_large() -> None:
    """A cache that the first forward pass makes: it is part of the state from the next step on."""
    model = Counting(1)
    model.register_buffer("cache", None)
    guard = BufferGuard(model, shared=True)
    guard.begin_step(1)
    guard.begin_lane()
    model.cache = torch.ones(400_000)
    guard.end_lane()
    guard.commit([guard.report()])
    assert model.cache.sum().item() == 400_000


def test_running_statistics_are_isolated_but_not_reported() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    guard = BufferGuard(model)
    guard.begin_step(1)
    for _ in range(2):
        guard.begin_lane()
        assert torch.equal(model[0].running_mean, torch.zeros(3))
        model(torch.randn(8, 3))
        assert list(guard.end_lane()) == ["0.num_batches_tracked"]
    guard.commit([guard.report()])
    assert torch.equal(model[0].running_mean, torch.zeros(3)) and model[0].num_batches_tracked.item() == 1


def test_it_says_which_running_statistics_a_step_starts_from() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    guard = BufferGuard(model)
    model[0].running_mean.fill_(2.0)
    assert [value.tolist() for value in guard.start()] == [[2.0] * 3, [1.0] * 3], "nor has a worker without lanes begun"
    guard.begin_step(1)
    guard.begin_lane()
    model(torch.randn(8, 3))
    assert [value.tolist() for value in guard.start()] == [[2.0] * 3, [1.0] * 3]


def test_what_a_step_has_committed_is_not_taken_back() -> None:
    """Who only follows the others' decisions begins and commits a step without computing a lane of it."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    guard = BufferGuard(model)
    guard.begin_step(1)
    guard.begin_lane()
    model(torch.randn(8, 3))
    guard.end_lane()
    guard.settle()
    assert torch.equal(model[0].running_mean, torch.zeros(3)), "the lane's own statistics are not the state's"
    guard.commit([guard.report()])
    model[0].running_mean.fill_(2.0)  # the mean over all lanes
    guard.settle()
    assert torch.equal(model[0].running_mean, torch.full((3,), 2.0))
