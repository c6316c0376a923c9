"""How many trials run at once, and what fits nowhere."""

from __future__ import annotations

import pytest

from raydp.errors import InvalidValue
from raydp.search.capacity import Node, fit
from raydp.search.definition import Resources


@pytest.mark.parametrize(
    ("nodes", "wanted", "workers", "trials"),
    [
        ([Node(cpus=2)], Resources(), 2, 2),
        ([Node(cpus=3), Node(cpus=3)], Resources(cpus_per_worker=2), 2, 2),  # no worker lies on two nodes
        ([Node(cpus=3), Node(cpus=3)], Resources(num_workers=2), 6, 3),  # a trial may
        ([Node(cpus=3), Node(cpus=2)], Resources(num_workers=2, max_concurrent=1), 5, 1),
        ([Node(cpus=3)], Resources(num_workers=(2, 8)), 3, 1),  # with three of its up to eight workers
        ([Node(cpus=16)], Resources(num_workers=(2, 8)), 16, 2),
        ([Node(cpus=1), Node(cpus=4, count=10)], Resources(num_workers=4), 41, 10),  # an autoscaler's
        ([Node(cpus=16, gpus=4)], Resources(gpus_per_worker=1, num_workers=2), 4, 2),
        ([Node(cpus=16, gpus=2)], Resources(gpus_per_worker=0.25), 8, 8),
        ([Node(cpus=16, gpus=2)], Resources(gpus_per_worker=0.1), 16, 16),
        ([Node(cpus=16, gpus=2)], Resources(gpus_per_worker=0.6), 2, 2),  # a third would lie on both GPUs
        ([Node(cpus=16, gpus=3)], Resources(gpus_per_worker=2), 1, 1),
    ],
)
def test_trials_at_once(nodes: list[Node], wanted: Resources, workers: int, trials: int) -> None:
    found = fit(nodes, wanted)
    assert (found.workers, found.trials) == (workers, trials)
    assert f"hold {workers} workers of" in found.arithmetic


@pytest.mark.parametrize(
    ("nodes", "wanted", "message"),
    [
        ([Node(cpus=2)], Resources(num_workers=3), "room for 2 such workers"),
        ([Node(cpus=2)], Resources(num_workers=(3, 4)), "3 workers of 1 CPU"),
        ([Node(cpus=2), Node(cpus=2)], Resources(cpus_per_worker=4), "room for 0 such workers"),
        ([Node(cpus=8)], Resources(gpus_per_worker=1), "There are no GPUs"),
        ([Node(cpus=8, gpus=1)], Resources(gpus_per_worker=1, num_workers=2), "room for 1 such worker. Lower"),
        ([], Resources(), "whose nodes have: none"),
    ],
)
def test_what_fits_nowhere_is_refused_with_the_arithmetic(nodes: list[Node], wanted: Resources, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        fit(nodes, wanted)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": 0},
        {"num_workers": 1.5},
        {"num_workers": "2"},
        {"num_workers": (2, 1)},
        {"num_workers": (0, 1)},
        {"num_workers": (1, 2, 3)},
        {"gpus_per_worker": 0.5, "num_workers": 2},
        {"gpus_per_worker": 0.5, "num_workers": (1, 2)},
        {"gpus_per_worker": 1.5},
        {"time_limit": 0},
        {"time_limit": float("nan")},
    ],
)
def test_resources_that_mean_nothing(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidValue, match=f"resources.{next(iter(wrong))}|num_workers"):
        Resources(**wrong)  # type: ignore[arg-type]
