"""Regression: one number for each input, squared error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from raydp.tasks.base import HeldOut, InputShape, Task, outputs_of, refuse


class Regression(Task):
    """A number for each input.

    Where the data are synthetic and linear, their true parameters w are known, and the error of the model's own
    parameters is a metric too.

    >>> import torch
    >>> from raydp.tasks import Regression
    >>> float(Regression().loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])))
    5.0
    """

    name = "regression"
    summary = "a number for each input: squared error; error of the parameters where the true ones are known"
    metrics: ClassVar[Mapping[str, str]] = {"mse": "min", "parameter_error": "min"}

    def check(
        self, name: str, *, input_shape: InputShape, num_classes: int | None, num_labels: int | None = None
    ) -> None:
        if num_classes is not None or num_labels is not None:
            found = f"{num_classes} classes" if num_labels is None else f"{num_labels} labels"
            refuse(name, "targets", found, self.name, "numbers as targets")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of (f(x) - y)² for outputs (n, 1) or (n,) and targets (n,)."""
        return (outputs.flatten() - targets).square().sum()

    def available(self, model: nn.Module, held_out: HeldOut) -> tuple[str, ...]:
        """``parameter_error`` needs the truth, and a model of exactly as many parameters."""
        fits = held_out.truth is not None and _parameters(model).numel() == held_out.truth.numel()
        return tuple(self.metrics) if fits else ("mse",)

    def evaluate(self, model: nn.Module, held_out: HeldOut) -> dict[str, float]:
        """``mse``, the mean of (f(x) - y)², and ``parameter_error``, ‖ω - w‖² of all parameters together."""
        outputs = outputs_of(model, held_out)
        found = {"mse": float((outputs.flatten() - held_out.targets).double().square().mean())}
        if "parameter_error" in self.available(model, held_out):
            assert held_out.truth is not None
            error = _parameters(model) - held_out.truth.flatten().double()
            found["parameter_error"] = float(error.square().sum())
        return found


def _parameters(model: nn.Module) -> Tensor:
    """All parameters as one vector, float64 on the CPU."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu().double()
