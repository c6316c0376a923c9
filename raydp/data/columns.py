"""The rows of a described table (:mod:`raydp.data.table`) as arrays that a model takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raydp.data.kinds import Category, Classes, Labels, Number, Quantity, Value
from raydp.data.parquet import read_image_column
from raydp.data.table import Table
from raydp.errors import CorruptFile, InvalidValue

_SHOWN = 40  # characters of a refused value


def read_rows(table: Table, files: tuple[Path, ...]) -> tuple[np.ndarray, np.ndarray]:
    """All rows of some files of a table.

    Returns:
        inputs float32 (N, d): numbers in [-1, 1] and one 0 or 1 for each value of a category, in the order of the
        description; or uint8 (N, C, H, W) where the feature is an image. Targets int64 (N,), or float32 in [-1, 1], or
        float32 0 and 1 (N, labels).

    Raises:
        CorruptFile: a file cannot be read.
        InvalidValue: a value is missing, not finite or not in its vocabulary; the message names file, column and row.
    """
    inputs, targets = [], []
    for file in files:
        columns = [*table.targets, *table.features]
        try:
            rows = pq.read_table(file, columns=columns, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            said = (str(error).splitlines() or [""])[0]
            raise CorruptFile(f"{file} cannot be read: {said}. Fetch or write it again.") from error
        if not len(rows):
            raise InvalidValue(str(file), "0 rows", "must hold at least one example", "Write the file again.")
        targets.append(_targets(file, table, rows))
        if table.image is not None:
            inputs.append(read_image_column(file, table.image))
        else:
            parts = [_encode(file, name, kind, rows.column(name)) for name, kind in table.features.items()]
            inputs.append(np.concatenate(parts, axis=1))
    sizes = sorted({part.shape[1:] for part in inputs})
    if len(sizes) > 1:
        raise InvalidValue(f"{table.name}: {table.image}", sizes, "must be images of one size", "Resize them.")
    return np.concatenate(inputs), np.concatenate(targets)


def _encode(file: Path, name: str, kind: Number | Category, column: pa.ChunkedArray) -> np.ndarray:
    array = _plain(column.combine_chunks())
    if isinstance(kind, Category):
        places = _places(file, name, array, [[value] for value in kind.values], kind.other)
        return np.eye(len(kind.values), dtype=np.float32)[places]
    if kind.length is not None:
        array = _flattened(file, name, array, kind.length, "numbers")
    numbers = _numbers(file, name, array, kind.missing, kind.width)
    return scaled(numbers, kind).reshape(-1, kind.width)


def _targets(file: Path, table: Table, rows: pa.Table) -> np.ndarray:
    kind = table.target_kind
    if isinstance(kind, Labels):
        return _labels(file, table, kind, rows)
    (name,) = table.targets
    array = rows.column(name).combine_chunks()
    if isinstance(kind, Classes):
        return _places(file, name, _plain(array), [list(group) for group in kind.groups], None)
    assert isinstance(kind, Quantity)
    return scaled(_numbers(file, name, array, None, 1), kind)


def _labels(file: Path, table: Table, kind: Labels, rows: pa.Table) -> np.ndarray:
    """float32 0 and 1, (N, labels)."""
    width = len(kind.names)
    arrays = [_plain(rows.column(name).combine_chunks()) for name in table.targets]
    if kind.listed:
        arrays = [_plain(_flattened(file, table.targets[0], arrays[0], width, "labels"))]
    groups = [
        [[value] for value in kind.values or _no_and_yes(file, name, array.type)]
        for name, array in zip(table.targets, arrays, strict=True)
    ]
    places = [
        _places(file, name, array, group, None, width if kind.listed else 1)
        for name, array, group in zip(table.targets, arrays, groups, strict=True)
    ]
    found = places[0].reshape(-1, width) if kind.listed else np.stack(places, axis=1)
    return found.astype(np.float32)


def _no_and_yes(file: Path, name: str, kind: pa.DataType) -> tuple[Value, Value]:
    if pa.types.is_boolean(kind):
        return False, True
    if pa.types.is_integer(kind):
        return 0, 1
    raise InvalidValue(
        f"{file}: column {name}",
        str(kind),
        "must hold true and false, or 0 and 1",
        'Say what stands for no and for yes: values = ["no", "yes"], or values = [0.0, 1.0].',
    )


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def scaled(numbers: np.ndarray, kind: Number | Quantity) -> np.ndarray:
    """float32 of the same shape, the public range mapped to [-1, 1] and what lies beyond it cut off."""
    scaled: np.ndarray = 2 * (np.clip(numbers, kind.low, kind.high) - kind.low) / (kind.high - kind.low) - 1
    return scaled.astype(np.float32)


def _flattened(file: Path, name: str, array: pa.Array, length: int, what: str) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(array), -1).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != length)
    if len(wrong):
        found = int(lengths[wrong[0]])
        raise InvalidValue(
            f"{file}: {name} of row {wrong[0]}",
            None if found < 0 else f"{found} {what}",
            f"must be a list of {length} {what}",
            "Cut, pad or drop the row.",
        )
    return array.flatten()


def _numbers(file: Path, name: str, array: pa.Array, missing: float | None, width: int) -> np.ndarray:
    """float64, with ``missing`` for null and NaN."""
    try:
        numbers = array.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)  # null becomes NaN
    except pa.ArrowInvalid as error:
        raise InvalidValue(f"{file}: column {name}", str(array.type), "must hold numbers", "Correct it.") from error
    absent = np.isnan(numbers)
    if missing is not None:
        numbers[absent] = missing
        absent = np.isnan(numbers)
    wrong = np.flatnonzero(absent | np.isinf(numbers))
    if len(wrong):
        raise InvalidValue(
            f"{file}: {name} of row {wrong[0] // width}",
            None if absent[wrong[0]] else float(numbers[wrong[0]]),
            "must be a finite number",
            "Say what stands for missing values (missing = …), or drop the row.",
        )
    return numbers


def _places(
    file: Path, name: str, array: pa.Array, groups: list[list[Value]], other: Value | None, width: int = 1
) -> np.ndarray:
    """The group of each value, int64 (N·width,), ``width`` of them a row."""
    place = {value: index for index, group in enumerate(groups) for value in group}
    default = None if other is None else place[other]
    wanted = type(next(iter(place)))
    found = np.empty(len(array), dtype=np.int64)
    for row, value in enumerate(array.to_pylist()):
        # True == 1 in a dictionary, and a float label is no class: types must agree.
        index = place.get(value, default) if type(value) is wanted else default
        if index is None:
            raise InvalidValue(
                f"{file}: {name} of row {row // width}",
                repr(value)[:_SHOWN],
                f"must be one of {list(place)}, of type {wanted.__name__}",
                "List the value, name one that stands for others (other = …), or drop the row.",
            )
        found[row] = index
    return found
