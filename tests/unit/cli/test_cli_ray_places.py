"""Which placement groups are asked for, on a cluster that places a group at once or not at all."""

from __future__ import annotations

import signal
from collections.abc import Hashable
from typing import Any

import pytest

from everstep.cli.engines import ray_cluster
from everstep.cli.engines.launch import Launch, completed
from everstep.cli.engines.ray_placement import GATHER_S, RayBundle, RayPlaces


class Cluster:
    """Nodes by address, with so many CPUs; a group's bundles go to different ones, the fullest first that has room."""

    def __init__(self, **nodes: float) -> None:
        self.cpus = dict(nodes)
        self.groups: dict[int, list[RayBundle]] = {}
        self._placed: dict[int, list[str]] = {}
        self._names = iter(range(1000))

    def make(self, bundles: list[RayBundle]) -> Hashable:
        number = next(self._names)
        self.groups[number], self._placed[number] = bundles, []
        return number

    def nodes(self, group: Hashable) -> list[tuple[str, str]]:
        assert isinstance(group, int)
        bundles = self.groups[group]
        placed = self._placed[group] = self._placed[group] or self._place(bundles)
        return [(f"id of {name}", name) if name in self.cpus else ("", "") for name in placed or [""] * len(bundles)]

    def remove(self, group: Hashable) -> None:
        assert isinstance(group, int)
        for bundle, name in zip(self.groups.pop(group), self._placed.pop(group), strict=False):
            self.cpus[name] = self.cpus.get(name, 0.0) + bundle.get("CPU", 0.0)

    def _place(self, bundles: list[RayBundle]) -> list[str]:
        chosen: list[str] = []
        for bundle in sorted(bundles, key=lambda one: "CPU" in one):  # those that go to one node alone are first
            fit = [name for name, cpus in self.cpus.items() if name not in chosen and _fits(bundle, name, cpus)]
            if not fit:
                return []
            chosen.append(min(fit, key=lambda name: (self.cpus[name], name)))
        for bundle, name in zip(sorted(bundles, key=lambda one: "CPU" in one), chosen, strict=True):
            self.cpus[name] -= bundle.get("CPU", 0.0)
        return [chosen[-1], *chosen[:-1]] if len(bundles) > 1 and "CPU" not in bundles[-1] else chosen


def _fits(bundle: RayBundle, name: str, cpus: float) -> bool:
    return all(cpus >= much if what == "CPU" else what == f"node:{name}" for what, much in bundle.items())


def where(cluster: Cluster, places: RayPlaces, hosts: int) -> list[str]:
    found = []
    for number in range(hosts):
        group, index = places.of(number)
        found.append(cluster.nodes(group)[index][1])
    return found


def settle(places: RayPlaces, now_s: float) -> list[int]:
    """All that come until nothing changes."""
    return [number for _ in range(20) for number in places.look(now_s)]


def test_one_group_where_there_are_nodes_for_all() -> None:
    cluster = Cluster(a=4.0, b=4.0, c=4.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 3, 1, 0.0)
    assert places.look(0.0) == [0, 1, 2]
    assert places.look(GATHER_S) == [] and not places.alone and len(cluster.groups) == 1
    assert sorted(where(cluster, places, 3)) == ["a", "b", "c"]
    places.lost(1)
    assert places.look(GATHER_S) == [1] and len(cluster.groups) == 1
    places.close()
    assert not cluster.groups


def test_nobody_begins_before_so_many_may() -> None:
    cluster = Cluster(a=1.0, b=1.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 3, 3, 0.0)
    assert settle(places, 100 * GATHER_S) == [] and not places.alone
    cluster.cpus["c"] = 1.0
    assert places.look(101 * GATHER_S) == [0, 1, 2]


def test_who_has_a_node_begins_and_the_others_come_later() -> None:
    cluster = Cluster(a=1.0, b=1.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 4, 1, 0.0)
    assert settle(places, GATHER_S - 1) == []
    assert settle(places, GATHER_S) == [0, 1] and places.alone
    cluster.cpus["c"] = 1.0
    assert settle(places, GATHER_S) == [2]
    cluster.cpus["d"] = 1.0
    assert settle(places, GATHER_S) == [3]
    assert where(cluster, places, 4) == ["a", "b", "c", "d"]


def test_never_two_on_one_node_however_much_room_it_has() -> None:
    cluster = Cluster(a=64.0, b=64.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 4, 1, 0.0)
    assert settle(places, GATHER_S) == [0, 1]
    cluster.cpus["c"] = 64.0
    assert settle(places, GATHER_S) == [2]
    cluster.cpus["d"] = 64.0
    assert settle(places, GATHER_S) == [3]
    assert where(cluster, places, 4) == ["a", "b", "c", "d"]


