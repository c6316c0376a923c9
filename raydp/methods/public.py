"""What methods do with public examples: check that they are there, choose labels, and refresh a geometry from them.

Everything here is a function of public examples, public randomness and released weights: post-processing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydp._workers import ALONE, Workers
from raydp.errors import InvalidValue
from raydp.geometry import Geometry
from raydp.methods.base import Policy, PublicExamples, Setting


def public_seed(seed: int, *address: int) -> int:
    """A seed of public randomness for one purpose of a run: the same whenever it is asked for."""
    return int(np.random.SeedSequence([seed, *address]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def public_generator(seed: int, *address: int) -> torch.Generator:
    """A CPU generator from :func:`public_seed`."""
    return torch.Generator().manual_seed(public_seed(seed, *address))


def require_public(setting: Setting, *, purpose: str, alternative: str = "") -> PublicExamples:
    """The setting's public examples.

    Args:
        purpose: completes "must name public examples, …" for people.
        alternative: what else the user may do, after "Set public to …".

    Raises:
        InvalidValue: there are none.
    """
    public = setting.public
    if public is None or len(public.targets) == 0:
        raise InvalidValue(
            "public",
            None if public is None else "0 examples",
            f"must name public examples, {purpose}",
            f"Set public to a data set or a Parquet file{alternative}.",
        )
    return public


@dataclass(frozen=True, kw_only=True)
class FisherExamples:
    """Public examples with the labels under which their gradients are taken.

    Attributes:
        images: (n, C, H, W), n >= 1.
        fisher_labels: ``model``, ``random`` or ``given``.
        labels: (n,) for ``given``; else None.
    """

    images: Tensor
    fisher_labels: str
    labels: Tensor | None

    @classmethod
    def of(cls, setting: Setting, public: PublicExamples, fisher_labels: str) -> FisherExamples:
        """Raises InvalidValue: ``given`` labels that are no classes of the model."""
        if fisher_labels != "given":
            return cls(images=public.inputs, fisher_labels=fisher_labels, labels=None)
        classes = model_classes(setting, public.inputs)
        if int(public.targets.max()) >= classes:
            raise InvalidValue(
                "fisher_labels",
                "given",
                f"needs public labels in [0, {classes}), the classes of the model, but they go up to "
                f"{int(public.targets.max())}",
                "Use 'model', which draws labels from the model's own outputs, or 'random'.",
            )
        return cls(images=public.inputs, fisher_labels=fisher_labels, labels=public.targets)


def model_classes(setting: Setting, images: Tensor) -> int:
    """The number of logits of the model."""
    with torch.no_grad():
        return int(setting.model(images[:1]).shape[1])


class RefreshedPolicy(Policy):
    """A geometry of some tensors that are estimated on public examples every ``interval`` steps, at the weights then.

    Args:
        interval: steps between two estimates, >= 1; the first is at step 0.
        workers: of the run. Each computes the estimate; that of the first is taken by all.
    """

    def __init__(self, interval: int, workers: Workers = ALONE) -> None:
        self._interval, self._workers = interval, workers
        self._estimated_at = -1
        self._tensors: tuple[Tensor, ...] = ()
        self._geometry: Geometry | None = None

    @abstractmethod
    def estimate(self, step: int) -> Sequence[Tensor]:
        """The geometry's tensors at the model's current weights."""

    @abstractmethod
    def build(self, tensors: Sequence[Tensor]) -> Geometry:
        """The geometry of these tensors."""

    def interval(self, phase: str) -> int | None:
        return self._interval

    def geometry(self, phase: str, step: int) -> Geometry:
        # A resumed run asks again for the geometry of its last step, which belongs to earlier weights.
        if step % self._interval == 0 and step != self._estimated_at:
            self._tensors = tuple(self.estimate(step))
            self._workers.spread(self._tensors)
            self._estimated_at, self._geometry = step, None
        if self._geometry is None:
            self._geometry = self.build(self._tensors)
        return self._geometry

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": list(self._tensors), "estimated_at": self._estimated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tensors, self._estimated_at = tuple(state["tensors"]), int(state["estimated_at"])
        self._geometry = None
