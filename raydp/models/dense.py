"""Models without convolutions. They take images (n, C, H, W) of any size and return logits (n, num_classes)."""

from __future__ import annotations

import math

from torch import nn


def mlp(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """One hidden layer of 64 units with tanh: 4,810 parameters for 8x8x1 and 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 64), nn.Tanh(), nn.Linear(64, num_classes))


def linear(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Multinomial logistic regression: 650 parameters for 8x8x1 and 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
