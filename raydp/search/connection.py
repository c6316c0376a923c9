"""The Ray cluster that a search runs on: connected or started, and fit for the search before anything is spent."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import ray

from raydp.errors import InvalidValue, RaydpError
from raydp.search import autoscaler
from raydp.search.capacity import Node, fit
from raydp.search.definition import Search


@contextlib.contextmanager
def connected(search: Search, address: str | None, *, tracking_uri: str | None) -> Iterator[None]:
    """A Ray cluster: the one that is connected already, the one at ``address``, or a local one of our own.

    Raises:
        InvalidValue: there is no cluster at the address, or one of other versions, or of several machines while the
            tracker is a file.
    """
    if ray.is_initialized():
        _check_tracker(tracking_uri)
        yield
        return
    # Ray warns about a coming default for processes without GPUs; keeping today's behaviour is what we mean.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # token authentication is on, as wanted
    if address is not None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _refused(address, str(error)) from error
    else:
        ray.init(
            address="local",  # one of our own, also where another one runs on this machine
            num_cpus=search.resources.total_cpus or os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        if address is not None:
            _check_tracker(tracking_uri)
        yield
    finally:
        ray.shutdown()


def _refused(address: str, reason: str) -> InvalidValue:
    """Why Ray does not connect, with what to do."""
    if "Version mismatch" not in reason:
        first = (reason.splitlines() or ["it does not answer"])[0]
        return InvalidValue(
            "address", address, f"must be a running Ray cluster ({first})", "Start one with `ray start --head`."
        )
    said = [line.strip() for line in reason.splitlines() if line.strip().startswith(("Ray:", "Python:"))]
    there, here = ", ".join(said[:2]), ", ".join(said[2:])
    return InvalidValue(
        "address",
        address,
        f"must be a cluster of this machine's versions: it has {there}; this machine has {here}",
        "Start the search with the cluster's versions, or the cluster with these. Nothing was sent.",
    )


def _check_tracker(uri: str | None) -> None:
    """Raises InvalidValue: the tracker is a SQLite file, and the run directory lies on a disk that machines share."""
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(machines) > 1 and (uri is None or uri.startswith("sqlite")):
        raise InvalidValue(
            "tracking_uri",
            "sqlite in the run directory" if uri is None else uri,
            f"must be a server for a cluster of {len(machines)} machines: SQLite's locks do not hold on a shared disk",
            "Start `mlflow server --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1` on the machine of the "
            "driver, say, and give its address: --tracking-uri http://127.0.0.1:5000.",
        )


class ClusterLost(RaydpError):
    """The Ray cluster is gone while a search runs on it."""


class Presence:
    """Notices that the cluster is gone.

    Args:
        patience: seconds without a living node after which it counts as gone.
        every: seconds between two looks.
    """

    def __init__(self, patience: float = 20.0, every: float = 2.0) -> None:
        self._patience, self._every = patience, every
        self._next = self._last = time.monotonic()

    def check(self) -> None:
        """Raises ClusterLost."""
        now = time.monotonic()
        if now < self._next:
            return
        if present():
            self._last = now
        elif now - self._last > self._patience:
            raise ClusterLost(
                f"The Ray cluster is gone: no node of it has answered for {now - self._last:.0f} seconds. Trials go on "
                "from their checkpoints."
            )
        self._next = time.monotonic() + self._every


@contextlib.contextmanager
def head_watched(tell: Callable[[str], None], *, patience: float = 10.0, every: float = 2.0) -> Iterator[None]:
    """Say, once, when the head of the cluster does not answer for ``patience`` seconds.

    Ray waits for it in the middle of a call, and then ends this process without giving Python the word. So a thread
    says beforehand what to do. A head that is back in time, with its state (Ray's fault-tolerant GCS), is used again.
    """
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    done = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not done.wait(every):
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=every).close()
                last = time.monotonic()
            except OSError:
                if time.monotonic() - last > patience:
                    tell(f"The head of the Ray cluster ({host}:{port}) does not answer; Ray soon ends this process.")
                    return

    thread = threading.Thread(target=watch, name="raydp-head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def present() -> bool:
    """Whether a node of the connected cluster is alive."""
    try:
        return any(node["Alive"] for node in ray.nodes())
    except (ConnectionError, ray.exceptions.RayError):
        return False


def concurrency(search: Search) -> int:
    """How many trials run at once on the connected cluster, or on what its autoscaler can make of it.

    Raises:
        InvalidValue: not a single trial fits; the arithmetic is shown.
    """
    wanted = search.resources
    there, possible = _nodes(), _possible_nodes()
    more = sum(node.workers(wanted) for node in possible) > sum(node.workers(wanted) for node in there)
    try:
        return fit(possible if more else there, wanted).trials
    except InvalidValue:
        # An autoscaler adds nodes for what waits, so trials have to wait: as many as are wanted at once. Most of them
        # do not say what they may add.
        if autoscaler.present():
            return wanted.max_concurrent or 1
        raise


def _nodes() -> list[Node]:
    return [
        Node(cpus=node["Resources"].get("CPU", 0), gpus=node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _possible_nodes() -> list[Node]:
    """What the cluster's autoscaler may make of it, where it has one that says so."""
    from ray._private.state import state

    config = state.get_cluster_config()
    groups = () if config is None else config.node_group_configs
    return [
        Node(cpus=group.resources.get("CPU", 0), gpus=group.resources.get("GPU", 0), count=max(0, group.max_count))
        for group in groups
    ]


__all__ = ["ClusterLost", "Presence", "concurrency", "connected", "head_watched", "present"]
