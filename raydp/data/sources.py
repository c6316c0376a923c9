"""Data sets by name or by path: what is private, what it is measured on, and how it is normalised.

Bundled data sets need no network. Files are read as :mod:`raydp.data.parquet` describes.

Splits and orders never depend on random number generators, whose streams change between releases, but on BLAKE2b.
"""

from __future__ import annotations

import functools
from pathlib import Path

from raydp import _validate
from raydp.data import families, regression
from raydp.data.bundled import BUNDLED, load_bundled
from raydp.data.columns import read_rows
from raydp.data.dataset import IDENTITY, UNKNOWN, Dataset, Normalization, held_out, limited
from raydp.data.hub import files_of
from raydp.data.labelled import load_labelled
from raydp.data.own import is_own, load_own, own_task
from raydp.data.parquet import read_images
from raydp.data.table import is_table, read_table
from raydp.data.types import PrivateData, PublicData, described_targets
from raydp.errors import InvalidValue, UnknownName


def load(name_or_path: str, *, limit: int | None = None, member: int = 0) -> Dataset:
    """Load a data set.

    Args:
        name_or_path: a name of :func:`catalogue`; or a directory with ``train.parquet`` (private) and
            ``test.parquet`` (hold-out), or in a layout of the Hugging Face Hub (:mod:`raydp.data.hub`); or a directory
            with ``train.parquet`` alone, or one Parquet file, of which a sixth, chosen by a hash of each image,
            becomes a private hold-out; or the description of a table (:mod:`raydp.data.table`); or
            ``file.py:function`` or ``package.module:function``, which returns a torch data set
            (:mod:`raydp.data.own`); or a family of neighbour sets (:func:`raydp.data.neighbours.write_family`) or a
            file of its members, measured against its own images.
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
    if is_own(name_or_path):
        _validate.integer(f"member of {name_or_path}", member, low=0, high=0)
        return load_own(name_or_path, limit)
    path = Path(name_or_path).expanduser()
    if families.is_family(path):
        file = families.member_file(path, member)
        return _load_neighbours(file.resolve(), limit, file.stat().st_mtime_ns)
    _validate.integer(f"member of {name_or_path}", member, low=0, high=0)
    if name_or_path in BUNDLED:
        return load_bundled(name_or_path, limit)
    if not path.exists():
        where = f"data (a name, or a path seen from {Path.cwd()})"
        raise UnknownName(where, str(name_or_path), catalogue())
    if families.is_member(path):
        return _load_neighbours(path.resolve(), limit, path.stat().st_mtime_ns)
    if is_table(path):
        table = read_table(path)
        described = (path.resolve(), *table.files)
        stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in described)
        return _load_table(path.resolve(), limit, stamps)
    files = files_of(path)
    return load_labelled(path.resolve(), files, limit, files.stamps)


def task_of(name_or_path: str) -> str:
    """What models of a data set are for, without reading it: ``Dataset.task`` of what :func:`load` would return.

    >>> from raydp import data
    >>> data.task_of("mnist5k"), data.task_of("regression:dimension=8")
    ('classification', 'regression')
    """
    if regression.is_regression(name_or_path):
        return "regression"
    if is_own(name_or_path):
        return own_task(name_or_path)
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
    return name_or_path in BUNDLED or regression.is_regression(name_or_path)


def catalogue() -> dict[str, str]:
    """The bundled data sets: name -> one line.

    >>> from raydp import data
    >>> sorted(data.catalogue())
    ['digits', 'digits28', 'mnist5k', 'regression']
    """
    return {
        **{name: source.summary for name, source in BUNDLED.items()},
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
        normalization=IDENTITY,
        summary=f"{points} examples of a linear-regression task in {tasks.dimension} dimensions, member {member}",
        holdout_visibility="synthetic",
        task="regression",
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
        held = held_out(str(path), inputs)
        held_inputs, held_targets, inputs, targets = inputs[held], targets[held], inputs[~held], targets[~held]
    inputs, targets = limited(table.name, inputs, targets, limit)
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
        normalization=UNKNOWN if table.image else IDENTITY,
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
