"""Examples, public and private. Two types, because what may be done with them differs.

Inputs are images, uint8 in (N, C, H, W), or features, float32 in (N, d). Targets are classes, int64 in (N,); numbers,
float32 in (N,); or several yes/no labels an example, float32 0 and 1 in (N, L). Both types keep the arrays they are
given, without a copy.
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
from raydp.privacy.ledger import LedgerRecorder
from raydp.privacy.mechanism import Phase
from raydp.privacy.noise import NoiseKey, poisson_members, poisson_sample

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
        inputs: (n, C, H, W) or (n, d); n may be 0.
        targets: (n,), or (n, L) labels.
        indices: int64, (n,), the positions of the examples in the data set.
    """

    inputs: Tensor
    targets: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.targets)


class PublicData:
    """Examples that may be read freely.

    Attributes:
        name: what messages call it.
        inputs: uint8 (N, C, H, W) or float32 (N, d).
        targets: int64 (N,), in [0, num_classes); or float32 (N,); or float32 (N, num_labels) of 0 and 1.
        num_classes: the number of classes, whether or not each of them occurs; None where targets are something else.
        num_labels: how many yes/no labels an example has; None where targets are something else.
        sets: None, or int64 (M, n), the positions of the examples of M public data sets of n examples each. A
            hypernetwork learns from them what a data set tells about a model.
        truth: None, or the parameters that made the targets of synthetic data, float32.

    Raises:
        InvalidValue: an array has another type or shape, there is no example, or a value is out of range.

    >>> import numpy as np
    >>> from raydp.data import PublicData
    >>> images, labels = np.zeros((4, 1, 8, 8), dtype=np.uint8), np.array([0, 1, 1, 0])
    >>> PublicData(name="made", inputs=images, targets=labels, num_classes=2).inputs.shape
    torch.Size([4, 1, 8, 8])
    """

    def __init__(
        self,
        *,
        name: str,
        inputs: Tensor | np.ndarray,
        targets: Tensor | np.ndarray,
        num_classes: int | None = None,
        num_labels: int | None = None,
        sets: Tensor | np.ndarray | None = None,
        truth: Tensor | np.ndarray | None = None,
    ) -> None:
        self.name = name
        self.inputs, self.targets, self.num_classes = _checked(name, inputs, targets, num_classes, num_labels)
        self.num_labels = num_labels
        self.sets = None if sets is None else _checked_sets(name, _tensor(sets), len(self.targets))
        self.truth = None if truth is None else _checked_truth(name, _tensor(truth))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) or (d,)."""
        return tuple(self.inputs.shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model returns for an example: one a class or label, or one."""
        return self.num_classes or self.num_labels or 1

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        sets = "" if self.sets is None else f", {len(self.sets)} sets of {self.sets.shape[1]}"
        return f"PublicData({self.name!r}, {_described(self.inputs, self.num_classes, self.num_labels)}{sets})"


