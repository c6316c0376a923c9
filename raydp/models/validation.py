"""What a model must satisfy so that clipping one gradient an example bounds what the example does."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raydp.errors import InvalidValue


def validate_model(model: nn.Module) -> None:
    """Refuse models in which one example changes another's output, or that keep statistics of the data.

    Refused are batch normalisation of every kind, any module with running statistics (they would release private
    averages without noise), dropout (a replayed step would not be the same), parameters that two modules share
    (per-example gradients are collected a module at a
    time, so the norm that is clipped would be wrong), and models without a trainable parameter.

    Raises:
        InvalidValue: the message names the module by its path and says what to put in its place.
    """
    owners: dict[int, str] = {}
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
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{where}.{name}"
            if id(parameter) in owners and parameter.requires_grad:
                raise InvalidValue(
                    full,
                    f"the parameter of {owners[id(parameter)]}",
                    "must not be shared between modules: the per-example gradient of a shared parameter is incomplete",
                    "Give each module a parameter of its own.",
                )
            owners[id(parameter)] = full
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidValue("model", type(model).__name__, "must have a trainable parameter", "Unfreeze some.")


def _group_norm(num_features: int) -> str:
    """GroupNorm of the same channels, in the largest number of groups up to 16 that divides them."""
    groups = max((g for g in range(1, 17) if num_features % g == 0), default=1)
    return f"torch.nn.GroupNorm(num_groups={groups}, num_channels={num_features})"
