"""Memory by stage of ZeRO: the paper's table, this product's bytes per parameter, what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.errors import ConfigError
from everstep.cost import memory, quantities
from everstep.cost.catalogue import device_named
from everstep.cost.memory import (
    GB,
    STAGES,
    Model,
    Split,
    answers_by_paper,
    answers_of_ours,
    by_paper,
    most_nodes,
    of_ours,
    of_recovery,
    of_running,
)
from everstep.placement.tree import cover
from everstep.train import taking
from everstep.train.optimizer_update import DIVIDED_ELEMENTS, PART_ELEMENTS

BILLION = 10**9


def adam(parameters: int) -> Model:
    return Model(parameters, 4.0 * parameters, 8.0 * parameters)


@pytest.mark.parametrize(
    ("workers", "by_stage"),
    [
        (1, (120, 120, 120, 120)),
        (4, (120, 52.5, 41.25, 30)),
        (16, (120, 35.625, 21.5625, 7.5)),
        (64, (120, 31.40625, 16.640625, 1.875)),
        (256, (120, 30.3515625, 15.41015625, 0.46875)),
        (1024, (120, 30.087890625, 15.1025390625, 0.1171875)),
    ],
)
def test_the_papers_table_of_7_5_billion_parameters(workers: int, by_stage: tuple[float, ...]) -> None:
    """arXiv 1910.02054, table 1."""
    found = answers_by_paper(7_500_000_000, workers, False, None)
    assert [found[k].zero_memory_gb for k in STAGES] == pytest.approx(by_stage)
    assert all(found[k].baseline_memory_gb == 120 for k in STAGES)
    assert found[2].memory_reduction_factor == pytest.approx(120 / by_stage[2])
    assert found[2].max_model_size_with_zero is None and found[2].fits is None


def test_bytes_per_parameter_of_eight_workers_on_several_hosts() -> None:
    split = Split(8, copies=2, hosts=8)
    found = [of_ours(adam(BILLION), split, k).total / BILLION for k in (0, 1, 2)]
    assert found == pytest.approx([24, 16, 8], rel=1e-3), "and of the gradients of an update, one part at a time"


def test_more_lanes_per_worker_hold_more_sums() -> None:
    totals = [of_ours(adam(BILLION), Split(2, lanes), 0).device["lanes"] / BILLION for lanes in (2, 4, 8, 16, 32)]
    assert totals == [8, 8, 8, 12, 16]


@given(st.integers(1, 60), st.integers(1, 300))
def test_lanes_of_a_worker_make_as_many_nodes_as_its_tree_has(workers: int, lanes: int) -> None:
    runs = (range(k * lanes // workers, (k + 1) * lanes // workers) for k in range(workers))
    assert most_nodes(workers, lanes) == max(len(cover(run, lanes)) for run in runs)


DYNAMO_BYTES = 70e6
"""Of torch._dynamo, which workers shared with their fork server when this was measured, and do not have any more."""


def test_a_running_worker_of_three_stages_holds_what_was_measured() -> None:
    """A job of 12.6M parameters, Adam, 4 lanes: the fullest worker's PSS by the snapshots that it has."""
    for snapshots, measured in ((0, 237e6), (2, 343e6), (4, 449e6), (6, 554e6)):
        split = Split(1, 4, snapshots=snapshots)
        assert of_running(adam(4_200_000), split, 0, 3).total == pytest.approx(measured - DYNAMO_BYTES / 4, rel=0.1)
    apart = of_ours(adam(BILLION), Split(2, snapshots=1, host_apart=True), 0)
    assert "snapshots" not in apart.device and apart.host["snapshots"] == 12 * BILLION


@pytest.mark.parametrize(("workers", "measured"), [(2, 480e6), (4, 414.7e6)])
def test_a_running_worker_holds_what_was_measured(workers: int, measured: float) -> None:
    """Jobs of 12.6M parameters, Adam, 8 lanes, data parallel on one host: the fullest worker's PSS."""
    split = Split(workers, 8, most_nodes(workers, 8))
    measured -= DYNAMO_BYTES / (1 + workers)
    assert of_running(adam(12_600_000), split, 0, workers).total == pytest.approx(measured, rel=0.1)


def test_of_gradients_that_are_given_back_few_are_held() -> None:
    """Bytes per parameter of four workers with one copy: on one host, on as many, and on two; with more lanes."""

    def lanes(stage: int, hosts: int, of: int = 4) -> float:
        return of_ours(adam(BILLION), Split(4, of, copies=1, hosts=hosts), stage).device["lanes"] / BILLION

    assert [lanes(2, hosts) for hosts in (1, 4, 2)] == [2, 0, 8]
    assert [lanes(1, hosts) for hosts in (1, 4, 2)] == [6, 8, 8]
    assert [lanes(stage, 1, 8) for stage in (1, 2)] == [6, 4]


