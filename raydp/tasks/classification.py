"""Classification: logits, cross-entropy, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_auroc,
    multiclass_cohen_kappa,
    multiclass_recall,
)

from raydp.tasks.base import HeldOut, InputShape, Task, outputs_of, refuse


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum (not mean) of the examples' cross-entropies, in nats, for logits (n, K) and labels (n,).

    >>> import torch
    >>> from raydp.tasks import cross_entropy_sum
    >>> round(float(cross_entropy_sum(torch.zeros(3, 2), torch.tensor([0, 1, 1]))), 4)  # 3 log 2
    2.0794
    """
    return F.cross_entropy(logits, labels, reduction="sum")


class Classification(Task):
    """A class for each input.

    ``balanced_accuracy`` is the mean recall over the classes, ``auroc`` one class against the rest, averaged,
    ``kappa`` Cohen's, and ``minority_recall`` the recall of the class with the fewest held-out examples. With two
    classes, the second is the positive one: ``sensitivity`` is its recall, ``specificity`` that of the first. All at
    the fixed threshold of the largest logit.

    Args:
        weights: public constants by which the loss of each class is multiplied; None for 1. They must not be computed
            from private labels.

    >>> import torch
    >>> from raydp.tasks import Classification
    >>> task = Classification(weights=(1.0, 5.0))
    >>> logits, labels = torch.zeros(2, 2), torch.tensor([0, 1])
    >>> round(float(task.loss(logits, labels)), 4)  # 6 log 2
    4.1589
    """

    name = "classification"
    summary = "a class for each input: cross-entropy, accuracy"
    classes = True
    metrics: ClassVar[Mapping[str, str]] = {
        "accuracy": "max",
        "balanced_accuracy": "max",
        "auroc": "max",
        "kappa": "max",
        "minority_recall": "max",
        "sensitivity": "max",
        "specificity": "max",
        "loss": "min",
    }
    bounds: ClassVar[Mapping[str, float]] = {"accuracy": 1.0}

    def __init__(self, *, weights: tuple[float, ...] | None = None) -> None:
        self.weights = weights
        if weights is not None:
            self.name = f"classification:weights={','.join(f'{weight:g}' for weight in weights)}"  # type: ignore[misc]

    def check(
        self, name: str, *, input_shape: InputShape, num_classes: int | None, num_labels: int | None = None
    ) -> None:
        if num_classes is None:
            refuse(name, "targets", "numbers" if num_labels is None else f"{num_labels} labels", self.name, "classes")
        elif num_classes < 2:
            refuse(
                name, "num_classes", num_classes, self.name, "two classes or more: with one there is nothing to learn"
            )
        if self.weights is not None and len(self.weights) != num_classes:
            refuse(name, "num_classes", num_classes, self.name, f"{len(self.weights)} classes, one a weight")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.weights is None:
            return cross_entropy_sum(outputs, targets)
        return F.cross_entropy(outputs, targets, weight=outputs.new_tensor(self.weights), reduction="sum")

    def available(self, model: nn.Module, held_out: HeldOut) -> tuple[str, ...]:
        """``sensitivity`` and ``specificity`` are of two classes."""
        two = held_out.num_classes == 2
        return tuple(name for name in self.metrics if two or name not in ("sensitivity", "specificity"))

    def evaluate(self, model: nn.Module, held_out: HeldOut) -> dict[str, float]:
        """All available metrics, in [0, 1] (``kappa`` in [-1, 1]); ``loss`` is the mean cross-entropy, nats."""
        assert held_out.num_classes is not None  # check
        logits, labels, classes = outputs_of(model, held_out), held_out.targets, held_out.num_classes
        available = self.available(model, held_out)
        if not bool(torch.isfinite(logits).all()):
            return dict.fromkeys(available, float("nan"))
        recalls = multiclass_recall(logits, labels, classes, average=None)
        counts = labels.bincount(minlength=classes)
        rarest = int(torch.where(counts > 0, counts, counts.max() + 1).argmin())
        measure: dict[str, Callable[[], Tensor]] = {
            "accuracy": lambda: multiclass_accuracy(logits, labels, classes, average="micro"),
            "balanced_accuracy": lambda: multiclass_accuracy(logits, labels, classes, average="macro"),
            "auroc": lambda: multiclass_auroc(logits.softmax(dim=1), labels, classes, average="macro"),
            "kappa": lambda: multiclass_cohen_kappa(logits, labels, classes),
            "minority_recall": lambda: recalls[rarest],
            "sensitivity": lambda: recalls[1],
            "specificity": lambda: recalls[0],
            "loss": lambda: F.cross_entropy(logits, labels),
        }
        return {name: float(measure[name]()) for name in available}

    def contributions(self, metric: str, model: nn.Module, held_out: HeldOut) -> Tensor:
        """1 for an example whose class is predicted, else 0; also 0 where a logit is not finite."""
        if metric not in self.bounds:
            return super().contributions(metric, model, held_out)
        logits = outputs_of(model, held_out)
        right = (logits.argmax(dim=1) == held_out.targets) & torch.isfinite(logits).all(dim=1)
        return right.to(torch.float32)
