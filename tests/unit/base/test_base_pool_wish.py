from __future__ import annotations

import pytest

from everstep.base.config import device_of, load_config, pool_wish
from everstep.base.errors import ConfigError
from everstep.base.pool_wish import even_homes, make_wish, parse_cut
from everstep.base.stage_map import StageMap, devices_of, hosts_of, parse_map


def test_even_homes():
    assert even_homes(5, 2) == ((0, 1, 2), (3, 4))
    assert even_homes(3, 3) == ((0,), (1,), (2,))
    assert even_homes(2, 5) == ((0,), (0,), (0,), (1,), (1,))
    assert even_homes(1, 3) == ((0,), (0,), (0,))


@pytest.mark.parametrize(
    ("values", "workers"),
    [
        ({}, 1),
        ({"stages": 3}, 3),
        ({"stages": 3, "pool": 2}, 6),
        ({"stages": 3, "redundancy": 2}, 9),
        ({"redundancy": 1}, 2),
        ({"stages": 3, "workers": 2}, 2),
        ({"stages": 2, "map": [{"workers": [3, 0]}, {"leader": 1, "backups": [2]}]}, 4),
    ],
)
def test_the_number_of_workers_follows_from_the_pools(values, workers):
    assert load_config([("x", values)]).workers == workers


def test_a_map_says_who_leads_and_who_stands_by():
    config = load_config(
        [
            (
                "x",
                {
                    "stages": 2,
                    "map": [
                        {"units": [0, 3], "leader": 2, "backups": [{"worker": 0, "role": "standby"}]},
                        {"units": [4, 9], "leader": 1, "backups": [{"worker": 3}]},
                    ],
                },
            )
        ]
    )
    wish = pool_wish(config)
    assert wish.homes == ((0, 2), (1, 3)) and wish.active == (1, 2)
    assert wish.standby == (0,) and wish.leaders == (2, 1)
    assert wish.homes_of(3) == (1,) and wish.homes_of(9) == () and wish.size(0) == 2


def test_workers_of_a_map_have_no_named_leader():
    assert parse_map([{"workers": [4, 1], "units": [[0, 1], [4, 5]]}], 1) == (StageMap(((0, 1), (4, 5)), (4, 1)),)
    assert make_wish(2, 1, None, parse_map([{"workers": [1, 0]}], 1)).leaders == ()


@pytest.mark.parametrize(
    ("value", "stages", "message"),
    [
        ("m.yaml", 1, "map: expected a list with one entry per stage, got 'm.yaml'"),
        ([{"workers": [0]}], 2, "map: expected 2 entries, one per stage, got 1"),
        ([3], 1, "map: stage 0: expected keys such as 'workers', got 3"),
        ([{"worker": [0]}], 1, "map: stage 0: unknown key 'worker'"),
        ([{"workers": []}], 1, "map: stage 0: expected worker ids, got workers []: name at least one"),
        ([{"workers": [0]}, {"units": [0, 1]}], 2, "map: stage 1 has no workers, but others have"),
        ([{"workers": [0]}, {"workers": [0]}], 2, "map: worker 0 is named twice, in stages 0 and 1"),
        ([{"workers": [2, 2]}], 1, "map: worker 2 is named twice, in stage 0"),
        ([{"workers": [True]}], 1, "map: stage 0: a worker is a number from 0, got True"),
        ([{"workers": [0], "leader": 0}], 1, "map: stage 0: expected either 'workers', or 'leader' and 'backups'"),
        ([{"backups": [1]}], 1, "map: stage 0: has backups and no leader"),
        ([{"leader": 0, "backups": [{"worker": 1, "role": "idle"}]}], 1, "role is active or standby, got 'idle'"),
        ([{"leader": 0, "backups": [{"id": 1}]}], 1, "expected a backup such as {worker: 3, role: standby}"),
        ([{"units": [3, 1]}], 1, "map: stage 0: expected units as [first, last]"),
    ],
)
def test_bad_maps_are_refused_in_one_line(value, stages, message):
    with pytest.raises(ConfigError) as caught:
        parse_map(value, stages)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_map_says_hosts_and_devices():
    value = [
        {
            "leader": {"host": "a", "device": "cuda:0"},
            "backups": [{"host": "a", "device": "cuda:1", "role": "standby"}],
        },
        {"hosts": ["a", "b"], "device": "cuda:2"},
    ]
    first, second = parse_map(value, 2)
    assert (first.workers, first.leader, first.standby) == ((0, 1), 0, (1,)) and second.workers == (2, 3)
    assert devices_of((first, second)) == {0: "cuda:0", 1: "cuda:1", 2: "cuda:2", 3: "cuda:2"}
    assert hosts_of((first, second)) == {0: "a", 1: "a", 2: "a", 3: "b"}
    (only,) = parse_map([{"workers": [1, {"worker": 0, "host": "b"}], "host": "a", "devices": ["cuda:1", "cuda:0"]}], 1)
    assert devices_of((only,)) == {1: "cuda:1", 0: "cuda:0"} and hosts_of((only,)) == {1: "a", 0: "b"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"workers": [0], "hosts": ["a"]}], "expected either 'workers', or 'hosts', got both"),
        ([{"hosts": []}], "expected host names, got hosts []: name at least one host"),
        ([{"hosts": ["a"], "backups": [1]}], "expected either 'hosts', or 'leader' and 'backups', got both"),
        ([{"leader": "a", "backups": [1]}], "worker 1 is named by its id and another by its host 'a' alone"),
        ([{"workers": [0, 1], "devices": ["cpu"]}], "stage 0: expected 2 devices, one per worker, got 1"),
        ([{"workers": [0], "device": "gpu"}], "a device is cpu, cuda or cuda:0 and so on, got 'gpu'"),
        ([{"device": "cpu"}], "stage 0: has a device and no workers"),
        ([{"workers": [{"worker": 0, "role": "standby"}]}], "expected a worker such as {worker: 3, device: cuda:1}"),
    ],
)
def test_bad_hosts_and_devices_are_refused_in_one_line(value, message):
    with pytest.raises(ConfigError) as caught:
        parse_map(value, 1)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_all_workers_have_one_kind_of_device():
    with pytest.raises(ConfigError, match="got cuda:0 for worker 1 and device cpu"):
        load_config([("x", {"map": [{"workers": [0, 1], "devices": ["cpu", "cuda:0"]}]})])
    config = load_config([("x", {"device": "cuda", "map": [{"workers": [0, 1], "devices": ["cuda:0", "cuda:1"]}]})])
    assert [device_of(config, i) for i in range(3)] == ["cuda:0", "cuda:1", "cuda"]
    assert [device_of(config, 1, cell_rank) for cell_rank in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert device_of(config, 2, 1) == "cuda"


def test_where_to_cut():
    assert parse_cut("measured", 3) == "measured" and parse_cut([1, 2], 2) == (1, 2) and parse_cut([3], 1) == (3,)
    for value, words in (("best", "expected auto, counted, measured"), ([1, 0], "got"), ([1, 2], "expected 3 sizes")):
        with pytest.raises(ConfigError, match=words):
            parse_cut(value, 3)
    for values in ({"map": [{"units": [0, 1]}], "cut": [2]}, {"stages": 2, "meta_init": True, "cut": "measured"}):
        with pytest.raises(ConfigError, match=r"^cut: "):
            load_config([("x", values)])
