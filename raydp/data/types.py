"""Labelled images, public and private. Two types, because what may be done with them differs.

Images are uint8 in (N, C, H, W), labels int64 in (N,). Both types keep the arrays they are given, without a copy.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from raydp import _validate
from raydp.errors import InvalidValue, LedgerRefusal, RaydpError
from raydp.privacy.ledger import LedgerWriter
from raydp.privacy.mechanism import Phase
from raydp.privacy.noise import NoiseKey, poisson_sample

_log = logging.getLogger("raydp.data")


class PrivateAccess(RaydpError, TypeError, AttributeError):
    """Private examples were asked for in a way that no ledger would know about."""

    def __init__(self, name: str, attempt: str) -> None:
        super().__init__(
            f"{attempt} of the private data {name!r} is refused: it would not be in any ledger. There are two ways: "
            ".sample(key=…, phase=…, step=…, ledger=…), which is recorded and accounted for, or .non_private(reason), "
            "which is logged and is for the analysis of public benchmarks only."
        )


@dataclass(frozen=True)
class Batch:
    """Some examples of a data set.

    Attributes:
        images: uint8, (n, C, H, W); n may be 0.
        labels: int64, (n,).
        indices: int64, (n,), the positions of the examples in the data set.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class PublicData:
    """Labelled images that may be read freely.

    Attributes:
        name: what messages call it.
        images: uint8, (N, C, H, W).
        labels: int64, (N,), in [0, num_classes).
        num_classes: the number of classes, whether or not each of them occurs.

    Raises:
        InvalidValue: an array has another type or shape, there is no example, or a label is out of range.
    """

    def __init__(
        self, *, name: str, images: Tensor | np.ndarray, labels: Tensor | np.ndarray, num_classes: int
    ) -> None:
        self.name = name
        self.images, self.labels, self.num_classes = _checked(name, images, labels, num_classes)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return _shape(self.images)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"PublicData({self.name!r}, {len(self)} images of {self.input_shape}, {self.num_classes} classes)"


