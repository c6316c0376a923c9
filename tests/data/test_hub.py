"""Data set directories as the Hugging Face Hub lays them out, and as ``datasets.save_to_disk`` writes them."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raydp import data
from raydp.errors import CorruptFile, InvalidValue

NAMES = ("airplane", "automobile", "bird")
README = """---
license: mit
dataset_info:
  features:
  - name: picture
    dtype: image
  - name: kind
    dtype:
      class_label:
        names:
          '0': airplane
          '1': automobile
          '2': bird
  splits:
  - name: train
    num_examples: 6
{more}---
# A data set
"""


def rows(count, start=0, *, metadata=False, image="picture", label="kind", side=6):
    """Encoded images of one value each, numbered from ``start``, and their classes."""
    encoded = []
    for number in range(start, start + count):
        buffer = io.BytesIO()
        Image.fromarray(np.full((side, side), number, np.uint8)).save(buffer, "PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = pa.array([number % 2 for number in range(start, start + count)], pa.int64())
    table = pa.table({image: pa.array(encoded, kind), label: labels})
    if metadata:
        features = {image: {"_type": "Image"}, label: {"_type": "ClassLabel", "names": list(NAMES)}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    return table


def shards(directory: Path, split, counts, *, start=0, **kind):
    directory.mkdir(parents=True, exist_ok=True)
    for index, count in enumerate(counts):
        pq.write_table(rows(count, start, **kind), directory / f"{split}-{index:05d}-of-{len(counts):05d}.parquet")
        start += count


def first_pixels(public):
    return public.inputs[:, 0, 0, 0].tolist()


def readme(directory, more=""):
    (directory / "README.md").write_text(README.format(more=more), encoding="utf-8")


def test_shards_with_a_readme(tmp_path):
    shards(tmp_path / "data", "train", (3, 2, 1))
    shards(tmp_path / "data", "test", (2,), start=100)
    shards(tmp_path / "data", "validation", (1,), start=200)
    readme(tmp_path)
    found = data.load(str(tmp_path))
    assert (len(found.private), found.private.num_classes, found.private.input_shape) == (6, 3, (1, 6, 6))
    assert first_pixels(found.holdout) == [100, 101]
    assert found.holdout_visibility == "private hold-out"
    assert first_pixels(found.private.non_private("a test")) == list(range(6))
    assert data.task_of(str(tmp_path)) == "classification"
    assert len(data.load(str(tmp_path), limit=4).private) == 4
    assert first_pixels(data.load_public(str(tmp_path))) == list(range(6))


def test_the_validation_split_is_held_out_where_there_is_no_test(tmp_path):
    shards(tmp_path, "train", (6,), metadata=True)
    shards(tmp_path, "validation", (2,), start=50, metadata=True)
    found = data.load(str(tmp_path))
    assert first_pixels(found.holdout) == [50, 51] and found.private.num_classes == 3
    plain = tmp_path / "plain"
    plain.mkdir()
    pq.write_table(rows(6, image="image", label="label"), plain / "train.parquet")
    pq.write_table(rows(2, 70, image="image", label="label"), plain / "val.parquet")
    assert first_pixels(data.load(str(plain)).holdout) == [70, 71]


def test_a_configuration_is_found_or_named(tmp_path):
    shards(tmp_path / "plain_text", "train", (4,))
    shards(tmp_path / "plain_text", "test", (2,), start=100)
    readme(tmp_path)
    for path in (tmp_path, tmp_path / "plain_text"):
        found = data.load(str(path))
        assert (len(found.private), len(found.holdout), found.private.num_classes) == (4, 2, 3)
    shards(tmp_path / "other", "train", (4,))
    with pytest.raises(InvalidValue, match=r"several configurations: other, plain_text\. Name the directory of one"):
        data.load(str(tmp_path))


def test_a_directory_for_each_split(tmp_path):
    for split, start in (("train", 0), ("test", 100)):
        (tmp_path / "default" / split).mkdir(parents=True)
        pq.write_table(rows(3, start, metadata=True), tmp_path / "default" / split / "0000.parquet")
    assert first_pixels(data.load(str(tmp_path)).holdout) == [100, 101, 102]


def test_patterns_of_the_readme_count(tmp_path):
    pq.write_table(rows(4), tmp_path / "pictures.parquet")
    pq.write_table(rows(2, 100), tmp_path / "measured.parquet")
    files = "  - split: train\n    path: pic*.parquet\n  - split: test\n    path: [measured.parquet]\n"
    readme(tmp_path, f"configs:\n- config_name: default\n  data_files:\n{files}")
    assert first_pixels(data.load(str(tmp_path)).holdout) == [100, 101]


def save(directory, start, count):
    """As ``Dataset.save_to_disk`` does, in two files."""
    directory.mkdir(exist_ok=True)
    table = rows(count, start, metadata=True)
    names = [f"data-{index:05d}-of-00002.arrow" for index in range(2)]
    for name, part in zip(names, (table.slice(0, 2), table.slice(2)), strict=True):
        with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_what_save_to_disk_wrote(tmp_path):
    save(tmp_path / "train", 0, 24)
    save(tmp_path / "test", 100, 3)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = data.load(str(tmp_path))
    assert first_pixels(found.holdout) == [100, 101, 102] and found.private.num_classes == 3
    assert first_pixels(found.private.non_private("a test")) == list(range(24))
    one = data.load(str(tmp_path / "train"))  # a sixth is held out
    held, kept = first_pixels(one.holdout), first_pixels(one.private.non_private("a test"))
    assert held and sorted(held + kept) == list(range(24))


def test_what_save_to_disk_wrote_and_something_broke(tmp_path):
    save(tmp_path, 0, 24)
    (tmp_path / "data-00001-of-00002.arrow").write_bytes(b"no stream")
    with pytest.raises(CorruptFile, match="is not a readable Arrow stream"):
        data.load(str(tmp_path))
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(CorruptFile, match="lacks data-00001-of-00002"):
        data.load(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(CorruptFile, match="names no data files"):
        data.load(str(tmp_path))


class TestRefusals:
    def test_a_missing_shard(self, tmp_path):
        shards(tmp_path, "train", (2, 2, 2))
        (tmp_path / "train-00001-of-00003.parquet").unlink()
        with pytest.raises(InvalidValue, match="shard 1 is missing"):
            data.load(str(tmp_path))

    def test_shards_of_different_sizes(self, tmp_path):
        shards(tmp_path, "train", (2, 2), metadata=True)
        pq.write_table(rows(2, side=8, metadata=True), tmp_path / "train-00001-of-00002.parquet")
        with pytest.raises(InvalidValue, match=r"train-00001-of-00002\.parquet.*like train-00000.*Resize"):
            data.load(str(tmp_path))

    def test_a_label_that_the_readme_does_not_name(self, tmp_path):
        shards(tmp_path, "train", (2,))
        table = rows(2).set_column(1, "kind", pa.array([0, 3]))
        pq.write_table(table, tmp_path / "train-00000-of-00001.parquet")
        readme(tmp_path)
        with pytest.raises(InvalidValue, match=r"kind of row 1 = 3: must lie in \[0, 3\)"):
            data.load(str(tmp_path))

    def test_a_table_is_to_be_described(self, tmp_path):
        (tmp_path / "data").mkdir()
        pq.write_table(pa.table({"age": [1, 2], "ill": [0, 1]}), tmp_path / "data/train-00000-of-00001.parquet")
        with pytest.raises(InvalidValue, match=r"columns = \['age', 'ill'\].*raydp describe"):
            data.load(str(tmp_path))

    @pytest.mark.parametrize(
        "content", ["---\na: [\n---\n", "---\n- 1\n---\n", "no head", "---\ndataset_info: 3\n---\n"]
    )
    def test_a_readme_that_says_nothing_is_no_obstacle_unless_it_is_broken(self, tmp_path, content):
        shards(tmp_path, "train", (40,), image="image", label="label")
        (tmp_path / "README.md").write_text(content)
        if "[" in content:
            with pytest.raises(CorruptFile, match="YAML head cannot be read"):
                data.load(str(tmp_path))
        else:
            assert data.load(str(tmp_path)).private.num_classes == 2
