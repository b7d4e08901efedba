"""Goodput by simulation: closed forms within its interval, what each policy loses, properties."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cost.goodput import (
    Cluster,
    GoodputFound,
    Policy,
    _student_95,
    available_devices,
    closed_form,
    in_place_goodput,
    present_stages,
    recovery_policies,
    restart_goodput,
    simulate,
)
from everstep.cost.wanted_goodput import WantedDevices, fewest_devices
from sampling import mostly_longer

HOUR, DAY = 3600.0, 86400.0
PLAIN = Policy("plain", "", "", (0.0, 0.0, 0.0), 0.0, HOUR)


def times() -> dict[str, float]:
    found = json.loads(resources.files("everstep.cost").joinpath("recovery_times.json").read_text())
    return {name: value for kind in found.values() for name, (value, _) in kind["seconds"].items()}


def found(policy: Policy, cluster: Cluster, days: float = 30, runs: int = 40, seed: int = 0) -> GoodputFound:
    return simulate(policy, cluster, days * DAY, runs, random.Random(seed).random)


@pytest.mark.parametrize("seed", mostly_longer(range(5), lambda seed: seed < 2))
def test_stalls_alone_by_their_closed_form(seed: int) -> None:
    cluster = Cluster(1000, 1000 * HOUR)
    result = found(replace(PLAIN, stall_s=(300.0, 0, 0)), cluster, seed=seed)
    assert result.low < in_place_goodput(1 / HOUR, 300.0) < result.high
    assert result.high - result.low < 0.005
    assert result.lost["stalled"] == pytest.approx(1 - result.goodput)


@pytest.mark.parametrize("seed", mostly_longer(range(5), lambda seed: seed < 2))
def test_restarts_by_dalys_closed_form(seed: int) -> None:
    policy = replace(PLAIN, stall_s=(300.0, 0, 0), rolls_back=True, save_every_s=900.0, save_s=60.0)
    result = found(policy, Cluster(1000, 1000 * HOUR), seed=seed)
    assert result.low < restart_goodput(1 / HOUR, 900.0, 60.0, 300.0) < result.high
    assert result.high - result.low < 0.01
    assert min(result.lost.values()) == result.lost["missing"] == 0


@pytest.mark.parametrize("seed", mostly_longer(range(5), lambda seed: seed < 2))
def test_missing_devices_by_their_closed_form(seed: int) -> None:
    cluster = Cluster(64, 100 * HOUR, repair_s=10 * HOUR, shares=(0.0, 1.0, 0.0))
    result = found(PLAIN, cluster, days=300, seed=seed)
    assert result.low < available_devices(100 * HOUR, 10 * HOUR) < result.high
    assert result.lost["missing"] == pytest.approx(1 - result.goodput)


def test_most_intervals_hold_the_true_value() -> None:
    """95 % of the intervals, and not all."""
    cluster, policy = Cluster(100, 100 * HOUR), replace(PLAIN, stall_s=(300.0, 0, 0))
    true = in_place_goodput(1 / HOUR, 300.0)
    results = [found(policy, cluster, days=5, runs=5, seed=seed) for seed in range(200)]
    assert 180 <= sum(one.low < true < one.high for one in results) <= 198


def test_a_host_takes_its_devices_with_it_and_a_unit_all_of_its_own() -> None:
    cluster = Cluster(64, 1000 * HOUR, repair_s=HOUR, shares=(0.0, 0.0, 1.0))
    device = replace(cluster, shares=(0.0, 1.0, 0.0))
    by_device, by_host = found(PLAIN, device, 300), found(PLAIN, cluster, 300)
    by_group = found(replace(PLAIN, unit=16), cluster, 300)
    assert by_host.lost["missing"] == pytest.approx(8 * by_device.lost["missing"], rel=0.1)
    assert by_group.lost["missing"] == pytest.approx(16 * by_device.lost["missing"], rel=0.1)


def test_spares_take_the_places_until_they_are_used_up() -> None:
    cluster = Cluster(64, 1000 * HOUR, repair_s=10 * HOUR, shares=(0.0, 1.0, 0.0))
    none, some, many = (found(PLAIN, replace(cluster, spares=spares), 300) for spares in (0, 1, 64))
    assert many.lost["missing"] == 0 < some.lost["missing"] < none.lost["missing"] / 2
    busy = found(replace(PLAIN, back_s=HOUR), replace(cluster, spares=64), 300)
    assert busy.lost["missing"] == pytest.approx(none.lost["missing"] / 10, rel=0.1)


def test_a_job_that_waits_stands_still_until_the_replacement_is_there() -> None:
    cluster = Cluster(64, 1000 * HOUR, shares=(0.0, 1.0, 0.0))
    policy = replace(PLAIN, provision_s=600.0, stall_s=(1.0, 1.0, 1.0))
    result = found(policy, cluster, 300)
    assert result.low < in_place_goodput(64 / (1000 * HOUR), 601.0) < result.high and result.lost["missing"] == 0


def test_the_head_is_one_of_the_hosts() -> None:
    """What its loss costs is spread over all hosts' failures, and no other failure has it."""
    hosts = Cluster(64, 1000 * HOUR, spares=10_000, shares=(0.0, 0.0, 1.0))
    policy = replace(PLAIN, head_s=600.0)
    result = found(policy, hosts, 300)
    assert result.low < in_place_goodput(hosts.rate, 600.0) < result.high
    assert closed_form(policy, hosts) == pytest.approx(in_place_goodput(hosts.rate, 600.0))
    devices = replace(hosts, shares=(0.0, 1.0, 0.0))
    assert found(policy, devices).goodput == closed_form(policy, devices) == 1
    by_name = {one.name: one for one in recovery_policies(times(), Cluster(64, DAY, step_s=1.0))}
    assert by_name["ours"].head_s == (1.69 + 1.0) / 8 and by_name["ours-no-etcd"].head_s == 900 / 8


