"""Standardised convolutions: what they compute, and their per-example gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raydp.geometry.blocks import DiagonalBlock, LayerBlock, blocks_of
from raydp.geometry.kfac import estimate_curvature, example_gradients
from raydp.models import build_model
from raydp.models.standardized import StandardizedConv2d
from raydp.tasks import cross_entropy_sum
from raydp.training.gradients import PerExampleGradients


def test_filters_are_centred_of_length_one_and_blind_to_scale_and_shift() -> None:
    layer = StandardizedConv2d(3, 4, 3)
    filters = layer.standardized()[0].detach()
    assert float(filters.mean(dim=(1, 2, 3)).abs().max()) < 1e-6
    torch.testing.assert_close(filters.flatten(1).norm(dim=1), torch.ones(4), rtol=1e-4, atol=0)
    images = torch.randn(2, 3, 6, 6)
    before = layer(images)
    with torch.no_grad():
        layer.weight.mul_(3).add_(0.7)
    torch.testing.assert_close(layer(images), before, rtol=1e-3, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    groups=st.sampled_from([1, 2]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    count=st.integers(1, 4),
)
def test_per_example_gradients_equal_the_loop(
    groups: int, kernel: int, stride: int, padding: int, dilation: int, bias: bool, count: int
) -> None:
    torch.manual_seed(0)
    convolution = StandardizedConv2d(2, 4, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias)
    images = torch.randn(count, 2, 8, 8)
    size = convolution(images).flatten(1).shape[1]
    model = nn.Sequential(convolution, nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(size, 3))
    labels = torch.randint(3, (count,))
    engine = PerExampleGradients(model)
    assert engine.engine == "captured"
    found = engine(images, labels)
    for index in range(count):
        loss = cross_entropy_sum(model(images[index : index + 1]), labels[index : index + 1])
        for gradient, wanted in zip(found, torch.autograd.grad(loss, engine.parameters), strict=True):
            torch.testing.assert_close(gradient[index], wanted, rtol=1e-4, atol=1e-5)


def test_their_curvature_is_diagonal_and_that_of_the_raw_weights() -> None:
    """A Kronecker block would be that of the standardised weights."""
    model = build_model("resnet20_ws", input_shape=(1, 16, 16), outputs=3, seed=0)
    blocks = blocks_of(model)
    assert [block.name for block in blocks if isinstance(block, LayerBlock)] == ["14"]  # the head
    images = torch.randn(4, 1, 16, 16)
    curvature = estimate_curvature(model, images, generator=torch.Generator().manual_seed(0))
    gradients = example_gradients(model, images, generator=torch.Generator().manual_seed(0))
    (first,) = (part for part in curvature.blocks if part.block.name == "0.weight")
    assert isinstance(first.block, DiagonalBlock)
    torch.testing.assert_close(first.eigenvalues, gradients[0].flatten(1).square().mean(dim=0))


@pytest.mark.parametrize("name", ["resnet20_ws", "wrn_16_4_ws"])
def test_every_convolution_is_standardised(name: str) -> None:
    model = build_model(name, input_shape=(3, 32, 32), outputs=10, seed=0)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Conv2d)} == {StandardizedConv2d}
