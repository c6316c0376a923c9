"""Public data sets: what curvature, pre-training and hypernetworks may be computed from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from raydp import _validate
from raydp.data import families, regression
from raydp.data.bundled import bundled_public
from raydp.data.hub import files_of
from raydp.data.labelled import read_all
from raydp.data.own import is_own, own_as_public
from raydp.data.sources import catalogue, table_as_public
from raydp.data.table import is_table
from raydp.data.types import PrivateData, PublicData, described_targets
from raydp.errors import InvalidValue, UnknownName

_FILES = ("public.parquet", "train.parquet", "val.parquet", "test.parquet")


def load_public(
    name_or_path: str, *, limit: int | None = None, seed: int = 0, set_size: int | None = None
) -> PublicData:
    """A public data set.

    Args:
        name_or_path: a Parquet file; a function of one's own (:mod:`raydp.data.own`) or the description of a table, of
            which the training examples are read; a directory, whose public, train, val or test file (the first that
            exists) is read, with a family's public sets, or the train split of a layout of the Hub
            (:mod:`raydp.data.hub`); or a name of :func:`raydp.data.catalogue`, all of whose examples then count as
            public.
        limit: draw this many examples at random, without replacement; of a family or a file of data sets, the first
            so many sets.
        seed: of that draw. Public randomness. The data sets of a family do not depend on it.
        set_size: examples in each data set of a family; None takes the family's own size.

    Raises:
        UnknownName: no such name or path.
        InvalidValue: the directory holds none of the files, or fewer than ``limit`` examples.

    >>> from raydp import data
    >>> data.load_public("digits", limit=100)
    PublicData('digits', 100 images of (1, 8, 8), 10 classes)
    """
    if limit is not None:
        limit = _validate.integer("public_limit", limit, low=1)
    if regression.is_regression(name_or_path):
        tasks, points = limit or regression.PUBLIC_TASKS, set_size or regression.POINTS
        return regression.family(name_or_path).public(tasks, points)
    path = Path(name_or_path).expanduser()
    if is_own(name_or_path):
        public = own_as_public(name_or_path)
    elif path.exists():
        public = _read(path)
    elif name_or_path in catalogue():
        public = bundled_public(name_or_path)
    else:
        raise UnknownName(f"public (a name, or a path seen from {Path.cwd()})", str(name_or_path), catalogue())
    if limit is None:
        return public
    if public.sets is not None:
        return _limited_sets(public, public.sets, limit)
    if limit > len(public):
        raise InvalidValue(
            "public_limit", limit, f"must not exceed the {len(public)} examples of {public.name!r}", "Lower it."
        )
    chosen = np.sort(np.random.default_rng(seed).permutation(len(public))[:limit])
    return PublicData(
        name=public.name,
        inputs=public.inputs[chosen],
        targets=public.targets[chosen],
        num_classes=public.num_classes,
        num_labels=public.num_labels,
    )


def _limited_sets(public: PublicData, sets: Tensor, limit: int) -> PublicData:
    """The first ``limit`` of the data sets, whatever the seed: runs share what they learn from them."""
    if limit > len(sets):
        raise InvalidValue(
            "public_limit", limit, f"must not exceed the {len(sets)} data sets of {public.name!r}", "Lower it."
        )
    return PublicData(
        name=public.name,
        inputs=public.inputs,
        targets=public.targets,
        num_classes=public.num_classes,
        num_labels=public.num_labels,
        sets=sets[:limit],
    )


def _read(path: Path) -> PublicData:
    if is_table(path):
        return table_as_public(path)
    file = path if path.is_file() else next((path / name for name in _FILES if (path / name).exists()), None)
    try:
        files = files_of(path if file is None else file)
    except InvalidValue as error:
        raise InvalidValue("public", error.value, error.rule, error.remedy) from None
    images, labels, names = read_all(files, files.train)
    classes = len(names) if names else int(labels.max()) + 1
    sets = None if file is None else families.read_sets(file)
    return PublicData(name=path.stem, inputs=images, targets=labels, num_classes=classes, sets=sets)


def check_public(public: PublicData, private: PrivateData) -> None:
    """Refuse a public set of other shapes than the private one, or one that shares inputs with it.

    Raises:
        InvalidValue: both shapes are named; or the number of shared images and their first positions.
    """
    if public.input_shape != private.input_shape:
        raise InvalidValue(
            "public",
            public.input_shape,
            f"must hold inputs of the shape {private.input_shape} of the private set {private.name!r}",
            f"Convert the inputs of {public.name!r}.",
        )
    if public.num_labels != private.num_labels:
        raise InvalidValue(
            "public",
            described_targets(public.num_classes, public.num_labels),
            f"must have targets like those of the private set {private.name!r}: "
            f"{described_targets(private.num_classes, private.num_labels)}",
            "Choose public examples of the same labels.",
        )
    shared = private.shared_with(public)
    if shared:
        first = ", ".join(map(str, shared[:10])) + (", …" if len(shared) > 10 else "")
        raise InvalidValue(
            "public",
            public.name,
            f"must share no example with the private set {private.name!r}, but {len(shared)} of its inputs are private "
            f"too (positions {first})",
            "Remove them from the public set: what is computed from it is not accounted for.",
        )