@pytest.mark.parametrize(("stages", "backups"), [(1, 0), (8, 0), (8, 1), (8, 2), (16, 3)])
def test_the_stage_with_the_fewest_devices_decides(stages: int, backups: int) -> None:
    cluster = Cluster(64, 300 * HOUR, repair_s=10 * HOUR, shares=(0.0, 1.0, 0.0), stages=stages, backups=backups)
    policy = replace(PLAIN, stages=stages)
    result = found(policy, cluster, days=300, seed=5)
    assert result.low < present_stages(cluster, 10 * HOUR) < result.high and result.high - result.low < 0.003
    assert result.lost["missing"] == pytest.approx(1 - result.goodput)
    assert result.failures == pytest.approx(300 * 24 / 300 * (64 + stages * backups) * 0.97, rel=0.05)


def test_the_last_worker_of_a_stage_takes_its_state_with_it() -> None:
    cluster = Cluster(8, 300 * HOUR, repair_s=HOUR, shares=(0.0, 1.0, 0.0), stages=8)
    policy = replace(PLAIN, stages=8, reload_s=60.0)
    alone, kept = found(policy, cluster, 300), found(policy, replace(cluster, backups=1), 300)
    assert kept.lost["redone"] < alone.lost["redone"] / 20 and kept.goodput > alone.goodput + 0.02
    assert alone.goodput + sum(alone.lost.values()) == pytest.approx(1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(0, 3), st.integers(-5, 45), st.sampled_from([0, 1, 4]))
def test_the_fewest_devices_are_those_of_trying_all(least: int, gain: int, rough: int, stages: int) -> None:
    """Few runs say something else than all; a backup of each stage is worth `gain` spares of each."""

    def goodput(more: WantedDevices, runs: int) -> float:
        have = more.spares + gain * stages * more.backups
        return float(have >= (least if runs > 2 else rough))

    most = 30
    tried = [
        WantedDevices(spares, backups)
        for backups in range(4 if stages else 1)
        for spares in range(most + 1)
        if goodput(WantedDevices(spares, backups), 20) == 1
    ]
    expected = min((one.spares + stages * one.backups for one in tried), default=None)
    fewest = fewest_devices(goodput, 1.0, most, 20, stages)
    assert (fewest and fewest.spares + stages * fewest.backups) == expected
    assert fewest is None or goodput(fewest, 20) == 1


def test_quantiles_of_student() -> None:
    for freedom, quantile in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (999, 1.962)):
        assert _student_95(freedom) == pytest.approx(quantile, rel=0.008)
    assert _student_95(4) == pytest.approx(2.776, rel=0.003)


def test_a_second_failure_costs_the_last_copy() -> None:
    cluster = Cluster(64, 100 * HOUR, repair_s=10 * HOUR, shares=(0.0, 1.0, 0.0))
    kept, copied = found(PLAIN, cluster, 100), found(replace(PLAIN, copies=2, reload_s=60.0), cluster, 100)
    assert kept.lost["redone"] == kept.lost["stalled"] == 0 < copied.lost["redone"]
    down = 64 * 10 / 110
    assert copied.lost["stalled"] == pytest.approx((64 - down) / (100 * HOUR) * down / 64 * 60, rel=0.15)


