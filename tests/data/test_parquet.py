import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raydp.data.parquet import read_images
from raydp.errors import CorruptFile, InvalidValue, UnknownName

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def encode(pixels, mode=None, kind="PNG"):
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, kind)
    return buffer.getvalue()


def grey(count, side=6, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side)).astype(np.uint8)


def hub(encoded):
    """The Hub's layout of an image column."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.array([None if e is None else {"bytes": e, "path": "x.png"} for e in encoded], kind)


def write(path, images, labels, *, image="image", label="label", names=None, group=4):
    columns = {image: images, label: labels if isinstance(labels, pa.Array) else pa.array(labels, pa.int64())}
    table = pa.table(columns)
    if names:
        features = {label: {"names": names, "_type": "ClassLabel"}, image: {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=group, compression="zstd", write_page_checksum=True)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "train.parquet"


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "fine_label")])
def test_encoded_images_of_the_hub(path, image, label):
    pixels, labels = grey(10), [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    write(path, hub(map(encode, pixels)), labels, image=image, label=label, names=["a", "b", "c"])
    images, read_labels, names = read_images(path)
    np.testing.assert_array_equal(images, pixels[:, None])
    assert images.dtype == np.uint8
    assert read_labels.dtype == np.int64
    assert (read_labels.tolist(), names) == (labels, ("a", "b", "c"))


@pytest.mark.parametrize("limit", [1, 4, 5, 9, 10, 99])
def test_a_limit_takes_the_first_rows(path, limit):
    pixels = grey(10)
    write(path, hub(map(encode, pixels)), range(10))
    images, labels, names = read_images(path, limit=limit)
    np.testing.assert_array_equal(images, pixels[:limit, None])
    assert labels.tolist() == list(range(min(limit, 10)))
    assert names is None


def test_colour_plain_binary_and_other_modes(path):
    colour = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3)).astype(np.uint8)
    write(path, pa.array(list(map(encode, colour)), pa.large_binary()), [0, 1, 2])
    np.testing.assert_array_equal(read_images(path)[0], colour.transpose(0, 3, 1, 2))
    write(path, hub([encode(colour[0], "RGBA"), encode(colour[0], "P"), encode(colour[0], kind="BMP")]), [0, 1, 2])
    assert read_images(path)[0].shape == (3, 3, 5, 7)
    write(path, hub([encode(grey(1)[0], "1"), encode(grey(1)[0], "LA")]), [0, 1])
    assert read_images(path)[0].shape == (2, 1, 6, 6)


def nested(values, kind):
    return pa.array(values.tolist(), kind)


def lists(depth, leaf):
    return lists(depth - 1, pa.list_(leaf)) if depth else leaf


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((36,), (1, 6, 6)), ((6, 8), (1, 6, 8)), ((6, 8, 3), (3, 6, 8)), ((3, 6, 8), (3, 6, 8)), ((6, 8, 1), (1, 6, 8))],
)
@pytest.mark.parametrize("leaf", [pa.uint8(), pa.int64(), pa.float32(), pa.float64()])
def test_array_columns(path, shape, expected, leaf):
    pixels = np.random.default_rng(1).integers(0, 256, (5, *shape)).astype(np.uint8)
    stored = pixels / 255 if pa.types.is_floating(leaf) else pixels
    write(path, nested(stored, lists(len(shape), leaf)), range(5), group=2)
    images = read_images(path)[0]
    wanted = pixels.transpose(0, 3, 1, 2) if len(shape) == 3 and shape[-1] in (1, 3) else pixels
    np.testing.assert_array_equal(images, wanted.reshape(5, *expected))


def test_fixed_size_lists_and_tensors(path):
    pixels = grey(5)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), 36)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    for column in (fixed, tensors):
        write(path, column, range(5), group=2)
        np.testing.assert_array_equal(read_images(path)[0], pixels[:, None])


class TestDamage:
    def test_an_empty_and_a_foreign_file(self, path):
        for content in (b"", b"not parquet", b"PAR1" + bytes(40) + b"PAR1"):
            path.write_bytes(content)
            with pytest.raises(CorruptFile, match=r"train\.parquet is not a readable Parquet file"):
                read_images(path)
        with pytest.raises(CorruptFile, match=r"absent\.parquet"):
            read_images(path.with_name("absent.parquet"))

    def test_a_truncated_file(self, path):
        write(path, hub(map(encode, grey(10))), range(10))
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(CorruptFile, match="not a readable"):
            read_images(path)

    def test_a_damaged_row_group_is_named(self, path):
        write(path, hub(map(encode, grey(12, side=16))), range(12))
        content = bytearray(path.read_bytes())
        column = pq.ParquetFile(path).metadata.row_group(1).column(0)
        start = column.dictionary_page_offset + column.total_compressed_size // 2
        content[start : start + 40] = bytes(40)
        path.write_bytes(content)
        with pytest.raises(CorruptFile, match=r"train\.parquet: row group 1 \(of 3, counted from 0\) is damaged"):
            read_images(path)
        assert len(read_images(path, limit=4)[0]) == 4

    def test_no_rows(self, path):
        write(path, hub([]), [])
        with pytest.raises(InvalidValue, match="at least one example"):
            read_images(path)

    @pytest.mark.parametrize(
        ("changes", "near"),
        [({"image": "imgs"}, "Did you mean imgs|Known"), ({"label": "labels"}, "Did you mean labels")],
    )
    def test_missing_columns(self, path, changes, near):
        write(path, hub(map(encode, grey(2))), [0, 1], **changes)
        with pytest.raises(UnknownName, match=near) as caught:
            read_images(path)
        assert str(path) in str(caught.value)

    def test_an_image_that_cannot_be_decoded_is_named_by_its_row(self, path):
        good = list(map(encode, grey(7, side=20)))
        for bad in (good[5][:-60], b"", b"GIF89a", good[5][:20]):
            write(path, hub([*good[:5], bad, good[6]]), range(7))
            with pytest.raises(CorruptFile, match=r"train\.parquet: image of row 5 is not an image"):
                read_images(path)

    def test_deep_images_are_not_silently_rounded(self, path):
        write(path, hub([encode(grey(1)[0].astype(np.uint16) * 256)]), [0])
        with pytest.raises(CorruptFile, match="8 bits"):
            read_images(path)

    def test_missing_images_and_labels(self, path):
        good = list(map(encode, grey(6)))
        write(path, hub([*good[:5], None]), range(6))
        with pytest.raises(InvalidValue, match="image of row 5"):
            read_images(path)
        write(path, hub(good), [0, 1, 2, 3, 4, None])
        with pytest.raises(InvalidValue, match="label of row 5"):
            read_images(path)

    def test_different_sizes(self, path):
        write(path, hub([*map(encode, grey(5)), encode(grey(1, side=7)[0])]), range(6))
        with pytest.raises(InvalidValue, match=r"row 5 = \(1, 7, 7\).*\(1, 6, 6\)"):
            read_images(path)

    @pytest.mark.parametrize(
        ("labels", "names", "message"),
        [
            (pa.array([0, 1, -1]), None, "label of row 2 = -1"),
            (pa.array([0, 1, 3]), ["a", "b", "c"], r"label of row 2 = 3.*\[0, 3\)"),
            (pa.array([0.0, 1.0, float("nan")]), None, "must hold integers"),
            (pa.array(["a", "b", "c"]), None, "must hold integers"),
            (pa.array([True, False, True]), None, "must hold integers"),
        ],
    )
    def test_labels(self, path, labels, names, message):
        write(path, hub(map(encode, grey(3))), labels, names=names)
        with pytest.raises(InvalidValue, match=message):
            read_images(path)

    @pytest.mark.parametrize(
        ("value", "leaf", "message"),
        [
            (float("nan"), pa.float32(), "row 4 = nan: must be finite"),
            (float("inf"), pa.float64(), "row 4 = inf: must be finite"),
            (1.5, pa.float32(), r"row 4 = 1.5: must lie in \[0, 1\]"),
            (-0.5, pa.float64(), r"row 4 = -0.5: must lie in \[0, 1\]"),
            (256, pa.int16(), r"row 4 = 256: must lie in 0\.\.255"),
            (-1, pa.int64(), r"row 4 = -1: must lie in 0\.\.255"),
            (None, pa.uint8(), "row 4 = None: must not be missing"),
        ],
    )
    def test_pixels(self, path, value, leaf, message):
        rows = np.zeros((6, 4)).astype(int).tolist()
        rows[4][2] = value
        write(path, pa.array(rows, pa.list_(leaf)), range(6))
        with pytest.raises(InvalidValue, match=message):
            read_images(path)

    def test_shapes(self, path):
        for rows, message in (
            ([[0] * 5] * 2, "must be a square image"),
            ([[]] * 2, "must be a square image"),
            ([[0] * 4, [0] * 9], "lists of one length"),
        ):
            write(path, pa.array(rows, pa.list_(pa.uint8())), range(2))
            with pytest.raises(InvalidValue, match=message):
                read_images(path)
        write(path, pa.array([1, 2]), range(2))
        with pytest.raises(InvalidValue, match=r"int64.*must be struct"):
            read_images(path)

    def test_metadata_that_is_something_else_is_ignored(self, path):
        table = pa.table({"image": hub(map(encode, grey(2))), "label": [0, 1]})
        for metadata in (b"{", b"[]", b'{"info": 3}', b'{"info": {"features": {"label": {"names": "ab"}}}}'):
            pq.write_table(table.replace_schema_metadata({b"huggingface": metadata}), path)
            assert read_images(path)[2] is None


def test_memory_holds_the_array_and_a_piece(path):
    """51 MB of uint8 pixels in one row group, stored as float64 (411 MB): reading takes less than 250 MB more."""
    rows, piece = 16_384, 1024
    field = pa.field("image", pa.list_(pa.float64(), 3136))
    with pq.ParquetWriter(path, pa.schema([field, ("label", pa.int64())]), use_dictionary=True) as writer:
        zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(piece * 3136)), 3136)
        batch = pa.record_batch([zeros, pa.array(np.zeros(piece, np.int64))], schema=writer.schema)
        for _ in range(rows // piece):
            writer.write_batch(batch, row_group_size=rows)
    program = f"""
