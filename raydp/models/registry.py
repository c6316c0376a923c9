"""Models by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from raydp import _reference, _validate
from raydp.errors import InvalidValue, UnknownName
from raydp.models.convnets import tanh_cnn, tanh_cnn_small
from raydp.models.denoiser import load_denoiser
from raydp.models.dense import bright_map, linear, linear_map, mlp
from raydp.models.resnets import resnet20, wrn_16_4
from raydp.models.validation import first_line, validate_function, validate_model


@dataclass(frozen=True, kw_only=True)
class _Model:
    build: Callable[[tuple[int, ...], int], nn.Module]
    summary: str
    features: bool = False  # takes rows of features too


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
    "resnet20_ws": _Model(
        build=partial(resnet20, standardized=True),
        summary="resnet20 with weight standardisation, as in De et al. 2022; for dp_ngd take resnet20",
    ),
    "wrn_16_4_ws": _Model(
        build=partial(wrn_16_4, standardized=True),
        summary="wrn_16_4 with weight standardisation, as in De et al. 2022; for dp_ngd take wrn_16_4",
    ),
    "mlp": _Model(build=mlp, summary="one hidden layer of 64 tanh units; any inputs", features=True),
    "linear": _Model(build=linear, summary="one linear map with a bias; any inputs", features=True),
    "bright_map": _Model(
        build=bright_map, summary="a linear map of what is brighter than the mean, without a bias: for audits"
    ),
    "linear_map": _Model(build=linear_map, summary="one linear map without a bias; any inputs", features=True),
}

MODELS: Mapping[str, str] = MappingProxyType({name: model.summary for name, model in _MODELS.items()})


def build_model(name: str, *, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """A new model whose weights depend on ``seed`` alone; the global random state is left as it was.

    Args:
        name: one of :data:`MODELS`; or ``file.py:function`` or ``package.module:function``, a function of the user's
            own of ``input_shape`` and ``outputs`` that returns a module; or the file (``.pt``) of a denoiser
            (:mod:`raydp.models.denoiser`), whose weights are then the file's, and only new low-rank factors depend on
            ``seed``.
        input_shape: (C, H, W) of an image, or (d,) of a row of features.
        outputs: numbers that the model returns for an example, such as one logit a class.
        seed: >= 0; not secret, it has nothing to do with the noise.

    Returns:
        A module from float inputs (n, *input_shape) to (n, outputs), on the CPU, in training mode.

    Raises:
        UnknownName: there is no such model. InvalidValue: a size that the model cannot take; or the user's function
            is none, fails, or returns a model that does not suit the data or cannot be trained privately.
        CorruptFile: the file is damaged.

    >>> import torch
    >>> from raydp import models
    >>> model = models.build_model("tanh_cnn", input_shape=(1, 28, 28), outputs=10, seed=0)
    >>> sum(parameter.numel() for parameter in model.parameters()), model(torch.zeros(2, 1, 28, 28)).shape
    (26010, torch.Size([2, 10]))
    """
    own = _reference.resolve("model", name) if _reference.is_reference(name) else None
    file = model_file(name)
    if file is None and own is None:
        _validate.one_of("model", name, _MODELS)
    if len(input_shape) not in (1, 3):
        raise InvalidValue(
            "input_shape", input_shape, "must be (C, H, W) or (d,)", "Give channels, height and width, or one size."
        )
    if len(input_shape) == 1 and own is None and (file is not None or not _MODELS[name].features):
        usable = ", ".join(key for key, model in _MODELS.items() if model.features)
        raise InvalidValue("model", name, "takes images, but the data are rows of features", f"Choose {usable}.")
    shape = tuple(_validate.integer("input_shape", size, low=1) for size in input_shape)
    outputs = _validate.integer("outputs", outputs, low=1)
    seed = _validate.integer("seed", seed, low=0, high=2**63 - 1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        if own is not None:
            model = _own_model(name, own, shape, outputs)
        else:
            model = _MODELS[name].build(shape, outputs) if file is None else load_denoiser(file, input_shape=shape)
    validate_model(model)
    probe = public_probe(name, shape)
    if probe is not None:
        validate_function(model, probe, outputs=outputs)
    return model


def _own_model(name: str, build: object, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    if not callable(build):
        raise InvalidValue("model", name, "must name a function", "Write def make(input_shape, outputs): return …")
    try:
        model = build(input_shape, outputs)
    except Exception as error:
        raise InvalidValue(
            "model",
            name,
            f"fails for inputs of {input_shape} and {outputs} outputs: {type(error).__name__}: {first_line(error)}",
            "Let it take (input_shape, outputs) and return a torch.nn.Module.",
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidValue("model", name, f"returns {type(model).__name__}", "Return a torch.nn.Module.")
    return model.train()


def model_file(name: str) -> Path | None:
    """The absolute path of a model that is kept in a file; None for a name of :data:`MODELS`.

    Raises:
        UnknownName: there is no such file.
    """
    if not name.endswith(".pt"):
        return None
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise UnknownName(f"model (a name, or a file seen from {Path.cwd()})", name, _MODELS)
    return path


def model_source(name: str) -> str:
    """A model's name as other processes can use it: with its file, if it has one, as an absolute path."""
    if _reference.is_reference(name):
        return _reference.absolute(name)
    file = model_file(name)
    return name if file is None else str(file)


def model_digest(name: str) -> str | None:
    """SHA-256 (hex) of a model's file; None for a model that is made from a seed alone."""
    if _reference.is_reference(name):
        return _reference.digest("model", name)
    file = model_file(name)
    if file is None:
        return None
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def public_probe(name: str, input_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Three made-up examples on which a model of the user's own is tried out; None for a model of raydp's."""
    if not _reference.is_reference(name):
        return None
    return torch.rand((3, *input_shape), generator=torch.Generator().manual_seed(0))


def default_model(input_shape: tuple[int, ...], *, outputs: int = 1) -> str:
    """The model that a search takes when it names none: one that a few CPU cores train in minutes."""
    if len(input_shape) == 1:
        return "linear_map" if outputs == 1 else "mlp"
    side = min(input_shape[1:])
    if side < 16:
        return "mlp"
    return "tanh_cnn" if side < 32 else "tanh_cnn_small"
