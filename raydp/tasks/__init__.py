"""What target models are for, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from raydp import _validate
from raydp.tasks.base import Draw, HeldOut, Task
from raydp.tasks.classification import Classification, cross_entropy_sum
from raydp.tasks.denoising import Denoising
from raydp.tasks.regression import Regression

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Classification(),
            Regression(),
            Denoising(name="denoising", images=128, sampling_steps=20),
            Denoising(name="denoising_1024", images=1024, sampling_steps=50),
        )
    }
)


def task(name: str) -> Task:
    """The task of that name. Raises UnknownName with the near names."""
    return TASKS[_validate.one_of("task", name, TASKS)]


__all__ = ["TASKS", "Classification", "Denoising", "Draw", "HeldOut", "Regression", "Task", "cross_entropy_sum", "task"]
