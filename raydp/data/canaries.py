"""Canaries: public images made for audits, written as a private data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from raydp.data.types import PublicData
from raydp.errors import InvalidValue

#: Bright pixels of a canary. Each has its own, so that canaries do not touch each other's weights.
PIXELS = 4


def side(canaries: int) -> int:
    """The side of square images that hold every canary's pixels."""
    return math.ceil(math.sqrt(PIXELS * canaries))


def labels(canaries: int) -> np.ndarray:
    """The class, 0 or 1, of each canary: a public constant."""
    return np.arange(canaries) % 2


def write(directory: Path, included: Sequence[bool] | np.ndarray) -> str:
    """Write a data set with one example for each canary: the canary, or a dark image where it does not take part.

    A dark image contributes nothing to any step of a model such as ``bright_map``, whose gradient it leaves at zero. So
    data sets that differ in whether a canary takes part differ by adding or removing an example, at a fixed size.

    Returns:
        The directory, as data sets are named.
    """
    count = len(included)
    size = side(count)
    images = np.zeros((count, size * size), dtype=np.uint8)
    for canary in np.flatnonzero(np.asarray(included, dtype=bool)):
        images[canary, PIXELS * canary : PIXELS * (canary + 1)] = 255
    directory.mkdir(parents=True)
    for name, rows in (("train", slice(None)), ("test", slice(0, 2))):
        _write(directory / f"{name}.parquet", images[rows], labels(count)[rows], size)
    return str(directory)


def write_public(file: Path, public: PublicData, canaries: int) -> str:
    """Write public images in the shape of so many canaries: grey, resized, in two classes by the parity of their own.

    An audit is about what leaks of the canaries. What a method computes from public examples leaks nothing, whatever
    they show; they only have to fit the model.

    Returns:
        The file, as data sets are named.

    Raises:
        InvalidValue: they are no images, or all of them are dark.
    """
    if len(public.input_shape) != 3:
        raise InvalidValue("public", public.name, "must hold images, as canaries are", "Audit with public images.")
    size = side(canaries)
    grey = public.inputs.float().mean(dim=1, keepdim=True)
    resized = nn.functional.interpolate(grey, size=(size, size), mode="bilinear", antialias=True)
    images = resized.round().clamp(0, 255).to(torch.uint8).flatten(1).numpy()
    bright = images.max(axis=1) > 0  # a dark image is also what stands in a canary's place
    if not bright.any():
        raise InvalidValue("public", public.name, "must hold an image that is not dark", "Use other public images.")
    classes = public.targets.to(torch.int64).numpy() % 2
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, images[bright], classes[bright], size)
    return str(file)


def _write(file: Path, images: np.ndarray, classes: np.ndarray, size: int) -> None:
    """``images``: uint8 (n, size²)."""
    flat = pa.array(images.reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, size), size)
    pq.write_table(pa.table({"image": column, "label": classes}), file)
