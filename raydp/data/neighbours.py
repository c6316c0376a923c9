"""Sets of neighbouring images: many small public data sets that resemble small private ones.

Examples are divided into public and private ones *before* any set is formed, by a hash of their content. So a public
example is in no private set, and two copies of an image are on the same side. Choosing neighbours looks at private
images: it designs the experiment, and is not part of any private method.

Which encoder embeds the images is recorded, with a hash of its weights, wherever embeddings or sets are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue


class EmbedsImages(Protocol):
    """A frozen encoder, such as :class:`raydp.models.encoders.Encoder`.

    Attributes:
        name: of the network. digest: of its weights. width: numbers in a vector.
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def width(self) -> int: ...
    def __call__(self, images: Tensor, /) -> Tensor:
        """uint8 (n, C, H, W) to float32 (n, width)."""
        ...


@dataclass(frozen=True, kw_only=True)
class NeighbourSets:
    """Positions of the examples of many sets.

    Attributes:
        public: int64 (M, n), positions of public examples, a set a row, nearest first.
        private: int64 (K, n), positions of private examples; no example is in two sets.
        public_examples, private_examples: int64, the positions in all images of the two parts.
    """

    public: np.ndarray
    private: np.ndarray
    public_examples: np.ndarray
    private_examples: np.ndarray


def content_hashes(images: Tensor | np.ndarray) -> list[bytes]:
    """BLAKE2b of each image's pixels."""
    array = images.numpy() if isinstance(images, Tensor) else images
    return [hashlib.blake2b(image.tobytes(), digest_size=16, person=b"raydp.halves").digest() for image in array]


