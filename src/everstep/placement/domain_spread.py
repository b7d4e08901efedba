"""Spread over failure domains: members of a pool sit in different domains, the widest kind first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from everstep.base.domains import WIDTHS, Domains

DomainsOf = Mapping[int, Domains]
"""Labels of workers, by worker id; a missing worker's domains are unknown."""
_Path = tuple[str, ...]
_HOST = WIDTHS.index("host")


@lru_cache(maxsize=4096)
def _paths(domains: Domains) -> tuple[_Path, ...]:
    """Name of the domain at each width down to each one, "" where there is none: domains lie inside one another."""
    labels = dict(domains)
    names = tuple(labels.get(kind, "") for kind in WIDTHS)
    return tuple(names[:depth] for depth in range(1, len(names) + 1))


def prefixes(domains: Domains) -> list[Domains]:
    """Each domain together with those that it lies in, the widest first."""
    return [domains[: depth + 1] for depth in range(len(domains))]


class Crowd:
    """Counts of workers in each domain."""

    def __init__(self, worker_ids: Iterable[int], domains: DomainsOf) -> None:
        self._domains = domains
        self._counts: Counter[_Path] = Counter()
        for worker_id in worker_ids:
            self.add(domains.get(worker_id, ()))

    def add(self, domains: Domains) -> None:
        """Count one more worker, who is in these domains."""
        self._counts.update(_paths(domains))

    def near(self, domains: Domains) -> tuple[int, ...]:
        """Number of counted workers that would die with a worker in these domains, the widest first."""
        return tuple([self._counts[path] for path in _paths(domains)])

    def near_worker(self, worker_id: int) -> tuple[int, ...]:
        """Result of `near` for a worker whose domains are known."""
        return self.near(self._domains.get(worker_id, ()))


def hosts_in_order(worker_ids: Iterable[int], domains: DomainsOf) -> list[list[int]]:
    """Worker ids of each host, ascending. Hosts of one domain, at every width, stand side by side; the domain of the
    first worker comes first."""
    hosts: dict[_Path, list[int]] = {}
    for i in sorted(worker_ids):
        hosts.setdefault(_paths(domains.get(i, ()))[_HOST], []).append(i)
    first: dict[_Path, int] = {}  # by domain; hosts come in the order of their first workers
    for path, there in hosts.items():
        for depth in range(1, len(path) + 1):
            first.setdefault(path[:depth], there[0])
    return [hosts[path] for path in sorted(hosts, key=lambda p: [first[p[:depth]] for depth in range(1, len(p) + 1)])]


def dealt(worker_ids: Iterable[int], pools: int, domains: DomainsOf) -> list[list[int]]:
    """Deal workers to pools so that each domain, of any width, has an equal share in each; the first pools get one more
    if it does not come out even.

    So no domain's death empties a pool if at least `pools` workers are outside of it. That holds for pools of equal
    size: when workers are dealt in the order of domains, any run of workers has equally many in each pool, or one less.
    """
    order = [i for there in hosts_in_order(worker_ids, domains) for i in there]
    return [sorted(order[k::pools]) for k in range(pools)]


def farthest(candidates: Sequence[int], others: Iterable[int], domains: DomainsOf) -> int | None:
    """Candidate that dies with the fewest of the others, the widest domains first; None if there are no candidates."""
    crowd = Crowd(others, domains)
    return min(candidates, key=crowd.near_worker, default=None)
