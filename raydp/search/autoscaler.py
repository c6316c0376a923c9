"""Whether the connected cluster has an autoscaler, which may bring nodes that are not there yet.

Ray says so in two places, neither of which is a documented interface: its first autoscaler writes a status into the
cluster's store, whose nodes are of types that somebody configured (a cluster without one reports types ``node_<id>``);
its second reports a numbered state. Neither says how large the cluster may become.
"""

from __future__ import annotations

import json

import ray

_UNCONFIGURED = "node_"


def present() -> bool:
    """Whether an autoscaler has reported to the connected cluster. One that started seconds ago may not have yet."""
    return _first() or _second()


def _first() -> bool:
    from ray.experimental.internal_kv import _internal_kv_get

    status = _internal_kv_get("__autoscaling_status")
    if not status:
        return False
    types = (json.loads(status).get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(not str(kind).startswith(_UNCONFIGURED) for kind in types.values())


def _second() -> bool:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]

    reply = GetClusterStatusReply()
    reply.ParseFromString(GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status(timeout_s=10))
    return bool(reply.autoscaling_state.autoscaler_state_version > 0)


__all__ = ["present"]