class PrivateData:
    """Labelled images that are protected: readable through a sampler that writes to a ledger, and no other way.

    There is no item access, no iteration, no attribute that returns examples, and no pickling: worker processes load
    the data set by its name or path. (Python cannot keep anyone out who means to get in. It keeps out mistakes.)

    Attributes:
        name: what messages call it.
        num_classes: the number of classes, a public constant.

    Raises:
        InvalidValue: as for :class:`PublicData`.
    """

    __slots__ = ("__fingerprint", "__images", "__labels", "name", "num_classes")

    def __init__(
        self, *, name: str, images: Tensor | np.ndarray, labels: Tensor | np.ndarray, num_classes: int
    ) -> None:
        self.name = name
        self.__images, self.__labels, self.num_classes = _checked(name, images, labels, num_classes)
        self.__fingerprint: str | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return _shape(self.__images)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the content. For lineage only: it identifies the data exactly, so do not publish it."""
        if self.__fingerprint is None:
            digest = hashlib.sha256(repr((tuple(self.__images.shape), self.num_classes)).encode())
            digest.update(self.__images.contiguous().numpy().data)
            digest.update(self.__labels.contiguous().numpy().data)
            self.__fingerprint = digest.hexdigest()
        return self.__fingerprint

    def sample(self, *, key: NoiseKey, phase: Phase, step: int, ledger: LedgerWriter) -> Batch:
        """The Poisson sample of one logical step, recorded in the ledger before any example is read.

        Every example takes part with probability ``phase.sample_rate``, so the batch may be empty; an empty one is
        a step as well (zero signal, all the noise). The same key, phase and step give the same batch.

        Raises:
            LedgerRefusal: the plan has no room for this step, or holds another phase of that name.
            InvalidValue: the phase was planned for another number of examples.
        """
        if phase.spec.population != len(self):
            raise InvalidValue(
                f"{phase.name}.population",
                phase.spec.population,
                f"must be the {len(self)} examples of {self.name!r}: the sample rate was derived from it",
                "Make the plan for this data set.",
            )
        if phase not in ledger.plan.phases:
            raise LedgerRefusal(f"Phase {phase.name!r} with these parameters is not in the plan of {ledger.path}.")
        ledger.record(phase.name, step)
        indices = torch.from_numpy(poisson_sample(key, phase, step))
        return Batch(self.__images[indices], self.__labels[indices], indices)

    def shared_with(self, public: PublicData) -> list[int]:
        """Positions in ``public`` of images that are also private ones, by content.

        For refusing such a public set before anything runs: curvature or weights that were computed from it would
        carry private examples past the ledger.
        """
        own = {hashlib.sha256(image.tobytes()).digest() for image in self.__images.numpy()}
        theirs = (hashlib.sha256(image.tobytes()).digest() for image in public.images.contiguous().numpy())
        return [position for position, digest in enumerate(theirs) if digest in own]

    def non_private(self, reason: str) -> PublicData:
        """All examples, for analysis outside privacy. The access is logged as a warning, with its reason.

        Nothing that is computed from the result may steer training or be published as private.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidValue("reason", reason, "must say what for", "Write a sentence; it goes into the log.")
        _log.warning("NON-PRIVATE access to all %d examples of %r: %s", len(self), self.name, reason)
        return PublicData(
            name=f"{self.name} (non-private access)",
            images=self.__images,
            labels=self.__labels,
            num_classes=self.num_classes,
        )

    def __len__(self) -> int:
        return len(self.__labels)

    def __repr__(self) -> str:
        return f"PrivateData({self.name!r}, {len(self)} images of {self.input_shape}, {self.num_classes} classes)"

    def __getitem__(self, index: object) -> NoReturn:
        raise PrivateAccess(self.name, "Item access")

    def __iter__(self) -> NoReturn:
        raise PrivateAccess(self.name, "Iteration")

    def __contains__(self, item: object) -> NoReturn:
        raise PrivateAccess(self.name, "A membership test")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise PrivateAccess(self.name, "Conversion to an array")

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute in ("images", "labels", "data", "targets"):
            raise PrivateAccess(self.name, f"Attribute {attribute!r}")
        raise AttributeError(f"PrivateData has no attribute {attribute!r}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RaydpError(
            f"The private data {self.name!r} are not pickled or copied: the copy would lie wherever the pickle goes "
            "(Ray's object store, a checkpoint). Send the name or path, and call raydp.data.load there."
        )


def _shape(images: Tensor) -> tuple[int, int, int]:
    channels, height, width = images.shape[1:]
    return channels, height, width


def _checked(
    name: str, images: Tensor | np.ndarray, labels: Tensor | np.ndarray, num_classes: int
) -> tuple[Tensor, Tensor, int]:
    num_classes = _validate.integer(f"{name}.num_classes", num_classes, low=1)
    images, labels = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (images, labels))
    for field, tensor, dtype, rank in (("images", images, torch.uint8, 4), ("labels", labels, torch.int64, 1)):
        if tensor.dtype != dtype or tensor.dim() != rank:
            raise InvalidValue(
                f"{name}.{field}",
                f"{tensor.dtype} of shape {tuple(tensor.shape)}",
                f"must be {dtype} of {rank} dimensions",
                "Images are uint8 (N, C, H, W), labels int64 (N,).",
            )
    if len(images) != len(labels) or not len(labels) or 0 in images.shape:
        raise InvalidValue(
            f"{name}.images",
            tuple(images.shape),
            f"must hold one image for each of {len(labels)} >= 1 labels",
            "Check it.",
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise InvalidValue(
            f"{name}.labels",
            low if low < 0 else high,
            f"must lie in [0, {num_classes})",
            "Number the classes from 0, or state the number of classes.",
        )
    return images, labels, num_classes
