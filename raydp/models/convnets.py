"""Small convolutional networks with tanh, the usual choice for training under DP-SGD.

Tanh keeps activations bounded, which suits clipped gradients better than ReLU (Papernot et al., "Tempered sigmoid
activations for deep learning with differential privacy", AAAI 2021). No layer mixes examples.

All take images (n, C, H, W), float, and return logits (n, num_classes).
"""

from __future__ import annotations

from torch import nn

from raydp.errors import InvalidValue

InputShape = tuple[int, ...]


def tanh_cnn(input_shape: InputShape, num_classes: int) -> nn.Module:
    """The tanh CNNs of AdaDPIGU (arXiv 2507.06525) and RandomSparsification (arXiv 2112.00845).

    Below 32 pixels, two convolutions: 26,010 parameters for 28x28x1 and 10 classes. From 32 pixels, six: 550,570
    parameters for 32x32x3 and 10 classes. Only the first convolution and the linear layers depend on the shape.

    Raises:
        InvalidValue: an image side is below 16 pixels.
    """
    if min(input_shape[1:]) >= 32:
        return _six_convolutions(input_shape, num_classes)
    return _two_convolutions(input_shape, num_classes)


def tanh_cnn_small(input_shape: InputShape, num_classes: int) -> nn.Module:
    """Four 3x3 convolutions (16, 32, 32, 64 channels), pooled three times: 65,962 parameters for 32x32x3, 10 classes.

    A network for 32x32 images that a search on a few CPU cores can afford.

    Raises:
        InvalidValue: an image side is below 8 pixels.
    """
    channels, height, width = _at_least("tanh_cnn_small", input_shape, 8)
    return nn.Sequential(
        *_convolution(channels, 16),
        nn.MaxPool2d(2),
        *_convolution(16, 32),
        *_convolution(32, 32),
        nn.MaxPool2d(2),
        *_convolution(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 8) * (width // 8), 32),
        nn.Tanh(),
        nn.Linear(32, num_classes),
    )


def _two_convolutions(input_shape: InputShape, num_classes: int) -> nn.Module:
    channels, *sides = _at_least("tanh_cnn", input_shape, 16)
    # convolution (8, stride 2, padding 2), pool (2, stride 1), convolution (4, stride 2), pool (2, stride 1)
    height, width = ((((side + 4 - 8) // 2 + 1) - 1 - 4) // 2 + 1 - 1 for side in sides)
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * height * width, 32),
        nn.Tanh(),
        nn.Linear(32, num_classes),
    )


def _six_convolutions(input_shape: InputShape, num_classes: int) -> nn.Module:
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for outputs in (32, 64, 128):
        layers += [*_convolution(channels, outputs), *_convolution(outputs, outputs), nn.MaxPool2d(2)]
        channels = outputs
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(128 * (height // 8) * (width // 8), 128),
        nn.Tanh(),
        nn.Linear(128, num_classes),
    )


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.Tanh()


def _at_least(model: str, input_shape: InputShape, side: int) -> InputShape:
    if min(input_shape[1:]) < side:
        raise InvalidValue(
            "model",
            model,
            f"needs images of at least {side}x{side} pixels, but these are (C, H, W) = {input_shape}",
            "Choose 'mlp' or 'linear'.",
        )
    return input_shape