class PrivateData:
    """Examples that are protected: readable through a sampler that writes to a ledger, and no other way.

    There is no item access, no iteration, no attribute that returns examples, and no pickling: worker processes load
    the data set by its name or path. (Python cannot keep anyone out who means to get in. It keeps out mistakes.)

    Attributes:
        name: what messages call it.
        num_classes: the number of classes, a public constant; None where targets are something else.
        num_labels: how many yes/no labels an example has, a public constant; None where targets are something else.

    Raises:
        InvalidValue: as for :class:`PublicData`.

    >>> import numpy as np
    >>> from raydp.data import PrivateData
    >>> images, labels = np.zeros((4, 1, 8, 8), dtype=np.uint8), np.array([0, 1, 1, 0])
    >>> private = PrivateData(name="patients", inputs=images, targets=labels, num_classes=2)
    >>> len(private)
    4
    >>> private[0]
    Traceback (most recent call last):
        ...
    raydp.data.types.PrivateAccess: Item access of the private data 'patients' is refused: ...
    """

    __slots__ = ("__fingerprint", "__inputs", "__members", "__size", "__targets", "name", "num_classes", "num_labels")

    def __init__(
        self,
        *,
        name: str,
        inputs: Tensor | np.ndarray,
        targets: Tensor | np.ndarray,
        num_classes: int | None = None,
        num_labels: int | None = None,
    ) -> None:
        self.name = name
        self.__inputs, self.__targets, self.num_classes = _checked(name, inputs, targets, num_classes, num_labels)
        self.num_labels = num_labels
        self.__members: np.ndarray | None = None
        self.__size = len(self.__targets)
        self.__fingerprint: str | None = None

    def part(self, *, key: NoiseKey, fraction: float, rest: bool) -> PrivateData:
        """A secret part of these examples: a Poisson subsample, or with ``rest`` everything that is not in it.

        Its length is the *expected* number of its examples (:func:`part_sizes`), which is public; how many are really
        in it, and who, is a secret of the key. The tensors are shared, not copied.

        Raises:
            InvalidValue: the fraction is out of range, or leaves one of the two parts without an expected example; or
                these are a part already.
        """
        if self.__members is not None:
            raise InvalidValue("private data", self.name, "are a part already", "Take the part of the whole data set.")
        sizes = part_sizes(len(self), fraction)
        members = poisson_members(key, fraction, len(self))
        found = PrivateData(
            name=f"{self.name} ({'the rest' if rest else 'a secret subsample'})",
            inputs=self.__inputs,
            targets=self.__targets,
            num_classes=self.num_classes,
            num_labels=self.num_labels,
        )
        found.__members, found.__size = ~members if rest else members, sizes[rest]
        return found

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) or (d,)."""
        return tuple(self.__inputs.shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model returns for an example: one a class or label, or one."""
        return self.num_classes or self.num_labels or 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the content. For lineage only: it identifies the data exactly, so do not publish it."""
        if self.__fingerprint is None:
            digest = hashlib.sha256(repr((tuple(self.__inputs.shape), self.num_classes)).encode())
            if self.num_labels is not None:  # the bytes of (N, L) labels are also those of N·L numbers
                digest.update(f"labels {self.num_labels}".encode())
            digest.update(self.__inputs.contiguous().numpy().data)
            digest.update(self.__targets.contiguous().numpy().data)
            if self.__members is not None:
                digest.update(self.__members.tobytes())
            self.__fingerprint = digest.hexdigest()
        return self.__fingerprint

    def sample(self, *, key: NoiseKey, phase: Phase, step: int, ledger: LedgerRecorder) -> Batch:
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
        indices = torch.from_numpy(poisson_sample(key, phase, step, self.__members))
        return Batch(self.__inputs[indices], self.__targets[indices], indices)

    def shared_with(self, public: PublicData) -> list[int]:
        """Positions in ``public`` of inputs that are also private ones, by content, whatever their targets.

        For refusing such a public set before anything runs: curvature or weights that were computed from it would
        carry private examples past the ledger.
        """
        own = {hashlib.sha256(one.tobytes()).digest() for one in self.__inputs.numpy()}
        theirs = (hashlib.sha256(one.tobytes()).digest() for one in public.inputs.contiguous().numpy())
        return [position for position, digest in enumerate(theirs) if digest in own]

    def shares_with(self, other: PrivateData) -> bool:
        """Whether an input of the other private set is also one of these, by content, whatever its target.

        For telling whether two searches spend on the same people. Sets of which one was only made from the other
        (resized, normalised) share nothing in this sense.
        """
        own = {hashlib.sha256(one.tobytes()).digest() for one in self.__inputs.numpy()}
        return any(hashlib.sha256(one.tobytes()).digest() in own for one in other.__inputs.numpy())

    def non_private(self, reason: str) -> PublicData:
        """All examples, for analysis outside privacy. The access is logged as a warning, with its reason.

        Nothing that is computed from the result may steer training or be published as private.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidValue("reason", reason, "must say what for", "Write a sentence; it goes into the log.")
        _log.warning("NON-PRIVATE access to all %d examples of %r: %s", len(self), self.name, reason)
        chosen = slice(None) if self.__members is None else torch.from_numpy(self.__members)
        return PublicData(
            name=f"{self.name} (non-private access)",
            inputs=self.__inputs[chosen],
            targets=self.__targets[chosen],
            num_classes=self.num_classes,
            num_labels=self.num_labels,
        )

    def __len__(self) -> int:
        """The number of examples; of a secret part the expected one."""
        return self.__size

    def __repr__(self) -> str:
        return f"PrivateData({self.name!r}, {_described(self.__inputs, self.num_classes, self.num_labels)})"

    def __getitem__(self, index: object) -> NoReturn:
        raise PrivateAccess(self.name, "Item access")

    def __iter__(self) -> NoReturn:
        raise PrivateAccess(self.name, "Iteration")

    def __contains__(self, item: object) -> NoReturn:
        raise PrivateAccess(self.name, "A membership test")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise PrivateAccess(self.name, "Conversion to an array")

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute in ("inputs", "targets", "images", "labels", "data"):
            raise PrivateAccess(self.name, f"Attribute {attribute!r}")
        raise AttributeError(f"PrivateData has no attribute {attribute!r}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RaydpError(
            f"The private data {self.name!r} are not pickled or copied: the copy would lie wherever the pickle goes "
            "(Ray's object store, a checkpoint). Send the name or path, and call raydp.data.load there."
        )


