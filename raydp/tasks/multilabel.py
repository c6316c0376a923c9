"""Multi-label classification: several yes/no labels an example, binary cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multilabel_accuracy,
    multilabel_exact_match,
    multilabel_recall,
)

from raydp.tasks.base import HeldOut, InputShape, Task, outputs_of, refuse


class Multilabel(Task):
    """Several labels, each yes or no, for each input: one logit a label, and yes where it is above 0.

    ``accuracy`` is the share of right answers over all labels (one minus the Hamming loss), ``exact_match`` the share
    of examples with every label right. ``auroc``, ``average_precision`` and ``recall`` are means over the labels, and
    ``minority_recall`` the recall of the label that fewest held-out examples have. A label that all or none of them
    have tells nothing about ranking, and is left out of these four.

    Args:
        weights: public constants by which the loss of each label's *yes* is multiplied; None for 1. They must not be
            computed from private labels.
    """

    name = "multilabel"
    summary = "several yes/no labels for each input: binary cross-entropy, accuracy over the labels"
    metrics: ClassVar[Mapping[str, str]] = {
        "accuracy": "max",
        "exact_match": "max",
        "auroc": "max",
        "average_precision": "max",
        "recall": "max",
        "minority_recall": "max",
        "loss": "min",
    }
    bounds: ClassVar[Mapping[str, float]] = {"accuracy": 1.0, "exact_match": 1.0}

    def __init__(self, *, weights: tuple[float, ...] | None = None) -> None:
        self.weights = weights
        if weights is not None:
            self.name = f"multilabel:weights={','.join(f'{weight:g}' for weight in weights)}"  # type: ignore[misc]

    def check(
        self, name: str, *, input_shape: InputShape, num_classes: int | None, num_labels: int | None = None
    ) -> None:
        if num_labels is None:
            found = "numbers" if num_classes is None else f"{num_classes} classes"
            refuse(name, "targets", found, self.name, "several yes/no labels an example")
        if self.weights is not None and len(self.weights) != num_labels:
            refuse(name, "num_labels", num_labels, self.name, f"{len(self.weights)} labels, one a weight")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over examples and labels of the binary cross-entropies, in nats, of logits (n, L) and labels (n, L)."""
        weights = None if self.weights is None else outputs.new_tensor(self.weights)
        return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weights, reduction="sum")

    def evaluate(self, model: nn.Module, held_out: HeldOut) -> dict[str, float]:
        """All available metrics, in [0, 1]; ``loss`` is the mean over examples and labels, nats."""
        logits, targets = outputs_of(model, held_out), held_out.targets
        if not bool(torch.isfinite(logits).all()):
            return dict.fromkeys(self.available(model, held_out), float("nan"))
        labels, answers = targets.long(), (logits > 0).float()
        width = labels.shape[1]
        counts = labels.sum(dim=0)
        telling = [label for label in range(width) if 0 < int(counts[label]) < len(labels)]

        def mean(measure: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            return torch.stack([measure(logits[:, label].sigmoid(), labels[:, label]) for label in telling]).mean()

        found = {
            "accuracy": float(multilabel_accuracy(answers, labels, width, average="micro")),
            "exact_match": float(multilabel_exact_match(answers, labels, width)),
            "loss": float(F.binary_cross_entropy_with_logits(logits, targets)),
        }
        if telling:
            recalls = multilabel_recall(answers, labels, width, average=None)
            found["auroc"] = float(mean(binary_auroc))
            found["average_precision"] = float(mean(binary_average_precision))
            found["recall"] = float(recalls[telling].mean())
            found["minority_recall"] = float(recalls[min(telling, key=lambda label: int(counts[label]))])
        return {name: found[name] for name in self.available(model, held_out)}

    def available(self, model: nn.Module, held_out: HeldOut) -> tuple[str, ...]:
        """Without ranking and recall where every label is the same in all held-out examples."""
        counts = held_out.targets.sum(dim=0)
        if bool(((counts > 0) & (counts < len(held_out))).any()):
            return tuple(self.metrics)
        return ("accuracy", "exact_match", "loss")

    def contributions(self, metric: str, model: nn.Module, held_out: HeldOut) -> Tensor:
        """The share of an example's labels that are right, or 1 where all are; 0 where a logit is not finite."""
        if metric not in self.bounds:
            return super().contributions(metric, model, held_out)
        logits = outputs_of(model, held_out)
        right = (logits > 0) == (held_out.targets > 0)
        found = right.float().mean(dim=1) if metric == "accuracy" else right.all(dim=1).float()
        return found * torch.isfinite(logits).all(dim=1)
