"""Residual networks for 32×32 images, with GroupNorm in place of BatchNorm (which would mix examples).

GroupNorm has the same affine parameters as BatchNorm, so the parameter counts are the published ones. 16 groups as in
De et al. 2022 (arXiv 2204.13650), whose weight standardisation is an option; no in-place layers, because per-example
gradients need each layer's output untouched.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from raydp.errors import InvalidValue
from raydp.models.standardized import StandardizedConv2d

InputShape = tuple[int, ...]
GROUPS = 16


def resnet20(input_shape: InputShape, num_classes: int, *, standardized: bool = False) -> nn.Module:
    """ResNet-20 (He et al. 2016, section 4.2; parameter-free shortcuts): 269,722 parameters for 32×32×3, 10 classes."""
    channels = _channels("resnet20", input_shape)
    conv = StandardizedConv2d if standardized else nn.Conv2d
    blocks: list[nn.Module] = [
        conv(channels, 16, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 16),
        nn.ReLU(),
    ]
    width = 16
    for outputs in (16, 32, 64):
        for index in range(3):
            blocks.append(_Basic(width, outputs, conv=conv, stride=2 if index == 0 and outputs > width else 1))
            width = outputs
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def wrn_16_4(input_shape: InputShape, num_classes: int, *, standardized: bool = False) -> nn.Module:
    """Wide ResNet 16-4 (Zagoruyko & Komodakis 2016): 2,748,890 parameters for 32×32×3, 10 classes."""
    channels = _channels("wrn_16_4", input_shape)
    conv = StandardizedConv2d if standardized else nn.Conv2d
    blocks: list[nn.Module] = [conv(channels, 16, 3, padding=1, bias=False)]
    width = 16
    for position, outputs in enumerate((64, 128, 256)):
        for index in range(2):
            blocks.append(_PreActivated(width, outputs, conv=conv, stride=2 if index == 0 and position > 0 else 1))
            width = outputs
    return nn.Sequential(
        *blocks,
        nn.GroupNorm(GROUPS, 256),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, num_classes),
    )


class _Basic(nn.Module):
    """Two 3×3 convolutions; where the shape changes, the shortcut subsamples and pads with zeros (option A)."""

    def __init__(self, inputs: int, outputs: int, *, conv: type[nn.Conv2d], stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self._stride, self._padding = stride, (outputs - inputs) // 2

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(inputs)))
        shortcut = inputs[:, :, :: self._stride, :: self._stride]
        if self._padding:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self._padding, self._padding))
        return F.relu(self.norm2(self.conv2(hidden)) + shortcut)


class _PreActivated(nn.Module):
    """Norm, ReLU, convolution, twice; where the shape changes, the shortcut is a 1×1 convolution."""

    def __init__(self, inputs: int, outputs: int, *, conv: type[nn.Conv2d], stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs)
        self.conv1 = conv(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        changes = inputs != outputs or stride != 1
        self.shortcut = conv(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, inputs: Tensor) -> Tensor:
        active = F.relu(self.norm1(inputs))
        hidden = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return hidden + (inputs if self.shortcut is None else self.shortcut(active))


def _channels(model: str, input_shape: InputShape) -> int:
    if min(input_shape[1:]) < 16:
        raise InvalidValue(
            "model",
            model,
            f"needs images of at least 16x16 pixels, but these are (C, H, W) = {input_shape}",
            "Choose 'mlp' or 'tanh_cnn_small'.",
        )
    return input_shape[0]
