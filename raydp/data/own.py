"""A torch data set of one's own: ``data="file.py:make"``, a function that returns it with what is public of it.

``make()`` returns a :class:`TorchData`; or a map-style ``torch.utils.data.Dataset``, or a pair (train, test) of them,
whose first has an attribute ``classes`` (their names, as torchvision's have). An item is a pair (input, target):

* input: an image, uint8 or floats in [0, 1], (C, H, W) or (H, W), or a PIL image; or one row of numbers, (d,), which is
  taken as it is;
* target: the number of a class; a number; or a vector of 0 and 1, one a label.

The function is called anew in every process, so it must return the same items in the same order each time: random
transforms and unseeded splits are refused. (Augmentation is a hyperparameter.) What it names as classes or as a range
is public; computed from private rows, it would be an unaccounted release.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from raydp import _reference, _validate
from raydp.data.columns import scaled
from raydp.data.dataset import IDENTITY, UNKNOWN, Dataset, held_out, limited
from raydp.data.kinds import Quantity
from raydp.data.types import PrivateData, PublicData, described_targets
from raydp.errors import InvalidValue

_COMPARED = 64  # items of each part that are asked for twice
_SHOWN = 40  # characters of a refused value
_REMEDY = "Return raydp.data.TorchData(train=…, test=…, classes=2)."


@dataclass(frozen=True, kw_only=True)
class TorchData:
    """A torch data set, and what is public of it: one of ``classes``, ``labels`` and ``target_range``.

    Attributes:
        train: a map-style data set of the private examples.
        test: what metrics are measured on; None holds a sixth of ``train`` out, by a hash of each input.
        classes: the number of classes, or their names.
        labels: the number of yes/no labels of an example, or their names.
        target_range: (low, high) of targets that are numbers: they are mapped to [-1, 1] and cut off at its ends.
        public_holdout: whether the held-out examples may be measured without noise.
    """

    train: TorchDataset[Any]
    test: TorchDataset[Any] | None = None
    classes: int | Sequence[str] | None = None
    labels: int | Sequence[str] | None = None
    target_range: tuple[float, float] | None = None
    public_holdout: bool = False

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            part = getattr(self, name)
            if part is not None:
                _refuse_unfit(name, part)
        given = [name for name in ("classes", "labels", "target_range") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidValue(
                "TorchData",
                given,
                "must state what targets are: one of classes, labels and target_range",
                "Write classes=2, labels=3, or target_range=(0, 10), from what is publicly known.",
            )
        if self.classes is not None:
            _validate.integer("TorchData.classes", _count(self.classes), low=2)
        if self.labels is not None:
            _validate.integer("TorchData.labels", _count(self.labels), low=1)
        if self.target_range is not None:
            try:
                low, high = self.target_range
            except (TypeError, ValueError):
                raise InvalidValue(
                    "TorchData.target_range", self.target_range, "must be (low, high)", "Write target_range=(0, 10)."
                ) from None
            Quantity(low=low, high=high)

    @property
    def num_classes(self) -> int | None:
        """Of the targets; None where they are something else."""
        return None if self.classes is None else _count(self.classes)

    @property
    def num_labels(self) -> int | None:
        """Yes/no labels of an example; None where targets are something else."""
        return None if self.labels is None else _count(self.labels)

    @property
    def task(self) -> str:
        """What a model of these data is for."""
        if self.labels is not None:
            return "multilabel"
        return "regression" if self.classes is None else "classification"


def is_own(name: str) -> bool:
    """Whether a data set's name is that of a function of one's own."""
    return _reference.is_reference(name)


def own_task(name: str) -> str:
    """What models of the data set are for."""
    return _made(_reference.absolute(name), _reference.digest("data", name)).task


def load_own(name: str, limit: int | None) -> Dataset:
    """The data set that a function of one's own returns.

    Raises:
        UnknownName: no such file, module or name; near names are suggested.
        InvalidValue: it is no function, fails, or returns something else; an item is not as its like, or not the same
            when it is asked for again.
    """
    return _load(_reference.absolute(name), _reference.digest("data", name), limit)


def own_as_public(name: str) -> PublicData:
    """Its training examples, as public data."""
    made = _made(_reference.absolute(name), _reference.digest("data", name))
    inputs, targets = _arrays(f"{name}: train", made.train, made)
    return PublicData(
        name=name, inputs=inputs, targets=targets, num_classes=made.num_classes, num_labels=made.num_labels
    )


@functools.lru_cache(maxsize=1)
def _load(name: str, digest: str, limit: int | None) -> Dataset:
    made = _made(name, digest)
    inputs, targets = _arrays(f"{name}: train", made.train, made)
    again = _made.__wrapped__(name, digest)  # as another process would
    _refuse_changes(f"{name}: train", again.train, inputs, targets, made)
    if made.test is not None:
        held_inputs, held_targets = _arrays(f"{name}: test", made.test, made)
        _refuse_changes(f"{name}: test", again.test, held_inputs, held_targets, made)
        if held_inputs.shape[1:] != inputs.shape[1:]:
            raise InvalidValue(
                f"{name}: test", held_inputs.shape[1:], f"must be like train: {inputs.shape[1:]}", "Resize."
            )
    else:
        held = held_out(name, inputs)
        held_inputs, held_targets, inputs, targets = inputs[held], targets[held], inputs[~held], targets[~held]
    inputs, targets = limited(name, inputs, targets, limit)
    short = name.rpartition(":")[2]
    classes, labels = made.num_classes, made.num_labels
    return Dataset(
        name=short,
        private=PrivateData(name=short, inputs=inputs, targets=targets, num_classes=classes, num_labels=labels),
        holdout=PublicData(
            name=f"{short} hold-out", inputs=held_inputs, targets=held_targets, num_classes=classes, num_labels=labels
        ),
        normalization=UNKNOWN if inputs.dtype == np.uint8 else IDENTITY,
        summary=f"{len(inputs):,} private and {len(held_inputs):,} held-out examples of {short}, "
        f"{described_targets(classes, labels)}",
        holdout_visibility="public benchmark" if made.public_holdout else "private hold-out",
        task=made.task,
    )


@functools.lru_cache(maxsize=1)
def _made(name: str, digest: str) -> TorchData:
    """What the function returns, without reading an item."""
    make = _reference.resolve("data", name)
    if not callable(make):
        raise InvalidValue("data", name, "must name a function", f"Write def {name.rpartition(':')[2]}(): return ….")
    try:
        made = make()
    except InvalidValue as error:
        raise InvalidValue(f"data = {name!r}: {error.field}", error.value, error.rule, error.remedy) from error
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise InvalidValue(
            "data", name, f"fails: {type(error).__name__}: {said}", "Let it return a data set without arguments."
        ) from error
    if isinstance(made, TorchData):
        return made
    pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for part, dataset in zip(("train", "test"), pair, strict=True):
        if part == "train" or dataset is not None:
            _refuse_unfit(f"data = {name!r}: {part}", dataset)
    classes = getattr(pair[0], "classes", None)
    if classes is None:
        raise InvalidValue(
            "data", name, "returns a data set without saying what its targets are, which must be public", _REMEDY
        )
    return TorchData(train=pair[0], test=pair[1], classes=classes)


def _refuse_unfit(field: str, dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise InvalidValue(
            field,
            type(dataset).__name__,
            "is an iterable data set: examples are sampled by their number, so it must have a length and items",
            "Make it map-style (__len__ and __getitem__), or write it to a Parquet file and name that.",
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidValue(
            field, type(dataset).__name__, "must be a map-style torch data set (__len__ and __getitem__)", _REMEDY
        )
    if not len(dataset):
        raise InvalidValue(field, "0 items", "must hold at least one example", "Fill it.")


def _arrays(field: str, dataset: Any, made: TorchData) -> tuple[np.ndarray, np.ndarray]:
    """Inputs uint8 (N, C, H, W) or float32 (N, d), and targets int64 (N,), float32 (N,) or float32 (N, labels)."""
    inputs: np.ndarray | None = None
    targets: list[Any] = []
    for row in range(len(dataset)):
        one, target = _item(field, dataset, row, made)
        if inputs is None:
            inputs = np.empty((len(dataset), *one.shape), dtype=one.dtype)
        if one.shape != inputs.shape[1:] or one.dtype != inputs.dtype:
            raise InvalidValue(
                f"{field}: input of item {row}",
                f"{one.dtype} of shape {one.shape}",
                f"must be {inputs.dtype} of shape {inputs.shape[1:]}, as the items before it",
                "Resize the images, or pad the rows, to one size.",
            )
        inputs[row] = one
        targets.append(target)
    assert inputs is not None  # not empty
    return inputs, _as_array(targets, made)


def _as_array(targets: list[Any], made: TorchData) -> np.ndarray:
    if made.target_range is not None:
        low, high = made.target_range
        return scaled(np.array(targets, dtype=np.float64), Quantity(low=low, high=high))
    return np.array(targets, dtype=np.int64 if made.labels is None else np.float32)


def _refuse_changes(field: str, again: Any, inputs: np.ndarray, targets: np.ndarray, made: TorchData) -> None:
    """Some items, asked for again of a data set that was made again, must be what they were."""
    rows = np.unique(np.linspace(0, len(inputs) - 1, _COMPARED).astype(int))
    same = again is not None and len(again) == len(inputs)
    if same:
        found = [_item(field, again, int(row), made) for row in rows]
        same = all(np.array_equal(one, inputs[row]) for row, (one, _) in zip(rows, found, strict=True))
        same = same and np.array_equal(_as_array([target for _, target in found], made), targets[rows])
    if not same:
        raise InvalidValue(
            field,
            "other items",
            "must be the same each time the function is called: every process of a search calls it, and a replayed "
            "step must find the example that it counted",
            "Give random splits a fixed generator, and leave random transforms to the hyperparameter augmentation.",
        )


def _item(field: str, dataset: Any, row: int, made: TorchData) -> tuple[np.ndarray, Any]:
    item = dataset[row]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise InvalidValue(
            f"{field}: item {row}", type(item).__name__, "must be a pair (input, target)", "Return both, in this order."
        )
    return _input(f"{field}: input of item {row}", item[0]), _target(f"{field}: target of item {row}", item[1], made)


def _input(field: str, value: Any) -> np.ndarray:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2, 3) or 0 in array.shape:
        raise InvalidValue(
            field,
            f"{type(value).__name__} ({array.dtype} of shape {array.shape})",
            "must be an image (C, H, W) or (H, W), or a row of numbers (d,)",
            "Let a transform make a tensor of it; flatten other shapes, and let the model restore them.",
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidValue(field, "NaN or infinite", "must be finite", "Clean the data.")
    if array.ndim == 1:
        return array.astype(np.float32)
    if not isinstance(value, Tensor) and array.ndim == 3 and array.shape[2] in (1, 3):  # as PIL and numpy keep them
        array = array.transpose(2, 0, 1)
    if array.ndim == 2:
        array = array[None]
    if array.dtype.kind == "f":
        if array.min() < 0 or array.max() > 1:
            raise InvalidValue(
                field,
                f"[{array.min():g}, {array.max():g}]",
                "must be pixels in [0, 1], or uint8: they are kept in 8 bits and normalised by public constants",
                "Leave out transforms such as Normalize; flatten what is no image.",
            )
        return np.rint(array * 255).astype(np.uint8)
    if array.min() < 0 or array.max() > 255:
        raise InvalidValue(field, f"[{array.min()}, {array.max()}]", "must be pixels in 0..255", "Rescale to 8 bits.")
    return array.astype(np.uint8)


def _target(field: str, value: Any, made: TorchData) -> Any:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if made.labels is not None:
        if array.shape != (made.num_labels,) or not np.isin(array, (0, 1)).all():
            raise InvalidValue(
                field, str(value)[:_SHOWN], f"must be a vector of {made.num_labels} zeros and ones", "Correct it."
            )
        return array.astype(np.float32)
    if made.classes is not None:
        if array.ndim or array.dtype.kind not in "iub" or not 0 <= int(array) < (made.num_classes or 0):
            raise InvalidValue(
                field,
                str(value)[:_SHOWN],
                f"must be the number of a class, an integer in [0, {made.num_classes})",
                "Number the classes from 0; for numbers as targets, state target_range.",
            )
        return int(array)
    if array.ndim or array.dtype.kind not in "iuf" or not np.isfinite(array):
        raise InvalidValue(field, str(value)[:_SHOWN], "must be one finite number", "Correct it.")
    return float(array)


def _count(given: int | Sequence[str]) -> int:
    if isinstance(given, str) or not isinstance(given, (int, Sequence)):
        raise InvalidValue("TorchData", given, "must be a number, or a list of names", "Write classes=2.")
    return given if isinstance(given, int) else len(given)


__all__ = ["TorchData", "is_own", "load_own", "own_as_public", "own_task"]
