"""Public and private halves, and sets of neighbours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp import data
from raydp.data.neighbours import (
    content_hashes,
    disjoint_sets,
    embed,
    nearest,
    neighbour_sets,
    split_halves,
    write_family,
)
from raydp.data.parquet import read_images
from raydp.errors import CorruptFile, InvalidValue


@dataclass
class Pixels:
    """An encoder for tests: the first pixels of an image."""

    name: str = "pixels"
    digest: str = "ab" * 32
    width: int = 6
    calls: int = 0

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        self.calls += 1
        return images.flatten(1)[:, : self.width].float()


def _images(n: int, seed: int = 0, copies: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return torch.cat([images, images[:copies]])


@given(n=st.integers(20, 200), copies=st.integers(0, 20), seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_no_content_is_on_both_sides(n: int, copies: int, seed: int) -> None:
    images = _images(n, seed, copies)
    public, private = split_halves(images)
    assert sorted([*public, *private]) == list(range(len(images)))
    hashes = content_hashes(images)
    assert not {hashes[i] for i in public} & {hashes[i] for i in private}


def test_the_halves_are_about_equal_and_independent_of_the_order() -> None:
    images = _images(2000)
    public, _ = split_halves(images)
    assert 900 < len(public) < 1100
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
    moved, _ = split_halves(images[order])
    assert sorted(order[moved].tolist()) == public.tolist()


def test_neighbours_are_the_nearest() -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    found = nearest(vectors, np.array([4, 7]), 10)
    for row, centre in zip(found, (4, 7), strict=True):
        order = np.argsort(((vectors - vectors[centre]) ** 2).sum(axis=1))
        assert row.tolist() == order[:10].tolist() and row[0] == centre


def test_private_sets_share_no_example_and_stay_close() -> None:
    vectors = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    sets = disjoint_sets(vectors, 10, 20)
    assert sets.shape == (10, 20) and len(np.unique(sets)) == 200
    assert sets[0].tolist() == nearest(vectors, sets[0][:1], 20)[0].tolist()  # nothing was taken yet

    def spread(rows: np.ndarray) -> float:
        return float(np.mean([np.linalg.norm(vectors[row] - vectors[row].mean(axis=0), axis=1).mean() for row in rows]))

    assert spread(sets) < 0.6 * spread(np.random.default_rng(1).permutation(300)[:200].reshape(10, 20))
    every = disjoint_sets(vectors, 15, 20)  # all examples are needed
    assert sorted(every.flat) == list(range(300))


def test_a_public_example_is_in_no_private_set() -> None:
    images = _images(400, copies=40)
    sets = neighbour_sets(images, Pixels(), set_size=16, members=5)
    hashes = content_hashes(images)
    assert sets.public.shape == (len(sets.public_examples), 16) and sets.private.shape == (5, 16)
    assert not {hashes[i] for i in sets.public.flat} & {hashes[i] for i in sets.private.flat}


def test_embeddings_are_cached_under_the_encoder_and_the_images(tmp_path: Path) -> None:
    images, encoder = _images(30), Pixels()
    first = embed(images, encoder, cache=tmp_path)
    assert np.array_equal(embed(images, encoder, cache=tmp_path), first) and encoder.calls == 1
    (file,) = tmp_path.iterdir()
    assert "pixels" in file.name and "abababababab" in file.name
    assert pq.read_schema(file).metadata[b"weights_sha256"] == b"ab" * 32
    embed(images[:20], encoder, cache=tmp_path)
    embed(images, Pixels(digest="cd" * 32), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    file.write_bytes(b"damaged")
    with pytest.raises(CorruptFile, match="Remove it"):
        embed(images, encoder, cache=tmp_path)


def test_a_family_on_disk_keeps_the_sides_apart(tmp_path: Path) -> None:
    images, labels = _images(300, copies=30), torch.arange(330) % 3
    family = write_family(tmp_path / "family", images, labels, Pixels(), set_size=8, members=4, public_sets=20)
    public, public_labels, _ = read_images(family / "public.parquet")
    by_content = dict(zip(content_hashes(images), labels.tolist(), strict=True))
    assert [by_content[h] for h in content_hashes(public)] == public_labels.tolist()
    sets = pq.read_table(family / "public_sets.parquet").column("positions").to_pylist()
    assert len(sets) == 20 and {len(row) for row in sets} == {8} and max(map(max, sets)) < len(public)
    theirs = set(content_hashes(public))
    members = sorted((family / "members").iterdir())
    assert [file.name for file in members] == [f"{i:04d}.parquet" for i in range(4)]
    for file in members:
        own, _, _ = read_images(file)
        assert len(own) == 8 and not set(content_hashes(own)) & theirs
    assert json.loads((family / "family.json").read_text())["weights_sha256"] == "ab" * 32


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidValue, match="two halves"):
        split_halves(_images(1))
    vectors = np.zeros((5, 2), dtype=np.float32)
    with pytest.raises(InvalidValue, match="set_size"):
        nearest(vectors, np.arange(5), 6)
    with pytest.raises(InvalidValue, match="finite"):
        nearest(np.full((5, 2), np.nan), np.arange(5), 2)
    with pytest.raises(InvalidValue, match="members"):
        neighbour_sets(_images(40), Pixels(), set_size=4, members=20)
    with pytest.raises(InvalidValue, match="6 finite numbers"):
        embed(_images(4), type("Nan", (Pixels,), {"__call__": lambda self, x: torch.full((len(x), 6), torch.nan)})())


def test_a_member_loads_as_a_private_set_and_its_companion_as_public_sets(tmp_path: Path) -> None:
    images, labels = _images(300), torch.arange(300) % 3
    family = write_family(tmp_path / "family", images, labels, Pixels(), set_size=8, members=4, public_sets=20)
    dataset = data.load(str(family / "members" / "0002.parquet"))
    assert len(dataset.private) == 8 and dataset.private.num_classes == 3
    assert dataset.task == data.task_of(str(family / "members" / "0002.parquet")) == "denoising"
    assert dataset.holdout_visibility == "private hold-out" and len(dataset.holdout) == 8
    ends = dataset.normalization.apply(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    assert ends.flatten().tolist() == [-1, 1]
    by_number = data.load(str(family), member=2)
    assert by_number.private.fingerprint == dataset.private.fingerprint and data.is_family(str(family))
    assert data.task_of(str(family)) == "denoising"
    with pytest.raises(InvalidValue, match="one of the 4 members"):
        data.load(str(family), member=4)
    public = data.load_public(str(family))
    assert public.sets is not None and public.sets.shape == (20, 8)
    data.check_public(public, dataset.private)
    (family / "public_sets.parquet").write_bytes(b"damaged")
    with pytest.raises(CorruptFile, match="public sets"):
        data.load_public(str(family))
