"""Canaries: public images made for audits, written as a private data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
        flat = images[rows].reshape(-1)
        column = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pa.array(flat), size), size)
        pq.write_table(pa.table({"image": column, "label": labels(count)[rows]}), directory / f"{name}.parquet")
    return str(directory)
