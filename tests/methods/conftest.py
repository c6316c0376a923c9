"""A small public data set."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydp import data


@pytest.fixture(scope="session")
def public_digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digits' hold-out images as a public set: 360 images of 8×8, none of them private."""
    path = tmp_path_factory.mktemp("public") / "digits.parquet"
    holdout = data.load("digits").holdout
    images = [image.tolist() for image in holdout.inputs.numpy()]
    pq.write_table(pa.table({"image": images, "label": holdout.targets.numpy()}), path)
    return str(path)
