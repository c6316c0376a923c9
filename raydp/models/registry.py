"""Models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.models.convnets import tanh_cnn, tanh_cnn_small
from raydp.models.dense import linear, mlp
from raydp.models.resnets import resnet20, wrn_16_4
from raydp.models.validation import validate_model


@dataclass(frozen=True, kw_only=True)
class _Model:
    build: Callable[[tuple[int, int, int], int], nn.Module]
    summary: str


_MODELS = {
    "tanh_cnn": _Model(
        build=tanh_cnn,
        summary="tanh CNN: 26,010 parameters for 28x28x1, 550,570 for 32x32x3; images from 16x16",
    ),
    "tanh_cnn_small": _Model(
        build=tanh_cnn_small,
        summary="tanh CNN of four convolutions: 65,962 parameters for 32x32x3; images from 8x8",
    ),
    "resnet20": _Model(
        build=resnet20, summary="ResNet-20 with GroupNorm: 269,722 parameters for 32x32x3; images from 16x16"
    ),
    "wrn_16_4": _Model(
        build=wrn_16_4, summary="Wide ResNet 16-4 with GroupNorm: 2,748,890 parameters for 32x32x3; images from 16x16"
    ),
    "mlp": _Model(build=mlp, summary="one hidden layer of 64 tanh units; images of any size"),
    "linear": _Model(build=linear, summary="multinomial logistic regression; images of any size"),
}

MODELS: Mapping[str, str] = MappingProxyType({name: model.summary for name, model in _MODELS.items()})


def build_model(name: str, *, input_shape: tuple[int, int, int], num_classes: int, seed: int) -> nn.Module:
    """A new model whose weights depend on ``seed`` alone; the global random state is left as it was.

    Args:
        name: one of :data:`MODELS`.
        input_shape: (C, H, W) of an image.
        num_classes: number of logits.
        seed: >= 0; not secret, it has nothing to do with the noise.

    Returns:
        A module from float images (n, C, H, W) to logits (n, num_classes), on the CPU, in training mode.

    Raises:
        UnknownName: there is no such model. InvalidValue: a size that the model cannot take.
    """
    _validate.one_of("model", name, _MODELS)
    if len(input_shape) != 3:
        raise InvalidValue("input_shape", input_shape, "must be (C, H, W)", "Give channels, height and width.")
    channels, height, width = (_validate.integer("input_shape", size, low=1) for size in input_shape)
    num_classes = _validate.integer("num_classes", num_classes, low=1)
    seed = _validate.integer("seed", seed, low=0, high=2**63 - 1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        model = _MODELS[name].build((channels, height, width), num_classes)
    validate_model(model)
    return model


def default_model(input_shape: tuple[int, int, int]) -> str:
    """The model that a search takes when it names none: one that a few CPU cores train in minutes."""
    side = min(input_shape[1:])
    if side < 16:
        return "mlp"
    return "tanh_cnn" if side < 32 else "tanh_cnn_small"
