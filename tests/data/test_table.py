"""Tables of the user's own: what the description says is what the model gets, and what it cannot say is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydp import data
from raydp.data.drafts import draft
from raydp.errors import CorruptFile, InvalidValue, UnknownName

DESCRIPTION = """
train = "part-*.parquet"
test = "test.parquet"

[target]
column = "readmitted"
values = ["no", "yes"]

[features.age]
low = 0
high = 100
missing = 50

[features.ward]
values = ["a", "b", "other"]
other = "other"

[features.ecg]
low = -1
high = 1
length = 2
"""


def rows(**changes):
    columns = {
        "age": [0.0, 100.0, None, 250.0],
        "ward": ["a", "b", None, "c"],
        "ecg": [[0.0, 1.0], [-1.0, 0.5], [0.0, 0.0], [2.0, -2.0]],
        "readmitted": ["no", "yes", "no", "yes"],
        "name": ["w", "x", "y", "z"],
    }
    return pa.table({**columns, **changes})


@pytest.fixture
def table(tmp_path):
    for part in range(2):
        pq.write_table(rows(), tmp_path / f"part-{part}.parquet")
    pq.write_table(rows(), tmp_path / "test.parquet")
    file = tmp_path / "visits.toml"
    file.write_text(DESCRIPTION, encoding="utf-8")
    return file


def test_the_rows_are_what_the_description_says(table):
    found = data.load(str(table))
    assert found.task == "classification" == data.task_of(str(table))
    assert (len(found.private), len(found.holdout), found.private.input_shape) == (8, 4, (6,))
    assert found.holdout_visibility == "private hold-out"
    wanted = [[-1, 1, 0, 0, 0, 1], [1, 0, 1, 0, -1, 0.5], [0, 0, 0, 1, 0, 0], [1, 0, 0, 1, 1, -1]]
    np.testing.assert_allclose(found.holdout.inputs.numpy(), wanted)
    assert found.holdout.targets.tolist() == [0, 1, 0, 1]


def test_a_sixth_is_held_out_by_content(table, tmp_path):
    table.write_text(DESCRIPTION.replace('test = "test.parquet"', ""), encoding="utf-8")
    ages = [float(age) for age in range(96)]
    for part in range(2):
        pq.write_table(
            pa.table(
                {"age": ages, "ward": ["a"] * 96, "ecg": [[0.0, 0.1]] * 96, "readmitted": ["no", "yes"] * 48},
            ),
            tmp_path / f"part-{part}.parquet",
        )
    found = data.load(str(table))
    held = {row.tobytes() for row in found.holdout.inputs.numpy()}
    assert len(found.private) + len(found.holdout) == 192
    assert len(found.holdout) == 2 * len(held)  # copies of a row are on the same side
    assert 0 < len(held) < 40


def test_numbers_as_targets_and_public_tables(table):
    text = DESCRIPTION.replace(
        'column = "readmitted"\nvalues = ["no", "yes"]', 'column = "age"\nkind = "number"\nlow = 0\nhigh = 200'
    )
    table.write_text(text.replace("[features.age]\nlow = 0\nhigh = 100\nmissing = 50\n", ""), encoding="utf-8")
    with pytest.raises(InvalidValue, match=r"age of row 2 = None: must be a finite number"):
        data.load(str(table))
    for name in ("part-0", "part-1", "test"):
        pq.write_table(rows(age=[0.0, 100.0, 150.0, 250.0]), table.parent / f"{name}.parquet")
    found = data.load(str(table))
    assert (found.task, found.private.num_classes) == ("regression", None)
    np.testing.assert_allclose(found.holdout.targets.numpy(), [-1, 0, 0.5, 1])
    assert len(data.load_public(str(table))) == 8


@pytest.mark.parametrize(
    ("before", "after", "error", "message"),
    [
        ('column = "readmitted"', 'column = "readmited"', UnknownName, "Did you mean readmitted"),
        ("[features.age]", "[features.aeg]", UnknownName, "aeg.*Did you mean"),
        ('values = ["no", "yes"]', 'values = ["no"]', InvalidValue, "two classes or more"),
        ('values = ["no", "yes"]', 'values = ["no", "maybe"]', InvalidValue, r"readmitted of row 1 = .*must be one of"),
        ('values = ["no", "yes"]', "values = [0, 1]", InvalidValue, r"readmitted of row 0.*of type int"),
        ("high = 100\n", "", InvalidValue, r"features\.age.*needs low and high"),
        ("high = 100\n", "high = -1\n", InvalidValue, r"features\.age\.high = -1: must exceed low"),
        ("missing = 50", "missing = 500", InvalidValue, r"features\.age\.missing"),
        ("missing = 50\n", "", InvalidValue, r"age of row 2 = None"),
        ('other = "other"\n', "", InvalidValue, r"ward of row 2.*must be one of"),
        ("length = 2", "length = 3", InvalidValue, r"ecg of row 0 = '2 numbers'"),
        ("length = 2\n", "", InvalidValue, r"column ecg.*must hold numbers"),
        ('"part-*.parquet"', '"parts-*.parquet"', InvalidValue, "matches no file"),
        ("[target]", "[targets]", UnknownName, "Did you mean target"),
        (
            "[features.ward]",
            '[features.readmitted]\nvalues = ["no", "yes"]\n[features.ward]',
            InvalidValue,
            "is the target",
        ),
        ("[target]", "[target", CorruptFile, "is not a TOML file"),
    ],
)
def test_what_is_refused(table, before, after, error, message):
    assert before in DESCRIPTION
    table.write_text(DESCRIPTION.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(error, match=message):
        data.load(str(table))


def test_images_with_grouped_labels(tmp_path):
    images = [bytes(range(16))] * 3
    pixels = pa.array([list(image) for image in images], pa.list_(pa.uint8()))
    pq.write_table(pa.table({"scan": pixels, "grade": [0, 3, 1]}), tmp_path / "train.parquet")
    pq.write_table(pa.table({"scan": pixels, "grade": [0, 0, 4]}), tmp_path / "test.parquet")
    file = tmp_path / "scans.toml"
    file.write_text(
        'train = "train.parquet"\ntest = "test.parquet"\nholdout = "public"\n'
        '[target]\ncolumn = "grade"\ngroups = [[0], [1, 2, 3, 4]]\n[features.scan]\nkind = "image"\n',
        encoding="utf-8",
    )
    found = data.load(str(file))
    assert found.private.input_shape == (1, 4, 4)
    assert found.private.num_classes == 2
    assert found.holdout.targets.tolist() == [0, 0, 1]
    assert found.holdout_visibility == "public benchmark"


def test_a_draft_names_the_columns_and_no_value_of_a_row(table, tmp_path):
    text = draft([tmp_path / "part-0.parquet"], "readmitted")
    assert '[features."ward"]' in text and 'column = "readmitted"' in text
    assert "yes" not in text and "250" not in text
    with pytest.raises(UnknownName, match="Did you mean readmitted"):
        draft([tmp_path / "part-0.parquet"], "readmited")


def test_columns_of_one_range_share_a_description(table, tmp_path):
    columns = {"lab a": [0.0, 5.0], "lab b": [10.0, 20.0], "lab age": [1.0, 0.0], "ill": [0, 1], "note": ["x", "y"]}
    pq.write_table(pa.table(columns), tmp_path / "labs.parquet")
    head = 'train = "labs.parquet"\ntest = "labs.parquet"\n[target]\ncolumn = "ill"\nvalues = [0, 1]\n'
    file = tmp_path / "labs.toml"
    file.write_text(head + '[features."lab *"]\nlow = 0\nhigh = 10\n[features."lab age"]\nlow = 0\nhigh = 1\n')
    np.testing.assert_allclose(data.load(str(file)).holdout.inputs.numpy(), [[-1, 1, 1], [0, 1, -1]])
    file.write_text(head + '[features."lib *"]\nlow = 0\nhigh = 10\n')
    with pytest.raises(InvalidValue, match=r"'lib \*': matches none of the columns that are left: \['lab a'"):
        data.load(str(file))


def test_a_line_that_was_left_open_is_shown(table):
    table.write_text(DESCRIPTION.replace("low = 0\n", "low =\n", 1), encoding="utf-8")
    with pytest.raises(CorruptFile, match=r"'low ='\. Write what is publicly known after the = of 'low ='"):
        data.load(str(table))


def test_features_that_are_not_finite_are_named(table):
    pq.write_table(rows(age=[0.0, float("inf"), 1.0, 2.0]), table.parent / "part-1.parquet")
    with pytest.raises(InvalidValue, match=r"part-1\.parquet: age of row 1 = inf: must be a finite number"):
        data.load(str(table))
