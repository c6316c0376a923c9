"""The estimated time of a run is put together from the right parts, each as often as a run has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from ray import tune

from raydp import data, models
from raydp.search import timing
from tests.search.helpers import small_search

NOISE = {"curvature_source": "noise", "noise_examples": 20, "curvature_interval": 2}


@pytest.mark.parametrize(
    ("method", "fixed", "refreshes", "later"),
    [
        ("dp_sgd", {}, 1, 1),
        ("dp_ngd", NOISE, 3, 1),
        ("dp_ngd", {**NOISE, "curvature_interval": 1}, 5, 0),  # then the second geometry is another estimate
    ],
)
def test_a_run_is_its_steps_and_its_estimates(
    monkeypatch: pytest.MonkeyPatch, method: str, fixed: dict[str, Any], refreshes: int, later: int
) -> None:
    """Every timed part takes a second: N = 1437 and B = 256 make 5 steps."""

    def second(call: Callable[[], Any]) -> tuple[float, Any]:
        return 1.0, call()

    monkeypatch.setattr(timing, "_timed", second)
    search = small_search(
        method=method,
        space={"learning_rate": tune.loguniform(0.1, 1)},
        fixed={"epochs": 1, "batch_size": 256, **fixed},
        micro_batch=64,
    )
    config = search.point_space.centre()
    chosen, hyperparameters, _ = search.point(config)
    dataset = data.load(search.data)
    private = dataset.private
    model = models.build_model("mlp", input_shape=private.input_shape, outputs=private.outputs, seed=0)
    plan = search.plan_for(config)
    assert plan.steps == 5
    found = timing.seconds_of_a_run(search, chosen, hyperparameters, plan=plan, model=model, dataset=dataset)
    # A micro-batch of 64 takes a second, so a step takes four; then the noise, and the way back.
    assert math.isclose(found, refreshes + 5 * (4 + later + 2))
