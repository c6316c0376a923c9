"""Classification: logits, cross-entropy, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_auroc

from raydp.tasks.base import HeldOut, InputShape, Task, outputs_of, refuse


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum (not mean) of the examples' cross-entropies, in nats, for logits (n, K) and labels (n,)."""
    return F.cross_entropy(logits, labels, reduction="sum")


class Classification(Task):
    """A class for each input."""

    name = "classification"
    summary = "a class for each input: cross-entropy, accuracy"
    classes = True
    metrics: ClassVar[Mapping[str, str]] = {
        "accuracy": "max",
        "balanced_accuracy": "max",
        "auroc": "max",
        "loss": "min",
    }
    bounds: ClassVar[Mapping[str, float]] = {"accuracy": 1.0}

    def check(self, name: str, *, input_shape: InputShape, num_classes: int | None) -> None:
        if num_classes is None:
            refuse(name, "targets", "numbers", self.name, "classes")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_sum(outputs, targets)

    def evaluate(self, model: nn.Module, held_out: HeldOut) -> dict[str, float]:
        """All metrics of the model.

        Returns:
            ``accuracy`` and ``balanced_accuracy`` (mean recall over classes) in [0, 1], ``auroc`` (one against the
            rest, mean over classes) in [0, 1], ``loss`` (mean cross-entropy, nats).
        """
        assert held_out.num_classes is not None  # check
        logits, labels, classes = outputs_of(model, held_out), held_out.targets, held_out.num_classes
        if not bool(torch.isfinite(logits).all()):
            return dict.fromkeys(self.metrics, float("nan"))
        measure: dict[str, Callable[[], Tensor]] = {
            "accuracy": lambda: multiclass_accuracy(logits, labels, classes, average="micro"),
            "balanced_accuracy": lambda: multiclass_accuracy(logits, labels, classes, average="macro"),
            "auroc": lambda: multiclass_auroc(logits.softmax(dim=1), labels, classes, average="macro"),
            "loss": lambda: F.cross_entropy(logits, labels),
        }
        return {name: float(measure[name]()) for name in self.metrics}

    def contributions(self, metric: str, model: nn.Module, held_out: HeldOut) -> Tensor:
        """1 for an example whose class is predicted, else 0; also 0 where a logit is not finite."""
        if metric not in self.bounds:
            return super().contributions(metric, model, held_out)
        logits = outputs_of(model, held_out)
        right = (logits.argmax(dim=1) == held_out.targets) & torch.isfinite(logits).all(dim=1)
        return right.to(torch.float32)