import resource
from raydp.data.parquet import read_images
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
images = read_images({str(path)!r})[0]
assert images.shape == ({rows}, 1, 56, 56)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) / 1024 < 250


@pytest.mark.shared_data
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    ("name", "file", "shape", "classes", "mean"),
    [
        ("mnist", "test.parquet", (10000, 1, 28, 28), 10, [0.1325]),
        ("fashion_mnist", "test.parquet", (10000, 1, 28, 28), 10, [0.2868]),
        ("cifar10", "test.parquet", (3000, 3, 32, 32), 10, [0.496, 0.4844, 0.4481]),
        ("retinamnist", "train.parquet", (1080, 3, 28, 28), 5, [0.3984, 0.2447, 0.1558]),
        ("tiny_imagenet32", "val.parquet", (2000, 3, 32, 32), 200, [0.4879, 0.454, 0.4017]),
    ],
)
def test_real_files(name, file, shape, classes, mean):
    images, labels, names = read_images(SHARED / name / file)
    assert images.shape == shape
    assert names is not None and len(names) == classes
    assert set(labels.tolist()) == set(range(classes))
    np.testing.assert_allclose(images.mean(axis=(0, 2, 3)) / 255, mean, atol=1e-4)
    assert len({hashlib.blake2b(image.tobytes()).digest() for image in images}) > 0.99 * len(images)
