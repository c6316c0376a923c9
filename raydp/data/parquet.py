"""Labelled images from Parquet files, in the layouts that the Hugging Face Hub and plain writers use.

The image column is called ``image`` or ``img`` and holds one of

* ``struct{bytes: binary, path: string}`` or plain ``binary``: encoded images (PNG, JPEG, …), decoded by Pillow;
* lists, fixed-size lists or fixed-shape tensors of numbers: flat (a square image of one channel), (H, W), (H, W, C) or
  (C, H, W) with C = 1 or 3 (the last axis is looked at first). Integers are pixels in 0..255, floats lie in [0, 1].

The label column is called ``label`` or ``fine_label`` and holds integers from 0. Class names come from the schema's
metadata key ``huggingface``, and so do columns of other names where it states one image and one class label. A file is
read in pieces of some thousand rows into one uint8 array, so memory holds that array and a piece, never a second copy.
"""

from __future__ import annotations

import difflib
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from raydp import _validate
from raydp.data.arrow import ARROW, ArrowStream
from raydp.errors import CorruptFile, InvalidValue, UnknownName

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
_PIECE = 2048
_UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


def read_images(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    image: str | None = None,
    label: str | None = None,
    names: tuple[str, ...] | None = None,
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """Read a Parquet file of labelled images.

    Args:
        path: the file; or an Arrow stream (``.arrow``), as ``datasets.save_to_disk`` writes.
        limit: read the first ``limit`` rows only (all of them if there are fewer).
        image, label: its columns; None looks for them.
        names: of the classes, where the file does not state them.

    Returns:
        images uint8 (N, C, H, W), labels int64 (N,), and the class names if the file states them.

    Raises:
        CorruptFile: the file, a row group or an image cannot be read; the message names file, row group and row (both
            counted from 0).
        UnknownName: there is no image or label column; near names are suggested.
        InvalidValue: no rows, images of different sizes, pixels or labels that are missing, not finite or out of range.
    """
    path = Path(path)
    if limit is not None:
        limit = _validate.integer("limit", limit, low=1)
    with _opened(path) as file:
        return _read(path, file, limit, image, label, names)


def read_labels(
    path: str | os.PathLike[str], *, label: str | None = None, names: tuple[str, ...] | None = None
) -> np.ndarray:
    """All labels of such a file, int64 (N,), without its images. Arguments and errors as of :func:`read_images`."""
    path = Path(path)
    with _opened(path) as file:
        column = _label_column(path, file.schema_arrow, label)
        known = _class_names(file.schema_arrow, column) or names
        _require_integers(path, column, file.schema_arrow)
        pieces = _pieces(path, file, [column], file.metadata.num_rows)
        return np.concatenate([_labels(path, column, batch.column(column), start, known) for start, batch in pieces])


def read_image_column(path: str | os.PathLike[str], column: str) -> np.ndarray:
    """The images of one column, uint8 (N, C, H, W), in any of the layouts above. Raises as :func:`read_images`."""
    path = Path(path)
    with _opened(path) as file:
        decode = _decoder(path, column, file.schema_arrow.field(column).type)
        images, rows = None, file.metadata.num_rows
        for start, batch in _pieces(path, file, [column], rows):
            images = decode(batch.column(column), start, rows, images)
    if images is None:
        raise InvalidValue(str(path), "0 rows", "must hold at least one example", "Write the file again.")
    return images


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """The file, open; what cannot be read of it is said in raydp's words."""
    kind = "Arrow stream" if path.suffix == ARROW else "Parquet file"
    try:
        if path.suffix == ARROW:
            with pa.memory_map(str(path)) as source:
                yield ArrowStream(source)
        else:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                yield file
    except (pa.ArrowException, OSError) as error:
        raise CorruptFile(f"{path} is not a readable {kind}: {_first_line(error)}. Fetch or write it again.") from error


def _require_integers(path: Path, column: str, schema: pa.Schema) -> None:
    kind = schema.field(column).type
    if not pa.types.is_integer(kind):
        raise InvalidValue(f"{path}: column {column}", str(kind), "must hold integers", "Number the classes from 0.")


def _read(
    path: Path,
    file: pq.ParquetFile,
    limit: int | None,
    image: str | None,
    label: str | None,
    names: tuple[str, ...] | None,
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    schema = file.schema_arrow
    image_column = _column(path, schema, IMAGE_COLUMNS if image is None else (image, *IMAGE_COLUMNS), "Image")
    label_column = _label_column(path, schema, label)
    names = _class_names(schema, label_column) or names
    _require_integers(path, label_column, schema)
    decode = _decoder(path, image_column, schema.field(image_column).type)
    rows = file.metadata.num_rows if limit is None else min(limit, file.metadata.num_rows)
    if rows == 0:
        raise InvalidValue(str(path), "0 rows", "must hold at least one example", "Write the file again.")
    images: np.ndarray | None = None
    labels = np.empty(rows, dtype=np.int64)
    for start, batch in _pieces(path, file, [image_column, label_column], rows):
        stop = start + len(batch)
        labels[start:stop] = _labels(path, label_column, batch.column(label_column), start, names)
        images = decode(batch.column(image_column), start, rows, images)
    assert images is not None  # rows > 0
    return images, labels, names


def _pieces(path: Path, file: pq.ParquetFile, columns: list[str], rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(first row, batch) of the first ``rows`` rows; a failure names its row group."""
    start = 0
    for group in range(file.num_row_groups):
        batches = file.iter_batches(batch_size=_PIECE, row_groups=[group], columns=columns)
        while start < rows:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise CorruptFile(
                    f"{path}: row group {group} (of {file.num_row_groups}, counted from 0) is damaged: "
                    f"{_first_line(error)}. Fetch or write the file again."
                ) from error
            if batch is None:
                break
            batch = batch.slice(0, rows - start)
            yield start, batch
            start += len(batch)
    if start < rows:
        raise CorruptFile(f"{path} announces {rows} rows and holds {start}. Fetch or write the file again.")


def _label_column(path: Path, schema: pa.Schema, label: str | None) -> str:
    return _column(path, schema, LABEL_COLUMNS if label is None else (label, *LABEL_COLUMNS), "ClassLabel")


def _column(path: Path, schema: pa.Schema, candidates: tuple[str, ...], kind: str) -> str:
    """The column of one of these names; else the only one that the file's metadata say is of that kind."""
    for name in candidates:
        if name in schema.names:
            return name
    stated = [name for name, feature in _features(schema).items() if feature.get("_type") == kind]
    if len(stated) == 1 and stated[0] in schema.names:
        return stated[0]
    for name in candidates:
        if difflib.get_close_matches(name, schema.names, cutoff=0.8):
            raise UnknownName(f"column of {path} ({' or '.join(candidates)})", name, schema.names)
    raise InvalidValue(
        f"{path}: columns",
        schema.names,
        f"must have one called {' or '.join(candidates)}",
        "Rename it, or describe the columns: raydp describe FILES > NAME.toml, then data='NAME.toml'.",
    )


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """What the Hub's metadata say of each column; empty where there are none or they are something else's."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"].items()
        return {name: feature for name, feature in found if isinstance(feature, dict)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _class_names(schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    """The names that the Hub's metadata states, or None where there is none or it is something else's."""
    names = _features(schema).get(label_column, {}).get("names")
    return tuple(map(str, names)) if isinstance(names, list) and names else None


def _labels(path: Path, column: str, array: pa.Array, start: int, names: tuple[str, ...] | None) -> np.ndarray:
    if array.null_count:
        row = start + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise InvalidValue(f"{path}: {column} of row {row}", None, "must not be missing", "Label it or drop the row.")
    values = array.to_numpy(zero_copy_only=False)
    high = len(names) if names else np.iinfo(np.int64).max
    wrong = np.flatnonzero((values < 0) | (values >= high))
    if len(wrong):
        interval = f"[0, {high}), the classes that the file names" if names else "[0, …)"
        raise InvalidValue(
            f"{path}: {column} of row {start + int(wrong[0])}",
            int(values[wrong[0]]),
            f"must lie in {interval}",
            "Number the classes from 0 without a code for 'unknown'.",
        )
    return values.astype(np.int64)


# A decoder turns a piece of the image column, whose first row is row `start` of the file, into rows of the array of
# all images, which the first piece allocates because it is the first to know the size of an image.
_Decoder = Callable[[pa.Array, int, int, np.ndarray | None], np.ndarray]


def _decoder(path: Path, column: str, kind: pa.DataType) -> _Decoder:
    field = f"{path}: {column}"
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return lambda array, start, rows, images: _decode_encoded(
            field, pc.struct_field(array, "bytes"), start, rows, images
        )
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return lambda array, start, rows, images: _decode_encoded(field, array, start, rows, images)
    if isinstance(kind, pa.FixedShapeTensorType) or _is_list(kind):
        return lambda array, start, rows, images: _decode_numbers(field, array, start, rows, images)
    raise InvalidValue(
        f"{path}: column {column}",
        str(kind),
        "must be struct{bytes, path}, binary, or lists of numbers",
        "Write encoded images or arrays.",
    )


def _allocate(field: str, shape: tuple[int, ...], row: int, rows: int, images: np.ndarray | None) -> np.ndarray:
    if images is None:
        return np.empty((rows, *shape), dtype=np.uint8)
    if images.shape[1:] != shape:
        raise InvalidValue(
            f"{field} of row {row}",
            shape,
            f"must have the size (C, H, W) = {images.shape[1:]} of the rows before it",
            "Resize all images to one size and one number of channels.",
        )
    return images


def _decode_encoded(field: str, array: pa.Array, start: int, rows: int, images: np.ndarray | None) -> np.ndarray:
    for offset, scalar in enumerate(array):
        row = start + offset
        # A view of Arrow's memory: the encoded bytes are not copied.
        content = scalar.as_buffer()
        if content is None:
            raise InvalidValue(
                f"{field} of row {row}",
                None,
                "must hold the encoded bytes",
                "A path alone is not read; embed the image.",
            )
        try:
            with Image.open(io.BytesIO(content)) as image:
                pixels = np.asarray(_to_grey_or_rgb(image))
        except UnidentifiedImageError as error:  # its own message shows the address of a buffer
            raise CorruptFile(f"{field} of row {row} is not an image of a known format. Replace or drop it.") from error
        except _UNDECODABLE as error:
            raise CorruptFile(
                f"{field} of row {row} is not an image that can be decoded: {_first_line(error)}. Replace or drop it."
            ) from error
        pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        images = _allocate(field, pixels.shape, row, rows, images)
        images[row] = pixels
    assert images is not None  # a piece has rows
    return images


def _to_grey_or_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("L", "RGB"):
        return image
    if image.mode in ("1", "LA", "La"):
        return image.convert("L")
    if image.mode in ("P", "PA", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"):
        return image.convert("RGB")
    raise ValueError(f"mode {image.mode} has more than 8 bits a channel")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _decode_numbers(field: str, array: pa.Array, start: int, rows: int, images: np.ndarray | None) -> np.ndarray:
    shape: list[int] = []
    count = len(array)
    if isinstance(array.type, pa.FixedShapeTensorType):
        shape, array = list(array.type.shape), array.storage
        array = array.flatten()
    while _is_list(array.type):
        _refuse_nulls(field, array, start, count)
        lengths = np.unique(pc.list_value_length(array).to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise InvalidValue(
                f"{field} of rows {start} to {start + count - 1}",
                lengths.tolist(),
                "must be lists of one length",
                "Resize all images to one size.",
            )
        shape.append(int(lengths[0]))
        array = array.flatten()
    _refuse_nulls(field, array, start, count)
    channels_first, to_chw = _layout(field, tuple(shape))
    images = _allocate(field, channels_first, start, rows, images)
    pixels = _pixels(field, array.to_numpy(zero_copy_only=False), start, count)
    images[start : start + count] = to_chw(pixels.reshape(count, *shape))
    return images


def _refuse_nulls(field: str, array: pa.Array, start: int, count: int) -> None:
    if array.null_count:
        first = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        row = start + first * count // len(array)
        raise InvalidValue(f"{field} of row {row}", None, "must not be missing", "Fill it in or drop the row.")


def _layout(field: str, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], Callable[[np.ndarray], np.ndarray]]:
    """(C, H, W) of an image stored in ``shape``, and what brings a batch of them into that order."""
    if len(shape) == 1 and shape[0] > 0:
        side = math.isqrt(shape[0])
        if side * side == shape[0]:
            return (1, side, side), lambda batch: batch.reshape(-1, 1, side, side)
    if len(shape) == 2 and 0 not in shape:
        return (1, *shape), lambda batch: batch[:, None]
    if len(shape) == 3 and 0 not in shape:
        if shape[2] in (1, 3):
            return (shape[2], shape[0], shape[1]), lambda batch: batch.transpose(0, 3, 1, 2)
        if shape[0] in (1, 3):
            return (shape[0], shape[1], shape[2]), lambda batch: batch
    raise InvalidValue(
        field,
        shape,
        "must be a square image of one channel when flat, or (H, W), (H, W, C), (C, H, W) with C = 1 or 3",
        "Nest the lists by axis, or write encoded images.",
    )


def _pixels(field: str, values: np.ndarray, start: int, count: int) -> np.ndarray:
    def refuse(wrong: np.ndarray, rule: str, remedy: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise InvalidValue(
                f"{field} of row {start + first * count // len(values)}", values[first].item(), rule, remedy
            )

    if values.dtype.kind == "f":
        refuse(~np.isfinite(values), "must be finite: a NaN pixel makes every gradient NaN", "Clean the images.")
        refuse(
            (values < 0) | (values > 1), "must lie in [0, 1] when stored as float", "Write pixels 0..255 as integers."
        )
        return np.rint(values * 255).astype(np.uint8)
    if values.dtype.kind in "iu":
        if values.dtype != np.uint8:
            refuse((values < 0) | (values > 255), "must lie in 0..255", "Rescale the images to 8 bits.")
        return values.astype(np.uint8, copy=False)
    raise InvalidValue(field, str(values.dtype), "must hold numbers", "Write pixels 0..255 as integers.")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
