"""What fits a cluster: how many trials run at once, by arithmetic that is shown. Nothing here knows Ray.

A trial is trained by workers, all of one size. A worker lies on one node; the workers of a trial may lie on several.
All of them start together or not at all, so what is not free is waited for and never taken in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.search.definition import Resources


@dataclass(frozen=True, kw_only=True)
class Node:
    """What one machine of a cluster has, or ``count`` equal ones that an autoscaler may add.

    Attributes:
        cpus, gpus: that Ray may give away there.
        count: of nodes.
    """

    cpus: float
    gpus: float = 0.0
    count: int = 1

    def __post_init__(self) -> None:
        _validate.between("node.cpus", self.cpus, 0, 2**20)
        _validate.between("node.gpus", self.gpus, 0, 2**20)
        _validate.integer("node.count", self.count, low=0)

    def workers(self, wanted: Resources) -> int:
        """How many workers of this size fit these nodes."""
        fits = int(self.cpus // wanted.cpus_per_worker)
        if wanted.gpus_per_worker:
            if wanted.gpus_per_worker >= 1:
                by_gpu = int(self.gpus // wanted.gpus_per_worker)
            else:  # a fraction is a part of one GPU: a third worker of 0.6 finds no room on two GPUs
                by_gpu = int(self.gpus) * int(1 / wanted.gpus_per_worker + 1e-9)
            fits = min(fits, by_gpu)
        return fits * self.count

    def __str__(self) -> str:
        times = "" if self.count == 1 else f"{self.count} x "
        return f"{times}{self.cpus:g} CPU + {self.gpus:g} GPU"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a search fits a cluster.

    Attributes:
        workers: that fit all nodes together.
        trials: that run at once.
        arithmetic: how that number comes about, for people.
    """

    workers: int
    trials: int
    arithmetic: str


def fit(nodes: Sequence[Node], wanted: Resources) -> Fit:
    """How many trials run at once on these nodes.

    Raises:
        InvalidValue: not a single trial fits; the arithmetic is shown.
    """
    workers = sum(node.workers(wanted) for node in nodes)
    low, high = wanted.workers
    # An elastic trial that cannot have all the workers that it may have goes on with those that there are.
    trials = max(workers // high, 1 if workers >= low else 0)
    have = ", ".join(map(str, nodes)) or "none"
    size = f"{wanted.cpus_per_worker} CPU + {wanted.gpus_per_worker:g} GPU"
    if trials == 0:
        lacking = wanted.gpus_per_worker > 0 and not any(node.gpus for node in nodes)
        raise InvalidValue(
            "resources",
            f"{low} worker{'' if low == 1 else 's'} of {size} a trial",
            f"must fit the cluster, whose nodes have: {have}, which is room for {workers} such worker"
            + ("" if workers == 1 else "s"),
            "There are no GPUs: set resources.gpus_per_worker to 0, or start Ray on machines that have some."
            if lacking
            else "Lower resources.num_workers, resources.cpus_per_worker or resources.gpus_per_worker, raise "
            "resources.total_cpus, or add nodes.",
        )
    arithmetic = f"nodes of {have} hold {workers} workers of {size}; {workers} // {high} a trial = {trials} at once"
    if high > workers:
        arithmetic += f" (with {workers} of its up to {high} workers)"
    if wanted.max_concurrent is not None:
        arithmetic += f", at most {wanted.max_concurrent} wanted"
        trials = min(trials, wanted.max_concurrent)
    return Fit(workers=workers, trials=trials, arithmetic=arithmetic)


__all__ = ["Fit", "Node", "fit"]
