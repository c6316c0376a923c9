"""What target models are for, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from raydp import _reference, _validate
from raydp.errors import InvalidValue
from raydp.tasks.base import Draw, HeldOut, Task
from raydp.tasks.classification import Classification, cross_entropy_sum
from raydp.tasks.denoising import Denoising
from raydp.tasks.multilabel import Multilabel
from raydp.tasks.regression import Regression

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Classification(),
            Multilabel(),
            Regression(),
            Denoising(name="denoising", images=128, sampling_steps=20),
            Denoising(name="denoising_1024", images=1024, sampling_steps=50),
        )
    }
)


_WEIGHTED: Mapping[str, type[Classification] | type[Multilabel]] = MappingProxyType(
    {f"{kind.name}:weights=": kind for kind in (Classification, Multilabel)}
)


def task(name: str) -> Task:
    """A task.

    Args:
        name: one of :data:`TASKS`; or ``classification:weights=1,5``, which multiplies the loss of class i by the i-th
            public constant; or ``multilabel:weights=1,5``, which does so with the *yes* of label i; or
            ``file.py:name`` or ``package.module:name`` of a :class:`Task` of one's own, or of its class.

    Raises:
        UnknownName: there is none of that name; near names are suggested. InvalidValue: a weight is no positive number,
            or the name is not that of a task.

    >>> from raydp.tasks import task
    >>> task("classification:weights=1,5").weights
    (1.0, 5.0)
    >>> task("regresion")
    Traceback (most recent call last):
        ...
    raydp.errors.UnknownName: task = 'regresion' does not exist. Did you mean regression?
    """
    for form, kind in _WEIGHTED.items():
        if name.startswith(form):
            return kind(weights=_weights(name, form))
    if _reference.is_reference(name):
        return _own_task(name)
    return TASKS[_validate.one_of("task", name, TASKS)]


def canonical(name: str) -> str:
    """The text with its file, if it names one, as an absolute path."""
    return _reference.absolute(name) if _reference.is_reference(name) else name


def _weights(name: str, form: str) -> tuple[float, ...]:
    texts = name.removeprefix(form).split(",")
    try:
        return tuple(_validate.positive("task: weights", float(text)) for text in texts)
    except ValueError as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue("task", name, "must list numbers", f"Write {form}1,5.") from None


def _own_task(name: str) -> Task:
    found = _reference.resolve("task", name)
    if isinstance(found, type) and issubclass(found, Task):
        found = found()
    if not isinstance(found, Task):
        raise InvalidValue("task", name, "must name a raydp.tasks.Task", "Derive it from one, such as Classification.")
    return found


__all__ = [
    "TASKS",
    "Classification",
    "Denoising",
    "Draw",
    "HeldOut",
    "Multilabel",
    "Regression",
    "Task",
    "canonical",
    "cross_entropy_sum",
    "task",
]
