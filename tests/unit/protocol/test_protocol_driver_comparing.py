"""What the digests of a step's records show: who differs, and whether it is outvoted."""

from __future__ import annotations

from everstep.protocol.driver.records import StepOutcome, differing


def outcome(
    digests: dict[int, dict[int, str]], ties: dict[str, dict[tuple[int, int], str]] | None = None
) -> StepOutcome:
    return StepOutcome(40, (), {}, 0.0, 1.0, 0.0, 0, {}, digests, ties=ties or {})


def test_nothing_differs() -> None:
    assert differing(outcome({0: {0: "a", 1: "a"}, 1: {2: "b"}}, {"w": {(0, 0): "c", (1, 2): "c"}})) is None
    assert differing(outcome({})) is None


def test_a_minority_is_outvoted_and_named() -> None:
    found = differing(outcome({0: {0: "aaaa", 1: "bbbb", 2: "aaaa"}}))
    assert found is not None
    text, odd = found
    assert odd == {1} and "before step 40 (aaaa at worker 0 and 2, bbbb at worker 1): worker 1 deviates" in text


def test_of_two_copies_none_is_outvoted() -> None:
    for digests in ({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c"}, {0: "a", 1: "b", 2: "a", 3: "b"}):
        found = differing(outcome({1: digests}))
        assert found is not None and found[1] == frozenset() and "stage 1" in found[0]
        assert "no copy is outvoted" in found[0]


def test_copies_of_a_tied_parameter() -> None:
    ties = {"embedding.weight": {(0, 0): "a", (0, 1): "a", (1, 2): "b"}}
    found = differing(outcome({0: {0: "x", 1: "x"}}, ties))
    assert found is not None and found[1] == {2} and "tied parameter embedding.weight" in found[0]
    assert "2 (stage 1) deviates" in found[0]