def test_who_waits_does_not_wait_for_a_node_that_is_no_more() -> None:
    cluster = Cluster(a=64.0, b=64.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 3, 1, 0.0)
    assert settle(places, GATHER_S) == [0, 1]
    del cluster.cpus["b"]
    places.lost(1)
    cluster.cpus.pop("b", None)
    assert settle(places, GATHER_S) == []
    cluster.cpus.update(c=64.0, d=64.0)
    assert settle(places, GATHER_S) == [1, 2]
    assert where(cluster, places, 3) == ["a", "c", "d"]


class Actor:
    """What is told to a host's process."""

    def __init__(self) -> None:
        self.told: list[int] = []

    @property
    def tell(self) -> Actor:
        return self

    def remote(self, number: int) -> None:
        self.told.append(number)


class Ray:
    """A reference to the end of a process is its exit code."""

    class exceptions:
        RayActorError = KeyError

    def get(self, code: int, timeout: float | None = None) -> int:
        return code

    def kill(self, actor: Actor) -> None:
        pass


@pytest.fixture(params=["", "etcd://10.0.0.1/jobs/a"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ray_cluster, "_RayGroups", lambda ray: Cluster(a=1, b=1))
    monkeypatch.setattr(ray_cluster, "_LOOK_S", 0.0)
    launch = Launch("n", "t", (), (), 2, 1, "/r", "", etcd=request.param)
    found: Any = ray_cluster._Driver(Ray(), launch, b"t" * 16, 0, 1)
    found._actors = {0: Actor(), 1: Actor()}
    return found


only_with_etcd = pytest.mark.parametrize("driver", ["etcd://10.0.0.1/jobs/a"], indirect=True)


def test_the_end_of_the_first_host_is_the_job_s_where_no_other_may_lead(driver: Any) -> None:
    """It finds no head, say. Where another may lead it begins again, also if nobody here has told it to end."""
    for code in (4, 143, 1):
        driver._running = {0: code, 1: 0}
        assert driver._ended(0) == (None if driver._launch.etcd else code)
        assert (driver._due.pop(0, None) is not None) == bool(driver._launch.etcd)
    driver._running = {1: 143}
    assert driver._ended(1) is None and 1 in driver._due
    driver._running = {1: 0}
    assert driver._ended(1) is None and completed(driver._hosts) == bool(driver._launch.etcd), "or it has left"


@only_with_etcd
def test_the_end_of_the_host_that_leads_is_the_job_s(driver: Any) -> None:
    """It is waited for when another one says that the job is complete, and nothing begins again."""
    driver._running = {0: 1, 1: 66}
    assert driver._ended(0) is None and driver._ended(1) == 2
    driver._running = {0: 0, 1: 65}
    assert driver._ended(0) is None and driver._ended(1) == 1
    driver._running, driver._begin = {1: 137}, lambda number, **how: pytest.fail("it begins")
    assert driver._ended(1) is None
    driver._due[1] = 0.0
    assert driver._turn() == 0


@only_with_etcd
def test_a_signal_ends_the_others_when_the_first_does_not_run(driver: Any) -> None:
    driver._running = {1: 143}
    driver._tell(signal.SIGINT)
    assert driver._turn() == 130 and driver._last(130) == 130
    assert driver._actors[1].told == [signal.SIGTERM]


def test_a_second_signal_ends_all(driver: Any) -> None:
    """The first host does not answer, say."""
    driver._running = {0: 143, 1: 143}
    driver._places.alone = True
    for _ in range(2):
        driver._tell(signal.SIGTERM)
    assert driver._turn() == 143 and driver._last(143) == 143
    assert driver._actors[1].told == [signal.SIGTERM]


@only_with_etcd
def test_the_job_goes_on_if_all_were_lost_and_is_over_if_all_were_refused(driver: Any) -> None:
    begun: list[tuple[int, bool]] = []
    driver._begin, driver._running = lambda number, leads: begun.append((number, leads)), {1: 1}
    assert driver._ended(1) is None
    driver._due[1] = 0.0
    assert driver._turn() is None and begun == [(0, True), (1, False)]
    assert driver._turn() is None, "their actors are lost"
    driver._running = {0: 2, 1: 2}
    assert driver._ended(0) is None and driver._ended(1) is None
    assert driver._turn() == 2
