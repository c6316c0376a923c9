"""Models without convolutions. They take inputs (n, …) of any shape and return (n, outputs)."""

from __future__ import annotations

import math

from torch import nn


def mlp(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One hidden layer of 64 units with tanh: 4,810 parameters for 8x8x1 and 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 64), nn.Tanh(), nn.Linear(64, outputs))


def linear(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear map with a bias, such as multinomial logistic regression: 650 parameters for 8x8x1 and 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def linear_map(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear map without a bias: f(x) = ωᵀx for one output, whose d parameters are ω. It begins at 0."""
    layer = nn.Linear(math.prod(input_shape), outputs, bias=False)
    nn.init.zeros_(layer.weight)
    return nn.Sequential(nn.Flatten(), layer)


def bright_map(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear map of the positive part of the input, without a bias. A dark image has a gradient of exactly zero."""
    return nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(math.prod(input_shape), outputs, bias=False))