def test_workers_of_one_host_hold_reduced_gradients_once_whoever_updates_with_them() -> None:
    """Bytes per parameter; on several hosts two of the own part, and all where nothing is divided."""

    def results(stage: int, copies: int, hosts: int = 1) -> float:
        split = Split(4, copies=copies, hosts=hosts)
        return of_ours(adam(BILLION), split, stage).device["results"] / BILLION

    assert {results(stage, copies) for stage in (0, 1, 2) for copies in (1, 2, 3)} == {1}
    assert [results(2, copies, 4) for copies in (1, 2)] == [2, 4] and results(0, 1, 4) == 4


@pytest.mark.parametrize(("stage", "workers", "measured"), [(2, 2, 1123), (2, 4, 1461)])
def test_a_job_whose_state_lies_in_files_holds_what_was_measured(stage: int, workers: int, measured: float) -> None:
    """MiB of a whole job of 25.4M parameters, Adam, 8 lanes, one copy, by bench/memory.py."""
    fixed = memory.WORKER_BYTES + memory.JOB_BYTES / workers
    model = replace(adam(25_400_000), activation_bytes=20.3e6, fixed_bytes=fixed)
    split = Split(workers, 8, most_nodes(workers, 8), copies=1, offload=True)
    assert workers * of_ours(model, split, stage).total / 2**20 == pytest.approx(measured, rel=0.1)


def test_a_recovery_copies_one_workers_part_of_a_divided_state_and_all_of_another() -> None:
    """Bytes per parameter: at those who give, and at the one that gets it."""

    def of(stage: int, parameters: int = BILLION, **how: int) -> float:
        return of_recovery(adam(parameters), Split(**{"workers": 8, "copies": 2, **how}), stage) / parameters

    assert [of(stage) for stage in (0, 1, 2)] == [48, 12, 12]
    assert [of(0, workers=workers) for workers in (1, 2, 3)] == [0, 24, 36]
    assert of(0, 10**6) == 24, "one gives a small state alone"
    assert (of(2, copies=8), of(0, offload=True)) == (48, 12), "all have all; copies lie in files"
    assert (memory._MOST_FOLLOWED, memory._FROM_EACH_BYTES) == (taking.MOST_FOLLOWED, taking.LEAST_BYTES)


def test_what_is_staged_is_at_most_a_part_of_a_checkpoint() -> None:
    parts = [of_ours(adam(BILLION), Split(4, staging=size), 0).device["staging"] for size in (10.0**6, 10.0**12)]
    assert parts == [10**6, 3 * BILLION]
    assert of_ours(adam(BILLION), Split(4, staging=5, host_apart=True), 0).host == {"staging": 5}


def test_where_every_worker_holds_every_part_nothing_is_divided() -> None:
    for split in (Split(2, copies=2), Split(1, copies=2)):
        replicated, *divided = (of_ours(adam(BILLION), split, k) for k in (0, 1, 2))
        assert [one.device for one in divided] == [replicated.device] * 2


def test_where_an_optimizer_keeps_nothing_stages_1_and_2_divide_nothing() -> None:
    """All update all, for which they need all gradients."""
    plain = Model(BILLION, 4.0 * BILLION, 0.0, undivided_parameters=BILLION)
    replicated, *divided, split_up = (of_ours(plain, Split(4, 4, copies=1), k) for k in STAGES)
    assert [one.device for one in divided] == [replicated.device] * 2
    assert split_up.total < replicated.total
    assert of_recovery(plain, Split(4, copies=1), 2) == of_recovery(plain, Split(4, copies=1), 0)


def test_what_is_offloaded_is_the_hosts() -> None:
    """But for what of it is in use at a time."""
    for stage, elements in ((0, PART_ELEMENTS), (1, DIVIDED_ELEMENTS)):
        usage = of_ours(adam(BILLION), Split(4, offload=True), stage)
        assert (usage.device["optimizer"], usage.host["optimizer"]) == (8 * elements, 8 * BILLION / (1 + stage))
    assert of_ours(adam(10**6), Split(4, offload=True), 0).device["optimizer"] == 8 * 10**6
    in_files = of_ours(adam(BILLION), Split(4, offload=True, offload_params=True), 0)
    assert in_files.device["optimizer"] == 0, "parameters and gradients are not in use in an update"
    assert by_paper(BILLION, 4, 0, offload=True).host["optimizer"] == 12 * BILLION
    found = answers_of_ours(adam(BILLION), Split(4, offload=True), None)
    assert found[0].baseline_memory_gb > found[0].zero_memory_gb


