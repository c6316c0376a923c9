"""Data sets of labelled images, in any layout of :mod:`raydp.data.hub`."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from raydp.data.dataset import MNIST, UNKNOWN, Dataset, HoldoutVisibility, Normalization, held_out, limited
from raydp.data.hub import Files
from raydp.data.parquet import read_images, read_labels
from raydp.data.types import PrivateData, PublicData
from raydp.errors import InvalidValue

# Published constants of public benchmarks, by the name of the directory. A directory of another name is taken to be
# somebody's private data: nothing is computed from it, and its test file is no public benchmark.
_BENCHMARKS = {
    "mnist": MNIST,
    "fashion_mnist": Normalization(mean=(0.2860,), std=(0.3530,)),
    "cifar10": Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    "cifar100": Normalization(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "emnist_letters": UNKNOWN,
    "retinamnist": UNKNOWN,
    "tiny_imagenet32": UNKNOWN,
}


@functools.lru_cache(maxsize=1)
def load_labelled(path: Path, files: Files, limit: int | None, stamps: tuple[tuple[int, int], ...]) -> Dataset:
    """The data set of a path whose files have these stamps."""
    name = path.name if path.is_dir() else path.stem
    known = name in _BENCHMARKS and bool(files.test)
    visibility: HoldoutVisibility = "public benchmark" if known else "private hold-out"
    source = str(files.train[0]) if len(files.train) == 1 else str(path)
    images, labels, names = read_all(files, files.train, limit=limit if files.test else None)
    # Of all the files, whatever part of them is held out or left out.
    every = [labels]
    if files.test and limit is not None:
        every = [read_labels(file, label=files.label, names=files.names) for file in files.train]
    largest = max(int(part.max()) for part in every)
    if files.test:
        held_images, held_labels, held_names = read_all(files, files.test)
        if held_images.shape[1:] != images.shape[1:]:
            raise InvalidValue(
                str(files.test[0]),
                held_images.shape[1:],
                f"must hold images of the size (C, H, W) = {images.shape[1:]} of {files.train[0].name}",
                "Resize them.",
            )
        if names and held_names and names != held_names:
            raise InvalidValue(
                str(files.test[0]),
                held_names,
                f"must name the classes of {files.train[0].name}: {names}",
                "Renumber them.",
            )
    else:
        held = held_out(source, images)
        held_images, held_labels, held_names = images[held], labels[held], None
        images, labels = images[~held], labels[~held]
    names = names or held_names
    num_classes = len(names) if names else 1 + largest
    if files.test and not names and int(held_labels.max()) > largest:
        raise InvalidValue(
            f"{files.test[0]}: label",
            int(held_labels.max()),
            f"must lie in [0, {num_classes}), the classes of {files.train[0].name}: no example of another one is "
            "trained on",
            "Drop such rows, or name all classes in the metadata of a file.",
        )
    images, labels = limited(name, images, labels, limit)
    return Dataset(
        name=name,
        private=PrivateData(name=name, inputs=images, targets=labels, num_classes=num_classes),
        holdout=PublicData(name=f"{name} hold-out", inputs=held_images, targets=held_labels, num_classes=num_classes),
        normalization=_BENCHMARKS.get(name, UNKNOWN),
        summary=f"{len(images):,} private and {len(held_images):,} held-out images of {name}, {num_classes} classes",
        holdout_visibility=visibility,
    )


def read_all(
    files: Files, chosen: tuple[Path, ...], *, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """Images, labels and class names of several files of a data set, in their order.

    Args:
        limit: read the first ``limit`` rows only.

    Raises: as :func:`raydp.data.parquet.read_images`, and for files that do not fit each other.
    """
    parts: list[tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]] = []
    for file in chosen:
        left = None if limit is None else limit - sum(len(part[1]) for part in parts)
        if left == 0:
            break
        parts.append(read_images(file, limit=left, image=files.image, label=files.label, names=files.names))
    first = parts[0]
    if len(parts) == 1:
        return first
    for file, part in zip(chosen, parts, strict=False):
        if part[0].shape[1:] != first[0].shape[1:] or part[2] != first[2]:
            raise InvalidValue(
                str(file),
                (part[0].shape[1:], part[2]),
                f"must hold images and classes like {chosen[0].name}: {(first[0].shape[1:], first[2])}",
                "Resize the images, or write the shards from one data set.",
            )
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), first[2]


__all__ = ["load_labelled", "read_all"]
