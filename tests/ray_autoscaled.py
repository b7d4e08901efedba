"""A Ray cluster for tests whose autoscaler starts its nodes on this machine, when a gate lets them come; in network and
process namespaces of its own, with which all of it ends.

python ray_autoscaled.py FOLDER NODES     so many nodes of one slot are there by themselves, more come as there is need
FOLDER/up                                 is there once the head is
FOLDER/gate                               further nodes start while this is there, as a cloud has machines or has none
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_TYPE, FakeMultiNodeProvider

from ray_cluster import HEALTH, INSIDE, MARK, STORE_BYTES

ADDRESS = "10.99.0.1:6379"
_AT_MOST = 8
_HEAD_ID = "f" * 51 + "00000"
_COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
_LAUNCH = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")


def main() -> None:
    """Start it, and wait for the end of the input."""
    if MARK not in os.environ:
        os.environ[MARK] = "1"
        apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvp("unshare", [*apart, "sh", "-c", INSIDE, "sh", sys.executable, *sys.argv])
    folder, nodes = Path(sys.argv[1]), int(sys.argv[2])
    (folder / "config.yaml").write_text(json.dumps(config(folder, nodes)))  # which is YAML, too
    more = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": _HEAD_ID}
    more |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    words = ["start", "--head", f"--autoscaling-config={folder / 'config.yaml'}", "--num-cpus=0", "--port=6379"]
    words += [f"--object-store-memory={STORE_BYTES}", "--include-dashboard=false", f"--temp-dir={folder / 'r'}"]
    subprocess.run([*_LAUNCH, *words], env={**os.environ, **HEALTH, **more}, check=True, stdin=subprocess.DEVNULL)
    (folder / "up").touch()
    sys.stdin.read()


def config(folder: Path, nodes: int) -> dict[str, Any]:
    """Of the autoscaler. The package of Ray lacks the file with what it takes for granted of its own fake provider."""
    kind = {"resources": {"CPU": 1, "object_store_memory": STORE_BYTES}, "node_config": {}}
    return {
        "cluster_name": "everstep",
        "max_workers": _AT_MOST,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 1.0,
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{f"{name}_commands": [] for name in _COMMANDS},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "provider": {
            "type": "external",
            "module": "ray_autoscaled.Gated",
            "gcs_address": ADDRESS,
            "head_node_id": _HEAD_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gate": str(folder / "gate"),
            "at_once": nodes,
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {**kind, "min_workers": nodes, "max_workers": _AT_MOST},
        },
    }


class Gated(FakeMultiNodeProvider):  # type: ignore[misc]
    """Ray's own provider for one machine, but for the gate."""

    def __init__(self, settings: dict[str, Any], name: str) -> None:
        super().__init__(settings, name)
        self._made = 0
        self._one_by_one = threading.Lock()

    def create_node_with_resources_and_labels(self, *words: Any) -> None:
        """Start one more; further ones once the gate is there."""
        with self._one_by_one:
            while self._made >= self.provider_config["at_once"] and not os.path.exists(self.provider_config["gate"]):
                time.sleep(0.1)
            super().create_node_with_resources_and_labels(*words)
            self._made += 1


if __name__ == "__main__":
    main()