def test_losses_and_goodput_are_all_of_the_time() -> None:
    cluster = Cluster(1000, 5000 * HOUR, spares=4, shares=(0.2, 0.6, 0.2), state_bytes=1e10)
    for policy in recovery_policies(times(), cluster):
        result = found(policy, cluster, runs=3)
        assert result.goodput + sum(result.lost.values()) == pytest.approx(1), policy.name
        assert result.low <= result.goodput <= result.high


def test_the_closed_forms_together_are_near_what_is_simulated() -> None:
    cluster = Cluster(10_000, 76_800 * HOUR, shares=(0.2, 0.6, 0.2))
    for policy in recovery_policies(times(), cluster):
        result = found(policy, cluster, 90, 10)
        assert 1 - closed_form(policy, cluster) == pytest.approx(1 - result.goodput, rel=0.1), policy.name


@pytest.mark.parametrize(("per_node", "stages", "backups"), [(8, 8, 0), (8, 8, 1), (16, 4, 3), (6, 8, 0), (1, 4, 2)])
def test_hosts_that_take_devices_of_several_stages_by_the_closed_form(per_node: int, stages: int, backups: int) -> None:
    cluster = Cluster(
        512, 2000 * HOUR, per_node=per_node, stages=stages, backups=backups, shares=(0.0, 0.6, 0.4), repair_s=10 * HOUR
    )
    policy = recovery_policies(times(), cluster)[3]
    result = found(policy, cluster, 90, 20)
    assert policy.name == "ours-stages"
    assert 1 - closed_form(policy, cluster) == pytest.approx(1 - result.goodput, rel=0.1)


def test_hopeless_jobs_have_no_goodput_and_no_overflow() -> None:
    assert restart_goodput(1.0, 800.0, 1.0, 5.0) == 0 == restart_goodput(100.0, 1.0, 0.1, 60.0)
    assert restart_goodput(1.0, 600.0, 0.0, 0.0) == pytest.approx(0, abs=1e-200)
    cluster = Cluster(10**6, HOUR, stages=8)
    for policy in recovery_policies(times(), cluster):
        assert closed_form(policy, cluster) < 1e-6, policy.name


def test_gemini_takes_seven_minutes_and_twelve_with_a_replacement() -> None:
    """The totals that its paper states (recalled)."""
    gemini = next(one for one in recovery_policies(times(), Cluster(128, DAY)) if one.name == "gemini")
    assert gemini.stall_s[0] == pytest.approx(7 * 60, rel=0.01)
    assert gemini.stall_s[1] + (gemini.provision_s or 0) == pytest.approx(12 * 60, rel=0.05)


def test_ours_scales_as_its_parts_do() -> None:
    """The plan goes to all workers, a joiner copies its state, lost lanes are at most a step."""
    base = Cluster(8, DAY, step_s=0.0)
    one, large, slow, full = (
        recovery_policies(times(), cluster)[0]
        for cluster in (base, replace(base, devices=8008), replace(base, step_s=7.0), replace(base, state_bytes=50e9))
    )
    assert one.stall_s[0] == pytest.approx(0.077 - 0.054 + 0.56 / 1000)
    assert large.stall_s[0] - one.stall_s[0] == pytest.approx(0.56) and slow.stall_s[0] - one.stall_s[0] == 7
    assert full.back_s - one.back_s == pytest.approx(2)
    assert recovery_policies(times(), replace(base, spares=1))[0].back_s == pytest.approx(one.back_s - 0.22)


def test_oobleck_is_at_most_so_much_worse_than_recycle() -> None:
    *_, recycle, oobleck = recovery_policies(times(), Cluster(1000, DAY))
    assert (1 - 0.1 * recycle.slowdown) / (1 - 0.1 * oobleck.slowdown) == pytest.approx(1.46, abs=0.01)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 8), st.integers(0, 2**32), st.sampled_from([1, 2, 5]))
def test_more_failures_never_more_goodput(which: int, seed: int, times_worse: int) -> None:
    """The draws differ, so by more than both intervals."""
    cluster = Cluster(512, 50_000 * HOUR, shares=(0.2, 0.6, 0.2))
    worse = replace(cluster, mtbf_s=cluster.mtbf_s / (1 + times_worse))
    policies = recovery_policies(times(), cluster)
    policy = policies[which % len(policies)]
    better, less = found(policy, cluster, 30, 4, seed), found(policy, worse, 30, 4, seed)
    assert less.low <= better.high
