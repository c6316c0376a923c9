"""Somebody's private data in two Parquet files, which are the bundled digits under another name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits

from raydp.privacy.budget import Budget


def write_private(directory: Path, *, train: int = 700, test: int = 300, shared: int = 0) -> str:
    """A directory with train.parquet and test.parquet; the last of the latter are ``shared`` examples of the former."""
    directory.mkdir(parents=True)
    found = load_digits()
    images = (found.images * 15.9375).astype(np.uint8)
    parts = {"train": np.arange(train), "test": np.r_[train : train + test - shared, :shared]}
    for name, rows in parts.items():
        pixels = pa.array([images[row].flatten().tolist() for row in rows], pa.list_(pa.uint8(), 64))
        labels = pa.array(found.target[rows], pa.int64())
        pq.write_table(pa.table({"image": pixels, "label": labels}), directory / f"{name}.parquet")
    return str(directory)


HOLDOUT_BUDGET = Budget(epsilon=1.0, delta=1e-4)
