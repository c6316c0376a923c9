"""What a model must satisfy so that clipping one gradient an example bounds what the example does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raydp.errors import InvalidValue


def validate_model(model: nn.Module) -> None:
    """Refuse models in which one example changes another's output, or that keep statistics of the data.

    Refused are batch normalisation of every kind, any module with running statistics (they would release private
    averages without noise), dropout (a replayed step would not be the same), and models without a trainable
    parameter. A parameter that several modules share is one parameter, whose gradient is summed over its uses.

    Raises:
        InvalidValue: the message names the module by its path and says what to put in its place.
    """
    for path, module in model.named_modules():
        where = f"model.{path}" if path else "model"
        kind = type(module).__name__
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            if module.track_running_stats:
                raise InvalidValue(
                    where,
                    kind,
                    "keeps running statistics of private examples, a release without noise",
                    f"Build it with track_running_stats=False, or use {_group_norm(module.num_features)}.",
                )
        elif isinstance(module, _BatchNorm):
            raise InvalidValue(
                where,
                kind,
                "mixes the examples of a batch, so no clip norm bounds what one example does",
                f"Use {_group_norm(module.num_features)}.",
            )
        elif getattr(module, "track_running_stats", False) or any(
            name.startswith("running_") for name, _ in module.named_buffers(recurse=False)
        ):
            raise InvalidValue(
                where,
                kind,
                "keeps running statistics of private examples, a release without noise",
                "Replace it with a layer without running statistics, such as torch.nn.GroupNorm or torch.nn.LayerNorm.",
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise InvalidValue(
                where,
                kind,
                "draws from the global generator, so a step that is replayed after a crash would be another one",
                "Remove it; the noise regularises already.",
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidValue("model", type(model).__name__, "must have a trainable parameter", "Unfreeze some.")


def validate_function(model: nn.Module, inputs: Tensor, *, outputs: int) -> None:
    """Try out a model that nobody has tested, on made-up inputs (n, …).

    Refused is a model that does not return ``outputs`` numbers an example; that gives an example another output alone
    than among others, which no clip norm could bound (a trial can only find this, not exclude it); or that has a
    parameter without effect on the outputs: it would be noised all the same, and never learn.

    Raises:
        InvalidValue: says what the model does, or names the parameters.
    """
    kind = type(model).__name__
    try:
        found = model(inputs)
        alone = [model(one[None]) for one in inputs]
    except Exception as error:
        raise InvalidValue(
            "model",
            kind,
            f"fails for inputs of shape {tuple(inputs.shape)}: {type(error).__name__}: {first_line(error)}",
            "Let it take such inputs, or choose other data.",
        ) from error
    wanted = (len(inputs), outputs)
    if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InvalidValue(
            "model",
            kind,
            f"returns {shape} for {len(inputs)} examples, and the targets need {wanted}",
            f"Give its last layer {outputs} output{'' if outputs == 1 else 's'}.",
        )
    if not torch.allclose(torch.cat(alone), found, rtol=1e-3, atol=1e-4 * float(found.detach().abs().max())):
        raise InvalidValue(
            "model",
            kind,
            "gives an example another output alone than among others: it mixes the examples of a batch, or draws "
            "random numbers, so no clip norm bounds what one example does",
            "Let each example's output depend on that example alone.",
        )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(found.sum(), list(named.values()), allow_unused=True)
    unused = [name for name, gradient in zip(named, gradients, strict=True) if gradient is None]
    if unused:
        raise InvalidValue(
            "model",
            ", ".join(unused),
            "get no gradient: they would be noised, and nothing learned",
            "Use them, remove them, or freeze them with requires_grad_(False).",
        )


def first_line(error: Exception) -> str:
    """Of an error's message."""
    return (str(error).splitlines() or [""])[0]


def _group_norm(num_features: int) -> str:
    """GroupNorm of the same channels, in the largest number of groups up to 16 that divides them."""
    groups = max((g for g in range(1, 17) if num_features % g == 0), default=1)
    return f"torch.nn.GroupNorm(num_groups={groups}, num_channels={num_features})"
