"""The processes of one run, as every room sees them: which one this is, and how they act as one.

A run is the same computation whatever the number of its workers, so code that shares out work is written once, for any
number: :class:`Alone` is the one worker of a run without others. How real processes talk is known to
:mod:`raydp.training.workers` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from raydp.errors import InvalidValue

Value = TypeVar("Value")


class Workers(Protocol):
    """The processes of one run, seen from one of them.

    Every worker calls the same methods in the same order. A worker that cannot go on calls :meth:`leave` instead of
    the next one, which ends the others there.

    Attributes:
        rank: this worker, in [0, count). Worker 0 alone writes files.
        count: of all workers.
    """

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the workers, in place; all must give the same shapes and types.

        Exact for integers. For floats the order of the terms depends on the number of workers, but every worker gets
        the same bits.

        Raises:
            WorkerFailed, WorkerLost: another worker ended; Diverged: for that reason. So do all methods below.
        """
        ...

    def spread(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Copy the tensors of worker ``source`` into those of the others, in place, of the same shapes and types."""
        ...

    def share(self, value: Value, *, source: int = 0) -> Value:
        """The value that worker ``source`` has; the others' are not looked at.

        Args:
            value: tensors and plain values, in lists, tuples and dictionaries.
            source: a rank.
        """
        ...

    def wait(self) -> None:
        """Return when all workers have called this."""
        ...

    def leave(self, error: BaseException) -> None:
        """Tell the others that this worker ends, and why; nothing can be called afterwards. Never raises."""
        ...


class Alone:
    """The worker of a run that has no others."""

    rank = 0
    count = 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        pass

    def spread(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        check_source(source, 1)

    def share(self, value: Value, *, source: int = 0) -> Value:
        check_source(source, 1)
        return value

    def wait(self) -> None:
        pass

    def leave(self, error: BaseException) -> None:
        pass


ALONE = Alone()


def check_source(source: int, count: int) -> None:
    """Raises InvalidValue: no worker has this rank."""
    if not 0 <= source < count:
        raise InvalidValue("source", source, f"must be a rank in [0, {count})", "Name one of the workers.")


def gather(workers: Workers, value: Value) -> list[Value]:
    """The values of all workers, by rank."""
    return [workers.share(value, source=rank) for rank in range(workers.count)]


def own_part(count: int, workers: Workers) -> slice:
    """This worker's part of ``count`` things: consecutive, possibly empty, of sizes that differ by at most 1."""
    return slice(count * workers.rank // workers.count, count * (workers.rank + 1) // workers.count)


def owners(costs: Sequence[float], workers: Workers) -> list[int]:
    """The rank that takes each of several jobs, so that the busiest worker has little more than its share.

    The dearest job goes first, each to whoever has least (Graham 1969: within 4/3 of the best).
    """
    loads = [0.0] * workers.count
    found = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda index: -costs[index]):
        found[job] = loads.index(min(loads))
        loads[found[job]] += costs[job]
    return found
