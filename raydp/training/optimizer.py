"""The optimiser on the trained coordinates alone, learning-rate schedules, and the average of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.methods.base import OPTIMIZERS, SCHEDULES


def learning_rate_factor(schedule: str, step: int, steps: int) -> float:
    """The factor on the base learning rate at logical step ``step`` of ``steps`` (over all phases of the plan).

    ``constant``: 1. ``linear``: from 1 to 0. ``cosine``: half a cosine from 1 to 0.
    ``warmup_cosine``: linear from 0 to 1 over the first tenth, then half a cosine from 1 to 0. Steps are logical:
    micro-batches, workers and augmentations do not move the schedule.
    """
    _validate.one_of("schedule", schedule, SCHEDULES)
    progress = step / steps
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "warmup_cosine":
        warmup = max(1, steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


class CoordinateOptimizer:
    """A torch optimiser that sees the trained entries and nothing else.

    Frozen entries have no momentum, no Adam state and no weight decay because they are not in the optimiser: the
    trained
    entries are gathered into leaf tensors, stepped, and written back. The frozen ones stay bit-identical by
    construction.

    Args:
        parameters: the model's trainable parameters.
        support: flat indices of the trained entries of each parameter, or None for all.
        kind: ``sgd`` or ``adam``.
        momentum: for ``sgd``, in [0, 1).
        weight_decay: added to the released gradient, as torch's optimisers do.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        support: Sequence[Tensor] | None,
        *,
        kind: str,
        momentum: float,
        weight_decay: float,
    ) -> None:
        _validate.one_of("optimizer", kind, OPTIMIZERS)
        if kind == "adam" and momentum:
            raise InvalidValue("momentum", momentum, "is not used by optimizer = 'adam'", "Leave momentum at 0.")
        self._parameters = parameters
        self._support = support
        if support is None:
            self._leaves = [parameter.detach().flatten().clone() for parameter in parameters]
        else:
            self._leaves = [p.detach().flatten()[index] for p, index in zip(parameters, support, strict=True)]
        if kind == "adam":
            self._optimizer: torch.optim.Optimizer = torch.optim.Adam(self._leaves, lr=0.0, weight_decay=weight_decay)
        else:
            self._optimizer = torch.optim.SGD(self._leaves, lr=0.0, momentum=momentum, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, update: Sequence[Tensor], learning_rate: float) -> None:
        """One step with the lifted private gradient (flat, trained entries only) at this learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for leaf, gradient in zip(self._leaves, update, strict=True):
            leaf.grad = gradient
        self._optimizer.step()
        for position, (parameter, leaf) in enumerate(zip(self._parameters, self._leaves, strict=True)):
            if self._support is None:
                parameter.copy_(leaf.view_as(parameter))
            else:
                parameter.view(-1)[self._support[position]] = leaf

    def state_dict(self) -> dict[str, Any]:
        """The torch optimiser's state; leaf values live in the model's own state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


class WeightAverage:
    """Exponential moving average of the weights with De et al.'s warm-up, for evaluation only (post-processing).

    ema ← d·ema + (1 − d)·θ with d = min(decay, (1 + t)/(10 + t)) at logical step t (De et al. 2022, arXiv 2204.13650).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.decay = _validate.between("ema_decay", decay, 0, 1, high_open=True)
        self._parameters = parameters
        self.values = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Fold in the weights after logical step ``step`` (0, 1, …)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for value, parameter in zip(self.values, self._parameters, strict=True):
            value.lerp_(parameter.detach(), 1 - decay)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry is finite; by the extremes, which is ten times as fast as asking each entry."""
    return all(bool(torch.isfinite(torch.stack(torch.aminmax(t.detach()))).all()) for t in tensors if t.numel())
