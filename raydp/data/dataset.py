"""A data set ready for a search, and what its sources share: public constants, a public split, a limit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raydp import _validate
from raydp.data.types import PrivateData, PublicData
from raydp.errors import InvalidValue

HoldoutVisibility = Literal["public benchmark", "private hold-out", "synthetic"]


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Mean and standard deviation of each channel (pixels lie in [0, 1]) or of each feature.

    They must be public constants: computed from private examples, they would be an unaccounted release. One value
    stands for all channels or features.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise InvalidValue("normalization", (self.mean, self.std), "needs a mean and a std a channel", "Give both.")
        for mean, std in zip(self.mean, self.std, strict=True):
            _validate.real("normalization.mean", mean)
            _validate.positive("normalization.std", std)

    def apply(self, inputs: Tensor) -> Tensor:
        """float32 of the same shape and device: (x/255 - mean)/std of uint8 images, (x - mean)/std of features."""
        shape = (1, -1, 1, 1) if inputs.dim() == 4 else (1, -1)
        mean, std = (torch.tensor(x, device=inputs.device).view(shape) for x in (self.mean, self.std))
        if inputs.dtype == torch.uint8:
            return inputs.float().div_(255).sub_(mean).div_(std)
        return (inputs - mean) / std


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set ready for a search.

    Attributes:
        private: what is trained on, under the budget.
        holdout: what metrics are measured on.
        holdout_visibility: ``public benchmark``, where measuring costs no privacy, or ``private hold-out``: the
            examples are as private as the others, so the metric is released through noise under a budget of theirs
            (:mod:`raydp.training.holdout`) or labelled as not private; or ``synthetic``, where there are no people
            behind the examples.
        normalization: public constants.
        summary: one line.
        task: what a model of these data is for, a name of :data:`raydp.tasks.TASKS`; a search may choose another.
    """

    name: str
    private: PrivateData
    holdout: PublicData
    normalization: Normalization
    summary: str
    holdout_visibility: HoldoutVisibility = "public benchmark"
    task: str = "classification"


#: MNIST's published constants.
MNIST = Normalization(mean=(0.1307,), std=(0.3081,))
#: For images of which nothing is published.
UNKNOWN = Normalization(mean=(0.5,), std=(0.25,))
#: For features, which are taken as they are.
IDENTITY = Normalization(mean=(0.0,), std=(1.0,))


def content_hash(content: bytes) -> int:
    """A public 64-bit hash. Splits follow from it, and not from generators whose streams change between releases."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"raydp.split").digest(), "big")


def held_out(source: str, inputs: np.ndarray) -> np.ndarray:
    """bool (N,): the sixth of the examples that is held out where no test set is named, by a hash of each input.

    Raises:
        InvalidValue: too few examples for both parts.
    """
    held = np.array([content_hash(one.tobytes()) % 6 == 0 for one in inputs])
    if held.all() or not held.any():
        raise InvalidValue(
            source, len(inputs), "has too few examples to hold a sixth of them out", "Give a test set of its own."
        )
    return held


def limited(name: str, images: np.ndarray, labels: np.ndarray, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The first ``limit`` private examples; all of them for None."""
    if limit is None:
        return images, labels
    if limit > len(images):
        raise InvalidValue(
            "limit",
            limit,
            f"must not exceed the {len(images)} private examples of {name!r}",
            "Lower it or leave it out.",
        )
    # A copy, so that what is cut off does not stay in memory behind a view.
    return (images, labels) if limit == len(images) else (images[:limit].copy(), labels[:limit].copy())
