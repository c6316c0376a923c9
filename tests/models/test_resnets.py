"""The residual networks have the published sizes, mix no examples, and fit the per-example gradient engine."""

from __future__ import annotations

import pytest
import torch

from raydp.errors import InvalidValue
from raydp.models import build_model
from raydp.tasks import cross_entropy_sum
from raydp.training.gradients import PerExampleGradients


@pytest.mark.parametrize(("name", "count"), [("resnet20", 269_722), ("wrn_16_4", 2_748_890), ("resnet20_ws", 269_722)])
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    model = build_model(name, input_shape=(3, 32, 32), outputs=10, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet20", "wrn_16_4", "resnet20_ws"])
def test_per_example_gradients_are_captured_and_right(name: str) -> None:
    model = build_model(name, input_shape=(1, 16, 16), outputs=3, seed=0)
    engine = PerExampleGradients(model)
    assert engine.engine == "captured"
    images, labels = torch.randn(3, 1, 16, 16), torch.tensor([0, 2, 1])
    found = engine(images, labels)
    for index in range(3):
        loss = cross_entropy_sum(model(images[index : index + 1]), labels[index : index + 1])
        for gradient, wanted in zip(found, torch.autograd.grad(loss, engine.parameters), strict=True):
            torch.testing.assert_close(gradient[index], wanted, rtol=1e-4, atol=1e-5)


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(InvalidValue, match="at least 16x16"):
        build_model("resnet20", input_shape=(1, 8, 8), outputs=10, seed=0)