def split_halves(images: Tensor | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the public and of the private examples: about half each, by the first bit of their content's hash.

    Copies of an image are on the same side. The division depends on nothing but the images.

    Raises:
        InvalidValue: one side would be empty.
    """
    is_private = np.array([digest[0] & 1 for digest in content_hashes(images)], dtype=bool)
    if is_private.all() or not is_private.any():
        raise InvalidValue("images", len(images), "are too few to be divided into two halves", "Give more images.")
    return np.flatnonzero(~is_private), np.flatnonzero(is_private)


def nearest(embeddings: np.ndarray, centres: np.ndarray, size: int) -> np.ndarray:
    """For each centre the ``size`` nearest rows of ``embeddings``, itself among them, by Euclidean distance. Exact.

    Args:
        embeddings: (N, d), finite. centres: int64 (M,), positions among them. size: <= N.

    Returns:
        int64 (M, size), nearest first.

    Raises:
        InvalidValue: embeddings that are not finite, or fewer of them than ``size``.
    """
    from sklearn.neighbors import NearestNeighbors  # importing it takes time

    size = _validate.integer("set_size", size, low=2)
    if embeddings.ndim != 2 or not np.isfinite(embeddings).all():
        raise InvalidValue(
            "embeddings", embeddings.shape, "must be finite rows (N, d)", "Check the encoder and the images."
        )
    if size > len(embeddings):
        raise InvalidValue("set_size", size, f"must not exceed the {len(embeddings)} examples", "Lower it.")
    search = NearestNeighbors(n_neighbors=size, algorithm="brute").fit(embeddings)
    return search.kneighbors(embeddings[centres], return_distance=False).astype(np.int64)


def disjoint_sets(embeddings: np.ndarray, count: int, size: int) -> np.ndarray:
    """``count`` sets of neighbours that share no example, so that a budget spent on one says nothing about another's.

    One set after the other: the example whose ``size`` nearest include the fewest that are taken already, and is not
    taken itself (the earliest such), with its ``size`` nearest that are free.

    Returns:
        int64 (count, size), positions among the embeddings, nearest to the representative first.

    Raises:
        InvalidValue: there are fewer than count·size examples; or as :func:`nearest`.
    """
    count = _validate.integer("members", count, low=1)
    if count * size > len(embeddings):
        raise InvalidValue(
            "members", count, f"of {size} examples must fit into the {len(embeddings)} private ones", "Lower either."
        )
    around = nearest(embeddings, np.arange(len(embeddings)), size)
    taken = np.zeros(len(embeddings), dtype=bool)
    sets = []
    for _ in range(count):
        overlaps = np.where(taken, size + 1, taken[around].sum(axis=1))
        centre = int(overlaps.argmin())
        chosen = around[centre]
        if overlaps[centre]:
            free = np.flatnonzero(~taken)
            distances = np.square(embeddings[free] - embeddings[centre]).sum(axis=1)
            chosen = free[np.argsort(distances, kind="stable")[:size]]
        taken[chosen] = True
        sets.append(chosen)
    return np.stack(sets)


def embed(images: Tensor, encoder: EmbedsImages, *, cache: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Embeddings (N, width), float32, of uint8 images (N, C, H, W).

    Args:
        cache: a directory in which they are kept as Parquet under the encoder's name and weights and the images'
            content, and found again; None keeps nothing.

    Raises:
        InvalidValue: the encoder returned another width, or numbers that are not finite.
        CorruptFile: the cached file is damaged.
    """
    file = None
    if cache is not None:
        content = hashlib.blake2b(images.contiguous().numpy().data, digest_size=8).hexdigest()
        file = Path(cache) / f"embeddings-{encoder.name}-{encoder.digest[:12]}-{content}.parquet"
        if file.exists():
            return _read_embeddings(file, len(images), encoder.width)
    found = encoder(images).numpy().astype(np.float32)
    if found.shape != (len(images), encoder.width) or not np.isfinite(found).all():
        raise InvalidValue(
            "encoder",
            encoder.name,
            f"must give {encoder.width} finite numbers for each image, not {found.shape}",
            "Check its weights.",
        )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        column = pa.FixedSizeListArray.from_arrays(pa.array(found.reshape(-1)), encoder.width)
        about = {"encoder": encoder.name, "weights_sha256": encoder.digest}
        _write(pa.table({"embedding": column}).replace_schema_metadata(about), file)
    return found


def neighbour_sets(
    images: Tensor,
    encoder: EmbedsImages,
    *,
    set_size: int,
    members: int,
    public_sets: int | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> NeighbourSets:
    """Divide the images, and form sets of neighbours on each side.

    Args:
        images: uint8 (N, C, H, W).
        set_size: n, examples in a set.
        members: K, private sets, which share no example.
        public_sets: M, sets around the first M public examples; None for one around each.
        cache: as for :func:`embed`; the sets are kept there too.

    Raises:
        InvalidValue: there are too few images.
    """
    public, private = split_halves(images)
    vectors = embed(images, encoder, cache=cache)
    centres = np.arange(len(public) if public_sets is None else public_sets)
    if len(centres) > len(public):
        raise InvalidValue("public_sets", public_sets, f"must not exceed the {len(public)} public images", "Lower it.")
    public_neighbours = nearest(vectors[public], centres, set_size)
    private_neighbours = disjoint_sets(vectors[private], members, set_size)
    return NeighbourSets(
        public=public[public_neighbours],
        private=private[private_neighbours],
        public_examples=public,
        private_examples=private,
    )


def write_family(
    directory: str | os.PathLike[str],
    images: Tensor,
    labels: Tensor,
    encoder: EmbedsImages,
    *,
    set_size: int,
    members: int,
    public_sets: int | None = None,
) -> Path:
    """Write a family of private sets and its public companion, as :func:`raydp.data.load` reads them.

    ``public.parquet`` holds the public images and labels, ``public_sets.parquet`` the positions of each public set
    among them, ``members/0000.parquet`` … one private set each, ``family.json`` how they came about. Embeddings are
    cached in the same directory.

    Returns:
        The directory.

    Raises:
        InvalidValue: as :func:`neighbour_sets`.
    """
    directory = Path(directory)
    (directory / "members").mkdir(parents=True, exist_ok=True)
    sets = neighbour_sets(
        images, encoder, set_size=set_size, members=members, public_sets=public_sets, cache=directory / "cache"
    )
    about = {"encoder": encoder.name, "weights_sha256": encoder.digest}
    place = np.full(len(images), -1, dtype=np.int64)
    place[sets.public_examples] = np.arange(len(sets.public_examples))
    _write(_examples(images, labels, sets.public_examples), directory / "public.parquet")
    rows = pa.FixedSizeListArray.from_arrays(pa.array(place[sets.public].reshape(-1)), set_size)
    _write(pa.table({"positions": rows}).replace_schema_metadata(about), directory / "public_sets.parquet")
    for index, member in enumerate(sets.private):
        _write(_examples(images, labels, member), directory / "members" / f"{index:04d}.parquet")
    classes = int(labels.max()) + 1
    record = {**about, "set_size": set_size, "members": members, "public_sets": len(sets.public), "classes": classes}
    (directory / "family.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return directory


def _examples(images: Tensor, labels: Tensor, positions: np.ndarray) -> pa.Table:
    chosen = np.ascontiguousarray(images.numpy()[positions].transpose(0, 2, 3, 1))  # (n, H, W, C)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(chosen)
    return pa.table({"image": column, "label": pa.array(labels.numpy()[positions])})


def _read_embeddings(file: Path, rows: int, width: int) -> np.ndarray:
    try:
        column = pq.read_table(file).column("embedding").combine_chunks()
        found = column.flatten().to_numpy().reshape(rows, width)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise CorruptFile(f"{file} does not hold {rows} embeddings of {width} numbers. Remove it.") from error
    return found


def _write(table: pa.Table, file: Path) -> None:
    """In one piece: a reader sees the whole file or none."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    pq.write_table(table, partial, write_page_checksum=True)
    partial.replace(file)
