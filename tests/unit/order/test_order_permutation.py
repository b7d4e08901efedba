from __future__ import annotations

import pytest

from everstep.base.errors import InvariantViolation
from everstep.order.permutation import MAX_SIZE, SMALL_SIZE, Permutation, index_at


@pytest.mark.parametrize("sizes", [range(1, 400), range(400, 2001, 67), (2000, SMALL_SIZE, SMALL_SIZE + 1, 65537)])
def test_every_index_comes_once(sizes):
    for n in sizes:
        assert sorted(Permutation(5, n % 3, n).run(0, n)) == list(range(n))


def test_known_values():
    """Pinned: another order is another result for every job."""
    assert Permutation(0, 0, 10).run(0, 10) == [7, 0, 8, 9, 1, 4, 5, 2, 3, 6]
    assert Permutation(0, 1, 10).run(0, 10) == [6, 4, 9, 1, 7, 2, 8, 0, 5, 3]
    assert Permutation(1, 0, 10).run(0, 10) == [1, 9, 2, 5, 0, 7, 3, 6, 4, 8]
    assert [index_at(7, 3, 1797, p) for p in (0, 1, 2, 1000, 1796)] == [1429, 1796, 1716, 1115, 1159]
    assert [index_at(2**63 - 1, 12, 5000, p) for p in (0, 1, 4999)] == [3024, 1176, 329]
    assert [index_at(0, 0, 2**40, p) for p in (0, 1, 2**39, 2**40 - 1)] == [
        208375205388,
        108174691828,
        1063184923195,
        546385040533,
    ]
    assert [index_at(0, 0, 2**62, p) for p in (0, 2**62 - 1)] == [1058807812502343192, 4485070139295352815]


@pytest.mark.parametrize("n", [2**20 + 7, 2**31, 10**10, 2**40, MAX_SIZE])
def test_huge_datasets_need_no_memory(n):
    found = [index_at(1, 0, n, p) for p in (*range(200), *range(n - 200, n))]
    assert len(set(found)) == 400 and min(found) >= 0 and max(found) < n


def test_epochs_and_seeds_differ():
    orders = {tuple(Permutation(seed, epoch, 64).run(0, 64)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("n", [3, 5, 7, 12])
def test_positions_are_filled_evenly(n):
    epochs = 3000
    seen = [[0] * n for _ in range(n)]
    for epoch in range(epochs):
        for position, index in enumerate(Permutation(7, epoch, n).run(0, n)):
            seen[position][index] += 1
    expected = epochs / n
    chi_squared = sum((count - expected) ** 2 / expected for row in seen for count in row)
    freedom = (n - 1) ** 2
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5


def test_neighbours_are_scattered():
    n = 1000
    successors = sum(b == a + 1 for e in range(50) for a, b in zip(*(_shifted(Permutation(1, e, n), n)), strict=True))
    assert 20 <= successors <= 85  # 50 expected of a random order


def _shifted(permutation, n):
    order = permutation.run(0, n)
    return order[:-1], order[1:]


def test_run_is_at():
    permutation = Permutation(3, 1, 999)
    assert permutation.run(10, 30) == [permutation.at(p) for p in range(10, 30)]
    assert permutation.run(7, 7) == []


def test_positions_outside_are_a_bug():
    for call in (lambda: index_at(0, 0, 10, 10), lambda: index_at(0, 0, 10, -1), lambda: Permutation(0, 0, 0)):
        with pytest.raises(InvariantViolation):
            call()
