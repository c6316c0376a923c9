"""What a target model is for: the loss of an example, and how good a model is.

A method asks for the loss, a run for the metrics. Neither knows what an example is. A task that trains on a randomised
version of each example (a denoising task draws a time and a noise for it) draws that randomness for a whole logical
batch at once, from a generator of the step, so that micro-batches and replays see the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from raydp._randomness import Randomness
from raydp.errors import InvalidValue

InputShape = tuple[int, ...]


class Draw(Protocol):
    """The random numbers of n examples (or copies of examples). They never depend on what the examples are."""

    def __len__(self) -> int: ...

    def __getitem__(self, examples: slice, /) -> Draw:
        """Those of some of the examples."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The examples that metrics are measured on.

    Attributes:
        inputs: (N, …), as stored.
        targets: (N,), or (N, L) yes/no labels.
        normalize: from stored inputs to what a model takes, for a piece of them.
        num_classes: of the targets; None where they are something else.
        truth: the parameters that made the targets, where the data are synthetic; else None.
        seed: of public randomness, for metrics that sample.
    """

    inputs: Tensor
    targets: Tensor
    normalize: Callable[[Tensor], Tensor]
    num_classes: int | None = None
    truth: Tensor | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.targets)


class Task(ABC):
    """What the target model is for.

    Attributes:
        name, summary: for people.
        metrics: name -> ``max`` or ``min``, whichever is better; the first is the usual objective.
        classes: whether the classes of the examples are what is predicted.
        bounds: metric -> b, for those that are a mean over the examples of numbers in [0, b], where an example's
            number follows from it and the model alone. Only these can be released through noise.

    A task of one's own changes what it needs of another one, and is named ``task="tasks.py:Absolute"`` in a search:

    >>> import torch
    >>> from raydp.tasks import Regression
    >>> class Absolute(Regression):
    ...     name = "absolute"
    ...
    ...     def loss(self, outputs, targets):
    ...         return (outputs.flatten() - targets).abs().sum()
    >>> float(Absolute().loss(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])))
    3.0
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    metrics: ClassVar[Mapping[str, str]]
    classes: ClassVar[bool] = False
    bounds: ClassVar[Mapping[str, float]] = {}

    @abstractmethod
    def check(
        self, name: str, *, input_shape: InputShape, num_classes: int | None, num_labels: int | None = None
    ) -> None:
        """Refuse data that the task is not about.

        Args:
            name: of the data, for messages.
            input_shape: (C, H, W) of images or (d,) of features.
            num_classes: of the targets; None where they are something else.
            num_labels: how many yes/no labels an example has; None where targets are something else.

        Raises:
            InvalidValue: says what the task needs.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum (not mean) of the examples' losses, so that each example's gradient is in per-example units.

        Args:
            outputs: (n, …), of the model.
            targets: (n, …), of :meth:`examples`.
        """

    def draw(self, n: int, input_shape: InputShape, generator: Randomness) -> Draw | None:
        """The randomness of n training examples; None for a task without any."""
        return None

    def examples(self, inputs: Tensor, targets: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """What the model is given, and what its outputs are held against.

        Args:
            inputs: (n, …), normalised.
            targets: (n,) or (n, L), of the data.
            draw: of the same n examples.

        Returns:
            One tensor of model inputs (n, …) and one of targets (n, …). Row i is a function of example i and of its
            draw alone.
        """
        return inputs, targets

    def available(self, model: nn.Module, held_out: HeldOut) -> tuple[str, ...]:
        """The metrics that can be measured of this model on these examples."""
        return tuple(self.metrics)

    @abstractmethod
    def evaluate(self, model: nn.Module, held_out: HeldOut) -> dict[str, float]:
        """All available metrics; not finite where the model's outputs are not. The model is left as it was."""

    def contributions(self, metric: str, model: nn.Module, held_out: HeldOut) -> Tensor:
        """What each example contributes to a metric of :attr:`bounds`: (N,), each in [0, b]. Nothing is averaged.

        Raises:
            InvalidValue: the metric has no bound.
        """
        raise InvalidValue("metric", metric, f"has no bound in the task {self.name!r}", "Choose another metric.")

    def keep(self, model: nn.Module, held_out: HeldOut, directory: Path) -> None:
        """Leave what shows a finished model at work in the directory of its run; functions of its weights alone."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """The model in evaluation mode, without gradients; gives its device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def outputs_of(model: nn.Module, held_out: HeldOut, *, batch_size: int = 500) -> Tensor:
    """Outputs of the model for all held-out examples, float32 on the CPU."""
    with evaluating(model) as device:
        return torch.cat(
            [
                model(held_out.normalize(held_out.inputs[start : start + batch_size].to(device))).float().cpu()
                for start in range(0, len(held_out), batch_size)
            ]
        )


def refuse(name: str, field: str, value: object, task: str, rule: str) -> None:
    """Raise the error of data that a task is not about."""
    raise InvalidValue(
        f"{name}.{field}", value, f"does not suit the task {task!r}, which needs {rule}", "Choose other data or task."
    )
