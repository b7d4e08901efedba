"""What everybody concludes from the agree records."""

from __future__ import annotations

import math
import struct
from itertools import chain

import msgspec
import pytest
from msgspec import structs

from everstep.base.errors import InvariantViolation
from everstep.base.extents import Runs
from everstep.protocol.driver.comparing import Comparing, Statements
from everstep.protocol.driver.records import (
    SETTING_BYTES,
    SETTINGS,
    AgreePayload,
    GatherPayload,
    LaneReport,
    StageSection,
    committed_unix_ns,
    conclude,
    decode_holding,
    encode,
    encode_holding,
)
from everstep.protocol.step_types import Holding, Key, Record


def record(lanes: list[LaneReport], owned: Runs = (), norms: tuple[float, ...] = (), at: int = 0) -> Record:
    packed = struct.pack(f"{len(norms)}d", *norms)
    return Record(
        0, encode(AgreePayload([StageSection(0, lanes, tuple(chain.from_iterable(owned)), packed, [], [b""], "")], at))
    )


def lane(number: int, loss: float, weight: float = 1.0, count: int = 8) -> LaneReport:
    return LaneReport(number, loss, weight, count, 0)


def test_outcome_does_not_depend_on_who_did_what() -> None:
    losses = [0.1, 0.7, 1e-9, 3.3]
    one = conclude(5, 4, {0: record([lane(i, x) for i, x in enumerate(losses)], ((0, 3),), (1.0, 2.0, 3.0))})
    two = conclude(
        5,
        4,
        {
            0: record([lane(0, 0.1), lane(3, 3.3)], ((0, 1), (2, 3)), (1.0, 3.0)),
            7: record([lane(1, 0.7), lane(2, 1e-9)], ((1, 2),), (2.0,)),
        },
    )
    assert (one.loss, one.weight, one.sumsq, one.samples) == (two.loss, two.weight, two.sumsq, two.samples)
    assert one.loss == ((0.1 + 0.7) + (1e-9 + 3.3)) / 4.0
    assert one.sumsq == 6.0


def test_weights_are_those_of_the_whole_global_batch() -> None:
    outcome = conclude(1, 2, {0: record([lane(0, 30.0, 10.0), lane(1, 2.0, 1.0)])})
    assert outcome.loss == 32.0 / 11.0


def test_an_empty_lane_weighs_nothing() -> None:
    outcome = conclude(1, 2, {0: record([lane(0, 1.5), LaneReport(1, 0.0, 0.0, 0, 0)])})
    assert (outcome.loss, outcome.samples) == (1.5, 8)


def test_logged_values_are_folded_over_the_lanes_that_have_them() -> None:
    """In the order of the lanes' tree, whoever computed them."""
    hits = [0.1, 0.7, 1e-9, 3.3]
    given = [
        LaneReport(i, 1.0, 1.0, 2, 0, {"hits": (x, 2.0)} | ({"rare": (1.0, 0.0)} if i == 2 else {}))
        for i, x in enumerate(hits)
    ]
    one = conclude(5, 4, {0: record(given)})
    two = conclude(5, 4, {0: record([given[3], given[0]]), 7: record(given[1:3])})
    assert one.logged()["hits"] == two.logged()["hits"] == ((0.1 + 0.7) + (1e-9 + 3.3)) / 8.0
    assert list(two.logged()) == ["hits", "rare"] and math.isnan(two.logged()["rare"])


def test_a_lane_twice_or_never_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="twice"):
        conclude(1, 2, {0: record([lane(0, 1.0)]), 1: record([lane(0, 1.0)])})
    with pytest.raises(InvariantViolation, match="lacks"):
        conclude(1, 2, {0: record([lane(0, 1.0)])})


def test_unknown_norms_are_nan() -> None:
    assert math.isnan(conclude(1, 1, {0: record([lane(0, 1.0)], ((0, 2),))}).sumsq)


@pytest.mark.parametrize(
    ("one", "two"), [(((0, 1),), ((2, 3),)), (((0, 2),), ((1, 2),)), (((1, 2),), ((2, 3),)), (((0, 2),), ((2, 4),))]
)
def test_each_block_has_one_norm(one: Runs, two: Runs) -> None:
    """Blocks that nobody tells of, or two; and one norm where there are to be two."""
    with pytest.raises(InvariantViolation, match="norms"):
        conclude(1, 1, {0: record([lane(0, 1.0)], one, (1.0,)), 1: record([], two, (1.0,))})


