"""Metrics of a model on a hold-out set. The set is public or stated as private: a metric says what it was measured
on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_auroc

from raydp.data import Normalization, PublicData

METRICS: Mapping[str, str] = {
    "accuracy": "max",
    "balanced_accuracy": "max",
    "auroc": "max",
    "loss": "min",
}


@torch.no_grad()
def evaluate(
    model: nn.Module, data: PublicData, normalization: Normalization, *, batch_size: int = 500
) -> dict[str, float]:
    """All metrics of the model on ``data``.

    Returns:
        ``accuracy`` and ``balanced_accuracy`` (mean recall over classes) in [0, 1], ``auroc`` (one against the rest,
        mean
        over classes) in [0, 1], ``loss`` (mean cross-entropy, nats). Not finite where the model's outputs are not.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    parts = [
        model(normalization.apply(data.images[start : start + batch_size].to(device))).float().cpu()
        for start in range(0, len(data), batch_size)
    ]
    model.train(was_training)
    logits, labels, classes = torch.cat(parts), data.labels, data.num_classes
    if not bool(torch.isfinite(logits).all()):
        return dict.fromkeys(METRICS, float("nan"))
    measure: dict[str, Callable[[], Tensor]] = {
        "accuracy": lambda: multiclass_accuracy(logits, labels, classes, average="micro"),
        "balanced_accuracy": lambda: multiclass_accuracy(logits, labels, classes, average="macro"),
        "auroc": lambda: multiclass_auroc(logits.softmax(dim=1), labels, classes, average="macro"),
        "loss": lambda: F.cross_entropy(logits, labels),
    }
    return {name: float(measure[name]()) for name in METRICS}