def part_sizes(population: int, fraction: float) -> tuple[int, int]:
    """Expected sizes, rounded, of a Poisson subsample and of the rest; they add up to the population.

    Raises:
        InvalidValue: a part would have no expected example.
    """
    fraction = _validate.between("selection.fraction", fraction, 0, 1, low_open=True, high_open=True)
    inside = round(fraction * population)
    if not 0 < inside < population:
        raise InvalidValue(
            "selection.fraction",
            fraction,
            f"leaves {inside} of {population} private examples to tune on",
            "Choose a fraction that gives both parts at least one expected example.",
        )
    return inside, population - inside


_INPUTS = {torch.uint8: (4, "images"), torch.float32: (2, "rows of features")}
_TARGETS = (torch.int64, torch.float32)


def described_targets(num_classes: int | None, num_labels: int | None) -> str:
    """What the targets are, for people."""
    if num_labels is not None:
        return f"{num_labels} yes/no labels"
    return "numbers as targets" if num_classes is None else f"{num_classes} classes"


def _described(inputs: Tensor, num_classes: int | None, num_labels: int | None) -> str:
    kind = _INPUTS[inputs.dtype][1]
    return f"{len(inputs)} {kind} of {tuple(inputs.shape[1:])}, {described_targets(num_classes, num_labels)}"


def _tensor(array: Tensor | np.ndarray) -> Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def _checked(
    name: str,
    inputs: Tensor | np.ndarray,
    targets: Tensor | np.ndarray,
    num_classes: int | None,
    num_labels: int | None,
) -> tuple[Tensor, Tensor, int | None]:
    inputs, targets = _tensor(inputs), _tensor(targets)
    if inputs.dtype not in _INPUTS or inputs.dim() != _INPUTS[inputs.dtype][0]:
        raise InvalidValue(
            f"{name}.inputs",
            f"{inputs.dtype} of shape {tuple(inputs.shape)}",
            "must be uint8 of 4 dimensions or float32 of 2 dimensions",
            "Images are uint8 (N, C, H, W), features float32 (N, d).",
        )
    labelled = num_labels is not None and tuple(targets.shape[1:]) == (num_labels,) and targets.dtype == torch.float32
    if not labelled and (num_labels is not None or targets.dtype not in _TARGETS or targets.dim() != 1):
        wanted = "int64 or float32 of 1 dimension" if num_labels is None else f"float32 (N, {num_labels})"
        raise InvalidValue(
            f"{name}.targets",
            f"{targets.dtype} of shape {tuple(targets.shape)}",
            f"must be {wanted}",
            "Classes are int64 (N,), numbers float32 (N,), yes/no labels float32 (N, num_labels).",
        )
    if len(inputs) != len(targets) or not len(targets) or 0 in inputs.shape:
        raise InvalidValue(
            f"{name}.inputs",
            tuple(inputs.shape),
            f"must hold one input for each of {len(targets)} >= 1 targets",
            "Check it.",
        )
    for field, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InvalidValue(f"{name}.{field}", "NaN or infinite", "must be finite", "Clean the data.")
    if targets.is_floating_point():
        if num_classes is not None:
            raise InvalidValue(
                f"{name}.num_classes",
                num_classes,
                "has no meaning for targets that are numbers or labels",
                "Leave it out.",
            )
        if labelled and not bool(((targets == 0) | (targets == 1)).all()):
            raise InvalidValue(f"{name}.targets", "other numbers", "must be 0 or 1, one a label", "Correct them.")
        return inputs, targets, None
    num_classes = _validate.integer(f"{name}.num_classes", num_classes, low=1)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= num_classes:
        raise InvalidValue(
            f"{name}.targets",
            low if low < 0 else high,
            f"must lie in [0, {num_classes})",
            "Number the classes from 0, or state the number of classes.",
        )
    return inputs, targets, num_classes


def _checked_sets(name: str, sets: Tensor, examples: int) -> Tensor:
    if sets.dtype != torch.int64 or sets.dim() != 2 or 0 in sets.shape:
        raise InvalidValue(
            f"{name}.sets", f"{sets.dtype} of shape {tuple(sets.shape)}", "must be int64 (M, n)", "Give positions."
        )
    if int(sets.min()) < 0 or int(sets.max()) >= examples:
        raise InvalidValue(
            f"{name}.sets", int(sets.max()), f"must be positions of the {examples} examples", "Check them."
        )
    return sets


def _checked_truth(name: str, truth: Tensor) -> Tensor:
    if truth.dtype != torch.float32 or not bool(torch.isfinite(truth).all()):
        raise InvalidValue(f"{name}.truth", str(truth.dtype), "must be finite float32", "Check it.")
    return truth