def test_records_that_were_written_when_each_owned_one_run_are_read() -> None:
    """A checkpoint has the records of its step; nothing was (n, n) then."""
    lanes, norms = [[0, 1.0, 1.0, 1, 0]], [struct.pack("2d", 1.0, 2.0), b""]
    old = [msgspec.msgpack.encode([[[0, lanes[k:], (2 * k, 2), norms[k], [], [b""], ""]]]) for k in (0, 1)]
    assert conclude(1, 1, {k: Record(0, payload) for k, payload in enumerate(old)}).sumsq == 3.0
    with pytest.raises(InvariantViolation, match="runs"):
        conclude(1, 1, {0: Record(0, msgspec.msgpack.encode([[[0, lanes, (2,), b"", [], [], ""]]]))})


def test_first_commit_counts() -> None:
    records = {0: record([lane(0, 1.0)], at=30), 1: record([], at=20), 2: record([], at=0)}
    assert committed_unix_ns(records, is_agree=True) == 20
    assert committed_unix_ns({0: Record(0, encode(GatherPayload(b"", 9)))}, is_agree=False) == 9


def test_holdings_survive_the_way() -> None:
    holding = Holding(Key(4, 1), {2: Record(7, b"abc"), 0: Record(0, b"")}, 5, "digest", sound=3)
    assert decode_holding(encode_holding(holding)) == holding


@pytest.mark.parametrize("there", ["aa", "bb"])
def test_copies_of_a_tied_parameter_are_compared_across_stages(there: str) -> None:
    first = StageSection(0, [], (), b"", [], [b""], "x", {"embed.weight": "aa"})
    last = StageSection(1, [lane(0, 0.1)], (), b"", [], [b""], "y", {"embed.weight": there})
    records = {w: Record(0, encode(AgreePayload([s], 0))) for w, s in ((3, first), (4, last))}
    outcome = conclude(6, 1, records)
    assert outcome.ties == {"the tied parameter embed.weight": {(0, 3): "aa", (1, 4): there}}
    found = Comparing(0, 0).judge(Statements.before(outcome))
    assert (found is None) == (there == "aa")


def test_of_how_a_model_is_set_what_differs_is_named() -> None:
    first = StageSection(0, [lane(0, 0.1)], (), b"", [], [b""], "", settings=bytes(SETTING_BYTES * len(SETTINGS)))
    for k, label in enumerate(SETTINGS):
        changed = bytearray(first.settings)
        changed[SETTING_BYTES * (k + 1) - 1] = 7
        second = structs.replace(first, lanes=[], settings=bytes(changed))
        outcome = conclude(6, 1, {w: Record(0, encode(AgreePayload([s], 0))) for w, s in ((3, first), (4, second))})
        same = {f"how the script has set the model ({one})": "00000000" for one in SETTINGS}
        there = {**same, f"how the script has set the model ({label})": "00000007"}
        assert outcome.ties == {name: {(0, 3): same[name], (0, 4): there[name]} for name in same}
        found = Comparing(0, 0).judge(Statements.before(outcome))
        assert found is not None and found.reason.count("how the script has set the model") == 1
        assert f"({label}) differs" in found.reason


@pytest.mark.parametrize(
    ("digests", "whole"), [(("x", "y", "x"), True), (("x", "", "x"), False), (("x", "y", ""), False)]
)
def test_a_comparison_is_whole_if_all_say_what_they_hold(digests: tuple[str, str, str], whole: bool) -> None:
    stages = (StageSection(0, [], (), b"", [], [b""], ""), StageSection(1, [lane(0, 0.1)], (), b"", [], [b""], ""))
    sections = (stages[0], stages[1], stages[0])
    said = [structs.replace(s, digest=digest) for s, digest in zip(sections, digests, strict=True)]
    outcome = conclude(6, 1, {w: Record(0, encode(AgreePayload([s], 0))) for w, s in enumerate(said)})
    assert Statements.before(outcome).whole == whole
