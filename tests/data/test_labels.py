"""Several yes/no labels an example, from a described table."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raydp import data
from raydp.data import PrivateData, PublicData, check_public
from raydp.data.drafts import draft
from raydp.errors import InvalidValue, UnknownName

HEAD = 'train = "train.parquet"\ntest = "train.parquet"\n[features.age]\nlow = 0\nhigh = 10\n[target]\n'
COLUMNS = 'columns = ["cough", "fever"]\n'
LISTED = 'column = "findings"\nlabels = ["cough", "fever"]\n'
WANTED = [[0, 1], [1, 1], [0, 0]]


@pytest.fixture
def describe(tmp_path):
    def write(target, **changes):
        columns = {
            "age": [1.0, 2.0, 3.0],
            "cough": [False, True, False],
            "fever": [1, 1, 0],
            "findings": WANTED,
            "words": ["no", "yes", "no"],
            **changes,
        }
        pq.write_table(pa.table(columns), tmp_path / "train.parquet")
        file = tmp_path / "visits.toml"
        file.write_text(HEAD + target, encoding="utf-8")
        return str(file)

    return write


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        (COLUMNS, {}),
        (LISTED, {}),
        (LISTED, {"findings": pa.array([list(map(bool, row)) for row in WANTED], pa.list_(pa.bool_(), 2))}),
        (LISTED + "values = [0.0, 1.0]\n", {"findings": pa.array(WANTED, pa.list_(pa.float32()))}),
        (
            COLUMNS + 'values = ["no", "yes"]\n',
            {"cough": ["no", "yes", "no"], "fever": pa.array(["yes", "yes", "no"]).dictionary_encode()},
        ),
    ],
)
def test_labels_in_columns_and_in_lists(describe, target, changes):
    file = describe(target, **changes)
    found = data.load(file)
    assert found.task == "multilabel" == data.task_of(file)
    assert (found.private.num_classes, found.private.num_labels, found.private.outputs) == (None, 2, 2)
    assert found.holdout.targets.dtype == torch.float32
    np.testing.assert_array_equal(found.holdout.targets.numpy(), WANTED)
    assert "2 yes/no labels" in found.summary
    assert data.load_public(file, limit=2).num_labels == 2


@pytest.mark.parametrize(
    ("target", "changes", "error", "message"),
    [
        ('columns = ["cough", "fevre"]\n', {}, UnknownName, "fevre.*Did you mean fever"),
        ('columns = ["cough", "cough"]\n', {}, InvalidValue, "each once"),
        ("columns = [1, 2]\n", {}, InvalidValue, "must be names"),
        ('columns = ["cough", "age"]\n', {}, InvalidValue, r"features = 'age': is the target"),
        ('columns = ["cough", "findings"]\n', {}, InvalidValue, "column findings.*must hold one yes or no"),
        ('columns = ["cough", "words"]\n', {}, InvalidValue, r"column words.*must hold true and false, or 0 and 1"),
        (COLUMNS + 'column = "fever"\n', {}, InvalidValue, "must name the columns"),
        ('labels = ["a"]\n', {}, InvalidValue, "must name the columns"),
        (COLUMNS + "low = 0\n", {}, UnknownName, "low"),
        (COLUMNS + 'values = ["no", "yes", "?"]\n', {}, InvalidValue, r"target\.values.*must be two"),
        (COLUMNS, {"fever": [1, 2, 0]}, InvalidValue, r"fever of row 1 = .*must be one of \[0, 1\]"),
        (COLUMNS, {"fever": [1, None, 0]}, InvalidValue, "fever of row 1"),
        (
            'column = "findings"\nlabels = ["a", "b", "c"]\n',
            {},
            InvalidValue,
            r"of row 0 = '2 labels'.*list of 3",
        ),
        (LISTED, {"findings": [[0, 1], [0, 3], [0, 0]]}, InvalidValue, "findings of row 1"),
        (LISTED, {"findings": [0, 1, 0]}, InvalidValue, "must hold lists, one entry a label"),
        (
            'column = "score"\nvalues = [0, 1]\n',
            {"score": [0.0, 1.0, 0.5]},
            InvalidValue,
            "score.*holds floats",
        ),
    ],
)
def test_what_is_refused(describe, target, changes, error, message):
    with pytest.raises(error, match=message):
        data.load(describe(target, **changes))


def test_an_empty_table_is_named(describe, tmp_path):
    file = describe(COLUMNS)
    pq.write_table(pq.read_table(tmp_path / "train.parquet").slice(0, 0), tmp_path / "train.parquet")
    with pytest.raises(InvalidValue, match=r"train\.parquet = '0 rows': must hold at least one example"):
        data.load(file)


def arrays(labels, kind=PrivateData):
    inputs = torch.arange(12, dtype=torch.float32).reshape(6, 2) + (kind is PublicData) * 100
    targets = torch.zeros(6, labels) if labels else torch.zeros(6)
    return kind(name="mine", inputs=inputs, targets=targets, num_labels=labels)


def test_the_fingerprint_tells_labels_from_numbers():
    assert arrays(1).fingerprint != arrays(None).fingerprint


def test_the_types_hold_zeros_and_ones_of_the_stated_width():
    inputs = torch.zeros(3, 2)
    with pytest.raises(InvalidValue, match="must be 0 or 1"):
        PrivateData(name="mine", inputs=inputs, targets=torch.full((3, 2), 0.5), num_labels=2)
    with pytest.raises(InvalidValue, match=r"must be float32 \(N, 3\)"):
        PrivateData(name="mine", inputs=inputs, targets=torch.zeros(3, 2), num_labels=3)
    with pytest.raises(InvalidValue, match="no meaning for targets that are numbers or labels"):
        PrivateData(name="mine", inputs=inputs, targets=torch.zeros(3, 2), num_labels=2, num_classes=2)


def test_public_examples_need_the_same_labels():
    check_public(arrays(3, PublicData), arrays(3))
    with pytest.raises(InvalidValue, match=r"2 yes/no labels.*3 yes/no labels"):
        check_public(arrays(2, PublicData), arrays(3))


def test_a_draft_says_how_labels_are_written(describe, tmp_path):
    describe(COLUMNS)
    assert "columns = [" in draft([tmp_path / "train.parquet"], "fever")
    assert "labels = []" in draft([tmp_path / "train.parquet"], "findings")