def test_the_largest_model_fits_and_a_larger_one_does_not() -> None:
    room = 80 * GB
    for stage in STAGES:
        largest = answers_by_paper(BILLION, 64, False, room)[stage].max_model_size_with_zero or 0
        assert by_paper(largest, 64, stage).total <= room < by_paper(largest + 64, stage=stage, workers=64).total
    fixed = Model(BILLION, 4.0 * BILLION, 8.0 * BILLION, activation_bytes=10.0 * GB, fixed_bytes=1.0 * GB)
    found = answers_of_ours(fixed, Split(1), room)[0]
    assert found.max_model_size_with_zero == 69 * GB // 28 and found.fits
    assert answers_of_ours(fixed, Split(1), 5 * GB)[0].max_model_size_with_zero == 0


@given(st.integers(1, 10**12), st.integers(1, 512), st.integers(1, 4), st.sampled_from(STAGES), st.integers(1, 10**15))
def test_more_memory_never_fits_less(parameters: int, workers: int, copies: int, stage: int, room: int) -> None:
    split = Split(workers, max(8, workers), copies=copies)
    less, more = (answers_of_ours(adam(parameters), split, size)[stage] for size in (room, 2 * room))
    assert more.fits or not less.fits
    assert (more.max_model_size_with_zero or 0) >= (less.max_model_size_with_zero or 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7.5B", 7_500_000_000),
        ("125M", 125_000_000),
        ("1.5T", 15 * 10**11),
        ("25000000", 25_000_000),
        ("3e8", 3 * 10**8),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert quantities.parse_count(text, "--params") == value


@pytest.mark.parametrize(
    "text", ["", "B", "-5", "7.5X", "1e99", "nan", "0", "7.5 B B", "٣", "1" * 400, "0x10", "1_000"]
)
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--params: expected "):
        quantities.parse_count(text, "--params")


def test_sizes_need_their_unit() -> None:
    assert quantities.parse_bytes("80GiB", "--memory") == 80 * 2**30
    assert quantities.parse_bytes("80 gb", "--memory") == 80 * GB
    with pytest.raises(ConfigError, match="with its unit"):
        quantities.parse_bytes("80", "--memory")


@pytest.mark.parametrize(
    ("text", "seconds"), [("100000h", 36e7), ("30d", 2592000), ("5min", 300), ("1.5 s", 1.5), ("250ms", 0.25)]
)
def test_times(text: str, seconds: float) -> None:
    assert quantities.parse_seconds(text, "--mtbf") == seconds


@pytest.mark.parametrize("text", ["100000", "5 m", "-3h", "1e20h", "0s", "inf h"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--mtbf: expected "):
        quantities.parse_seconds(text, "--mtbf")


def test_rates_are_in_bits() -> None:
    assert quantities.parse_rate("200Gb", "--network") == quantities.parse_rate("200 Gb/s", "--network") == 25e9
    for text in ("200", "200GB", "200GB/s", "0Gb"):
        with pytest.raises(ConfigError, match=r"^--network: expected "):
            quantities.parse_rate(text, "--network")


def test_words_of_times() -> None:
    assert [quantities.time_words(s) for s in (0.077, 1.5, 90, 7300, 200_000)] == [
        *("77 ms", "1.5 s", "90 s", "2.03 h", "2.31 d")
    ]


def test_words_of_counts() -> None:
    assert [quantities.count_words(n) for n in (0, 7, 1234, 25_383_936, 7.5e9, 1e13)] == [
        *("0", "7", "1.23K", "25.4M", "7.5B", "10T")
    ]


def test_devices_by_name() -> None:
    assert device_named("A100-80").memory_gb == 80 and device_named("t4").memory_gb == 16
    with pytest.raises(ConfigError, match="a100-40, a100-80"):
        device_named("a100")
    with pytest.raises(ConfigError, match="did you mean h100-80"):
        device_named("h100-8")


def test_of_a_model_in_files_what_is_in_use_is_in_memory_and_sums_of_many_lanes() -> None:
    model = adam(BILLION)
    near, far = (of_ours(model, Split(4, 8, offload=True, offload_params=files), 0) for files in (False, True))
    assert far.host["parameters"] == near.device["parameters"] == 4 * BILLION and far.device["lanes"] == 0
    assert near.total - far.total > 10 * BILLION
    many = of_ours(model, Split(2, 8, offload=True, offload_params=True), 0)
    assert many.device["lanes"] == 4 * BILLION
