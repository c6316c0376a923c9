"""The workers of a run act as one: the same sums, the same reports, and one end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from raydp.errors import Diverged, InvalidValue, RaydpError
from raydp.training.workers import Alone, Group, Workers, as_one, gather, own_part, owners
from tests.training.processes import Processes, together


class Seen(Alone):
    """One of several workers, for code that only asks which."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


def sums(workers: Workers) -> tuple[Tensor, Tensor, Tensor]:
    large = torch.tensor([2**62 - 1 if workers.rank == 0 else -(2**62) + workers.rank, workers.rank])
    columns = torch.arange(6.0).view(2, 3).t() * (workers.rank + 1)  # not contiguous
    more = torch.full((3,), 10, dtype=torch.int64)
    workers.sum([large, columns, more])
    return large, columns, more


@pytest.mark.parametrize("count", [2, 3])
def test_sums_are_exact_for_integers_of_any_size_and_in_place(count: int) -> None:
    for large, columns, more in together(count, sums):
        assert large.tolist() == [2**62 - 1 + sum(rank - 2**62 for rank in range(1, count)), sum(range(count))]
        assert torch.equal(columns, torch.arange(6.0).view(2, 3).t() * sum(range(1, count + 1)))
        assert more.tolist() == [10 * count] * 3


def sharing(workers: Workers) -> Any:
    own = {"rank": workers.rank, "weights": torch.full((2, 2), float(workers.rank)), "nothing": None, "pair": (1, "a")}
    tensors = [torch.full((3,), workers.rank), torch.full((2, 2), float(workers.rank)).t()]
    workers.spread(tensors, source=1)
    workers.wait()
    return workers.share(own, source=1), gather(workers, workers.rank * 10), tensors


def test_what_one_worker_has_all_get() -> None:
    for shared, gathered, tensors in together(2, sharing):
        assert shared["rank"] == 1 and shared["nothing"] is None and shared["pair"] == (1, "a")
        assert torch.equal(shared["weights"], torch.ones(2, 2))
        assert gathered == [0, 10]
        assert torch.equal(tensors[0], torch.full((3,), 1)) and torch.equal(tensors[1], torch.ones(2, 2))


class Harmful:
    """Whoever unpickles this runs code."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemError('code from another worker ran')",)


def sharing_code(workers: Workers) -> None:
    workers.share(Harmful() if workers.rank == 0 else None)


def test_nothing_that_another_worker_sends_is_executed() -> None:
    end = Processes(2, sharing_code).ends()[1]
    assert end.error == "UnpicklingError" and "code from another worker ran" not in end.message


def failing(workers: Workers, error: type[Exception], rank: int) -> None:
    with as_one(workers):
        workers.wait()
        if workers.rank == rank:
            raise error("a private number, 17")
        workers.sum([torch.zeros(1000)])


@pytest.mark.parametrize(("error", "told"), [(RaydpError, "a private number, 17"), (RuntimeError, None)])
def test_an_error_of_one_ends_all_and_says_no_more_than_it_may(error: type[Exception], told: str | None) -> None:
    ends = Processes(3, failing, error, 1).ends()
    assert ends[1].error == error.__name__
    for end in (ends[0], ends[2]):
        assert end.error == "WorkerFailed" and f"worker 1 ended with {error.__name__}" in end.message
        assert ("17" in end.message) == (told is not None)
        assert end.seconds < 20


def test_what_diverges_on_one_has_diverged_on_all() -> None:
    ends = Processes(2, failing, Diverged, 1).ends()
    assert [(end.error, end.message) for end in ends] == [("Diverged", "a private number, 17")] * 2


def waiting(workers: Workers, lost: int) -> None:
    workers.wait()
    if workers.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        workers.sum([torch.zeros(1000)])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_worker_ends_the_others_at_once_though_they_live_on(lost: int) -> None:
    ends = Processes(4, waiting, lost).ends()
    assert ends[lost].error == "died"
    for rank, end in enumerate(ends):
        assert rank == lost or (end.error == "WorkerLost" and end.seconds < 20)


def differing(workers: Workers) -> None:
    if workers.rank:
        workers.sum([torch.zeros(3)])
    else:
        workers.sum([torch.zeros(4)])


def test_workers_that_do_not_do_the_same_are_told_so() -> None:
    assert {end.error for end in Processes(2, differing).ends()} == {"RaydpError"}


def test_a_group_needs_a_process_group() -> None:
    with pytest.raises(RaydpError, match="init_process_group"):
        Group()


def test_alone_there_is_nobody_to_ask() -> None:
    alone = Alone()
    tensor = torch.ones(3)
    alone.sum([tensor])
    alone.spread([tensor])
    alone.wait()
    assert alone.share("value") == "value" and torch.equal(tensor, torch.ones(3))
    with pytest.raises(InvalidValue, match="source"):
        alone.share("value", source=1)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_cover_everything_once(count: int) -> None:
    for things in range(9):
        parts = [range(things)[own_part(things, Seen(rank, count))] for rank in range(count)]
        assert [thing for part in parts for thing in part] == list(range(things))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_dear_jobs_are_shared_out_first() -> None:
    assert owners([5, 1, 1, 1, 1, 1], Seen(0, 2)) == [0, 1, 1, 1, 1, 1]
    assert owners([1.0, 2.0], Seen(1, 1)) == [0, 0]
