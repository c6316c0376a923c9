"""A loss or a model of the user's own, tried out on made-up examples before anything is spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from raydp import _reference
from raydp.data import Dataset
from raydp.errors import InvalidValue, RaydpError
from raydp.training.gradients import PerExampleGradients

if TYPE_CHECKING:
    from raydp.search.definition import Search

_EXAMPLES = 3


def rehearse(search: Search, dataset: Dataset, model: nn.Module) -> None:
    """Take the gradients of made-up examples, where the model or the task is the user's own.

    A gradient that is not finite is noised as if it were 0: a loss that gives none would train on noise alone, at the
    full price, and nothing of a private run may tell so.

    Raises:
        InvalidValue: the loss fails, or a gradient is not finite.
    """
    own = [name for name in (search.task_name, search.model_name()) if _reference.is_reference(name)]
    if not own:
        return
    task, shape = search.target_task, dataset.private.input_shape
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((_EXAMPLES, *shape), generator=generator)
    draw = task.draw(_EXAMPLES, shape, np.random.default_rng(0))
    field = "task" if _reference.is_reference(search.task_name) else "model"
    try:
        gradients = PerExampleGradients(model, task.loss)(*task.examples(inputs, _targets(dataset), draw))
    except RaydpError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise InvalidValue(
            field,
            ", ".join(own),
            f"fails on made-up examples of shape {tuple(inputs.shape)}: {type(error).__name__}: {said}",
            "Let the loss take the model's outputs (n, …) and the targets (n, …), and return their sum.",
        ) from error
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise InvalidValue(
            field,
            ", ".join(own),
            "gives made-up examples gradients that are not finite: they would count as 0, and only noise be trained on",
            "Look for a logarithm, a root or a quotient at 0 in the loss and the model.",
        )


def _targets(dataset: Dataset) -> Tensor:
    private = dataset.private
    if private.num_labels is not None:
        return (torch.arange(_EXAMPLES * private.num_labels).reshape(_EXAMPLES, -1) % 2).float()
    if private.num_classes is not None:
        return torch.arange(_EXAMPLES) % private.num_classes
    return torch.linspace(-1, 1, _EXAMPLES)


__all__ = ["rehearse"]
