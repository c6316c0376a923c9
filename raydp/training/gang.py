"""The workers of one trial by Ray Train. The only module that knows its API.

Ray Train starts the workers together or not at all, connects them (gloo on CPUs, nccl on GPUs), notices when one of
them is gone, and ends the others then. Everything else stays with the run: checkpoints, metrics and ledger are files
of the run directory, and whoever called :func:`train` decides about another attempt, which goes on from them.

What worker 0 yields reaches the caller through a file of the run directory, which all machines share anyway: an item is
visible only after it is written.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray

from raydp._workers import Workers
from raydp.errors import RaydpError
from raydp.training.watchdog import watched

Item = dict[str, Any]
#: What each worker does: its task and its workers -> items; the last has ``done`` and ``state``.
Work = Callable[[str, Workers], Iterator[Item]]

PATIENCE = 1800.0  # seconds that workers may wait for room: an autoscaler needs minutes for a machine
_POLL = 0.1  # seconds between two looks at the file of items
_PREFIX = "workers-"  # of the directory of an attempt
# How Ray Train runs, unless the environment says otherwise. It looks after its workers every two seconds by default,
# which a short trial would wait for at its end. Its watcher of machines that are about to be taken away (a process for
# each trial) gives time for a last checkpoint, and a run makes none between two reports.
_SETTINGS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}


class NoRoom(RaydpError):
    """The workers of a trial did not find room on the cluster in :data:`PATIENCE`."""


class Gone(RaydpError):
    """The workers ended without an outcome: one was killed, or lost its machine, or hung."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many workers train a trial, and what each has.

    Attributes:
        workers: the least and the greatest number of them; Ray Train takes as many as there is room for.
        cpus, gpus: of each.
        time_limit: seconds that a worker may take for an item; None for no limit.
    """

    workers: tuple[int, int]
    cpus: int
    gpus: int
    time_limit: float | None = None


def train(work: Work, task: str, *, scale: Scale, home: Path) -> Iterator[Item]:
    """The items of worker 0; if another worker ends with an outcome of its own, that one is the last.

    Args:
        work: a function that workers can import.
        home: a directory that all machines share; an attempt keeps its files in one of its own below it.

    Raises:
        Gone: the workers ended without an outcome.
        NoRoom: they did not start in :data:`PATIENCE`.
    """
    for left in home.glob(f"{_PREFIX}*"):  # of an attempt whose process died
        shutil.rmtree(left, ignore_errors=True)
    attempt = home / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
    attempt.mkdir(parents=True)
    failures: list[Exception] = []

    def fit() -> None:
        try:
            _fit(work, task, scale, attempt)
        except Exception as error:  # noqa: BLE001 - Ray Train's, told below; a thread has nobody to tell
            failures.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    last: Item | None = None
    read, begun, deadline = 0, False, time.monotonic() + PATIENCE
    while True:
        alive = thread.is_alive()  # asked first, so that nothing is written after the last look
        lines, read = _lines(attempt / _items(0), read)
        for item in lines:
            begun = True
            if item.get("done"):
                last = item
            elif "done" in item:
                yield item
        if not alive:
            break
        if not begun and time.monotonic() > deadline:
            raise NoRoom(
                f"there was no room for {scale.workers[0]} workers of {scale.cpus} CPU + {scale.gpus} GPU in "
                f"{PATIENCE / 60:g} minutes; machines that were there are gone."
            )
        time.sleep(_POLL)
    last = last or _other_outcome(attempt)
    shutil.rmtree(attempt, ignore_errors=True)
    if last is None:
        raise Gone("the workers ended without an outcome") from (failures[0] if failures else None)
    yield last


def _fit(work: Work, task: str, scale: Scale, attempt: Path) -> None:
    from ray import train as ray_train
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            # Another process for each trial, which without a dashboard never ends; release_abandoned does its work.
            found: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]  # as above
            return [callback for callback in found if not isinstance(callback, PlacementGroupCleanerCallback)]

    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    low, high = scale.workers
    Trainer(
        _worker,
        train_loop_config={
            "work": work,
            "task": task,
            "attempt": str(attempt),
            "threads": scale.cpus,
            "time_limit": scale.time_limit,
        },
        scaling_config=ray_train.ScalingConfig(
            num_workers=low if low == high else (low, high),  # type: ignore[arg-type]  # Ray declares version 1
            use_gpu=scale.gpus > 0,
            resources_per_worker={"CPU": scale.cpus, **({"GPU": scale.gpus} if scale.gpus else {})},
        ),
        torch_config=TorchConfig(),  # nccl where workers have GPUs, else gloo
        run_config=ray_train.RunConfig(
            name="train",
            storage_path=str(attempt),  # nothing but a mark by which Ray Train checks that all machines share it
            # Who called decides about another attempt. A machine that is about to be taken away is no failure.
            failure_config=ray_train.FailureConfig(max_failures=0, max_preemption_failures=-1),  # type: ignore[call-arg]
        ),
    ).fit()


def _worker(config: Mapping[str, Any]) -> None:
    """One worker, in a process of Ray Train's."""
    import torch
    from ray.train.torch import get_device

    from raydp.training.workers import Group

    torch.set_num_threads(config["threads"])
    workers = Group(device=get_device().type)
    attempt = Path(config["attempt"])
    file = attempt / _items(workers.rank)
    if workers.rank == 0:
        _write(file, {})
    items = watched(
        cast(Work, config["work"])(config["task"], workers),
        config["time_limit"],
        attempt.parent / f"hang-{workers.rank}.txt",
    )
    for item in items:
        own = item["done"] and item["state"] != "complete"
        if workers.rank == 0 or own:
            _write(file, item)
        if own:
            workers.leave(RaydpError(str(item.get("reason"))))  # so that no other waits for this one
            return


def _items(rank: int) -> str:
    return f"worker-{rank}.jsonl"


def _write(file: Path, item: Item) -> None:
    """One line. A reader takes whole lines only."""
    with open(file, "ab") as stream:
        stream.write(json.dumps(item).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def _lines(file: Path, start: int) -> tuple[list[Item], int]:
    """The items behind the first ``start`` bytes, and how far that is."""
    try:
        with open(file, "rb") as stream:
            stream.seek(start)
            content = stream.read()
    except FileNotFoundError:
        return [], start
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


def _other_outcome(attempt: Path) -> Item | None:
    """The outcome that a worker other than the first came to by itself; the lowest rank's."""
    for file in sorted(attempt.glob(_items("*")), key=lambda path: int(path.stem.rpartition("-")[2])):  # type: ignore[arg-type]
        for item in _lines(file, 0)[0]:
            if item.get("done"):
                return item
    return None


def release_abandoned() -> int:
    """Give back what workers occupied whose trial's process died; the number of groups that are still held.

    Ray Train's own cleaner asks Ray's dashboard, which a cluster need not have, and does not know of a group that still
    waits for its room. The groups of a process that died would stay until the search ends.
    """
    from ray._private.state import state
    from ray._raylet import PlacementGroupID
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    job, held = ray.get_runtime_context().get_job_id(), 0
    for content in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(content)
        if group.state == PlacementGroupTableData.REMOVED or group.creator_job_id.hex() != job:
            continue
        if not group.creator_actor_id.strip(b"\xff"):  # made by the driver: Ray Tune's, which looks after them itself
            continue
        held += 1
        if group.creator_actor_dead:
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))
    return held


__all__ = ["PATIENCE", "Gone", "NoRoom", "Scale", "release_abandoned", "train"]
