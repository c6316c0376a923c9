"""A head without CPUs whose autoscaler starts and ends nodes on this machine: Ray's fake multi-node provider.

``ray.cluster_utils.AutoscalingCluster`` begins with ``ray stop --force``, which ends every Ray on the machine, and its
example configuration is not in the wheel. So the same head is started here, with ports and a directory of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ray._private.services import get_node_ip_address
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from tests.cluster.heads import free_port

_PATIENCE = 120.0


def _config(address: str, workers: Mapping[str, float], *, most: int) -> dict[str, Any]:
    resources = {**workers, "object_store_memory": 100_000_000}
    return {
        "cluster_name": "fake",
        "max_workers": most,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "auth": {},
        "no_restart": False,
        **{f"{name}_commands": [] for name in ("initialization", "setup", "head_setup", "worker_setup")},
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


@contextmanager
def autoscaling_head(workers: Mapping[str, float], *, most: int = 2) -> Iterator[str]:
    """The address of a head without CPUs that may grow by ``most`` workers with these resources."""
    directory = Path(tempfile.mkdtemp(prefix="as-", dir="/tmp"))  # short: sockets lie below it
    port = free_port()
    address = f"{get_node_ip_address()}:{port}"
    (directory / "config.json").write_text(json.dumps(_config(address, workers, most=most)))
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(directory),
        "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }
    environment.pop("RAY_ADDRESS", None)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--num-cpus=0"]
    command += [f"--autoscaling-config={directory / 'config.json'}", "--include-dashboard=false", "--block"]
    command += ["--disable-usage-stats", "--object-store-memory=100000000"]
    with (directory / "log").open("wb") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    root = psutil.Process(started.pid)
    try:
        deadline = time.monotonic() + _PATIENCE
        while b"This command will now block" not in (directory / "log").read_bytes():
            assert started.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        everything = [*root.children(recursive=True), root]  # the nodes too: the autoscaler started them
        for process in everything:
            try:
                process.terminate()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(everything, timeout=20)
        for process in alive:
            process.kill()  # psutil refuses if the id belongs to another process by now
        started.wait(_PATIENCE)
        shutil.rmtree(directory, ignore_errors=True)
