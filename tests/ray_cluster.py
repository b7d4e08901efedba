"""A Ray cluster on this machine for tests, in a network namespace: Ray listens at the machine's own address.

python ray_cluster.py FILE NODES CPUS     writes {"address", "raylets": [pid, ...]} to FILE; ends with its input
"add" on its input                        one more node; FILE is written again
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

INSIDE = 'ip link set lo up; ip addr add 10.99.0.1/32 dev lo; ip route add default dev lo src 10.99.0.1; exec "$@"'
MARK = "EVERSTEP_TEST_RAY"
STORE_BYTES = 80 << 20
HEALTH = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main() -> None:
    """Start it, and wait."""
    if MARK not in os.environ:
        os.environ[MARK] = "1"
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", INSIDE, "sh", sys.executable, *sys.argv])
    os.environ.update(HEALTH)
    from ray.cluster_utils import Cluster

    path, nodes, cpus = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    cluster = Cluster()
    _add(cluster, num_cpus=0, include_dashboard=False)
    raylets = [_add(cluster, num_cpus=cpus) for _ in range(nodes)]
    _write(path, cluster, raylets)
    for line in sys.stdin:
        if line.strip() == "add":
            raylets.append(_add(cluster, num_cpus=cpus))
            _write(path, cluster, raylets)
    cluster.shutdown()


def _add(cluster: Any, **arguments: Any) -> int:
    """Start a node; a raylet that has not registered in time gets two more tries. Returns its pid."""
    for left in (2, 1, 0):
        try:
            node = cluster.add_node(object_store_memory=STORE_BYTES, **arguments)
            return int(node.all_processes["raylet"][0].process.pid)
        except Exception:
            if not left:
                raise
    return 0


def _write(path: str, cluster: Any, raylets: list[int]) -> None:
    with open(f"{path}.new", "w") as file:
        json.dump({"address": cluster.address, "pid": os.getpid(), "raylets": raylets}, file)
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main()
