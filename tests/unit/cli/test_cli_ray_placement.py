"""Which placement groups are asked for, on a cluster that places a group at once or not at all."""

from __future__ import annotations

import signal
import sys
from collections.abc import Hashable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from everstep.cli.engines import ray_cluster
from everstep.cli.engines.launch import Launch, completed
from everstep.cli.engines.ray_placement import ALL_AT_ONCE_S, RayBundle, RayPlaces


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
    assert places.look(ALL_AT_ONCE_S) == [] and not places.alone and len(cluster.groups) == 1
    assert sorted(where(cluster, places, 3)) == ["a", "b", "c"]
    places.lost(1)
    assert places.look(ALL_AT_ONCE_S) == [1] and len(cluster.groups) == 1
    places.close()
    assert not cluster.groups


def test_nobody_begins_before_so_many_may() -> None:
    cluster = Cluster(a=1.0, b=1.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 3, 3, 0.0)
    assert settle(places, 100 * ALL_AT_ONCE_S) == [] and not places.alone
    cluster.cpus["c"] = 1.0
    assert places.look(101 * ALL_AT_ONCE_S) == [0, 1, 2]


def test_who_has_a_node_begins_and_the_others_come_later() -> None:
    cluster = Cluster(a=1.0, b=1.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 4, 1, 0.0)
    assert settle(places, ALL_AT_ONCE_S - 1) == []
    assert settle(places, ALL_AT_ONCE_S) == [0, 1] and places.alone
    cluster.cpus["c"] = 1.0
    assert settle(places, ALL_AT_ONCE_S) == [2]
    cluster.cpus["d"] = 1.0
    assert settle(places, ALL_AT_ONCE_S) == [3]
    assert where(cluster, places, 4) == ["a", "b", "c", "d"]


def test_never_two_on_one_node_however_much_room_it_has() -> None:
    cluster = Cluster(a=64.0, b=64.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 4, 1, 0.0)
    assert settle(places, ALL_AT_ONCE_S) == [0, 1]
    cluster.cpus["c"] = 64.0
    assert settle(places, ALL_AT_ONCE_S) == [2]
    cluster.cpus["d"] = 64.0
    assert settle(places, ALL_AT_ONCE_S) == [3]
    assert where(cluster, places, 4) == ["a", "b", "c", "d"]


def test_who_waits_does_not_wait_for_a_node_that_is_no_more() -> None:
    cluster = Cluster(a=64.0, b=64.0)
    places = RayPlaces(cluster, {"CPU": 1.0}, 3, 1, 0.0)
    assert settle(places, ALL_AT_ONCE_S) == [0, 1]
    del cluster.cpus["b"]
    places.lost(1)
    cluster.cpus.pop("b", None)
    assert settle(places, ALL_AT_ONCE_S) == []
    cluster.cpus.update(c=64.0, d=64.0)
    assert settle(places, ALL_AT_ONCE_S) == [1, 2]
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
        RayTaskError = LookupError

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
    driver._running, driver._begin = {1: 137}, lambda number, now_s: pytest.fail("it begins")
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


class Calls(Ray):
    """Calls of actors, the newest of each host by its name: what a call answers or raises is set in the test."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, str], Call] = {}

    def remote(self, **room: float) -> Any:
        def made(number: int) -> Any:
            return SimpleNamespace(where=Method(self, number, "where"), run=Method(self, number, "run"))

        return lambda kind: SimpleNamespace(options=lambda **how: SimpleNamespace(remote=made))

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")

    def wait(self, calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call.answer is not None], []

    def get(self, call: Any, timeout: float | None = None) -> Any:
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer


class Call:
    def __init__(self) -> None:
        self.answer: Any = None


class Method(NamedTuple):
    ray: Calls
    number: int
    name: str

    def remote(self, *args: Any) -> Call:
        return self.ray.calls.setdefault((self.number, self.name), Call())


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def called(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver on a cluster whose first host has been asked for its address; by `answers` a call is over."""
    strategies: Any = ModuleType("strategies")
    strategies.PlacementGroupSchedulingStrategy = tuple_of
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(ray_cluster, "time", Clock())
    driver._ray, driver._actors = Calls(), {}

    def answers(number: int, name: str, answer: Any) -> Any:
        driver._ray.calls.pop((number, name)).answer = answer
        return driver._turn()

    driver.answers = answers
    assert driver._turn() is None and (0, "where") in driver._ray.calls
    return driver


def tuple_of(*words: Any) -> Any:
    return words


@only_with_etcd
@pytest.mark.parametrize(("code", "over"), [(64, 0), (65, 1), (0, 0)])
def test_the_job_ends_though_the_first_host_finds_no_node_again(called: Any, code: int, over: int) -> None:
    assert called.answers(0, "where", ("10.0.0.2", 7)) is None and called._job_at == "10.0.0.2:7"
    assert called._turn() is None and called.answers(0, "run", KeyError()) is None
    ray_cluster.time.sleep(1.0)
    assert called._turn() is None and called._turn() is None
    ray_cluster.time.sleep(1.0)
    assert called._turn() is None and (0, "where") in called._ray.calls, "it is asked, and does not answer"
    found = called.answers(1, "run", code)
    assert (called._turn() if found is None else found) == over


@pytest.mark.parametrize("lost", [KeyError(), LookupError("OSError: [Errno 28] No space left on device")])
@pytest.mark.parametrize("call", ["where", "run"])
def test_a_lost_actor_begins_again_later_and_later(
    called: Any, lost: Exception, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that could not do what it was asked: on a node where a worker of Ray cannot begin, say."""
    capsys.readouterr()
    for delay_s in (1, 2, 4):
        if call == "run":
            assert called.answers(0, "where", ("10.0.0.2", 7)) is None
        assert called.answers(0, call, lost) is None and called._turn() is None
        assert (0, "where") not in called._ray.calls
        assert f"host 0 cannot be reached: again in {delay_s} s" in (said := capsys.readouterr().err)
        assert ("No space left" in said) == (type(lost) is LookupError)
        called._ray.calls.clear()
        ray_cluster.time.sleep(delay_s)
        assert called._turn() is None and (0, "where") in called._ray.calls


@only_with_etcd
def test_the_job_goes_on_if_all_were_lost_and_is_over_if_all_were_refused(driver: Any) -> None:
    begun: list[int] = []
    driver._begin = lambda number, now_s: begun.append(number)
    driver._launch = driver._launch._replace(settings=("hosts.wait_s=0",))
    assert driver._turn() is None and begun == [0, 1]
    driver._running = {1: 1}
    assert driver._ended(1) is None
    driver._due[1] = 0.0
    assert driver._turn() is None and begun == [0, 1, 1]
    assert driver._turn() is None, "their actors are lost"
    driver._running = {0: 2, 1: 2}
    assert driver._ended(0) is None and driver._ended(1) is None
    assert driver._turn() == 2
