"""A torch data set of one's own, named as a function: what it becomes, and what is refused."""

import sys

import numpy as np
import pytest

from raydp import data
from raydp.errors import InvalidValue, UnknownName

HEAD = """
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split
from raydp.data import TorchData

N = 60
x = torch.arange(N * 3, dtype=torch.float32).reshape(N, 3) / 100
y = torch.arange(N) % 2


class Items(Dataset):
    def __init__(self, items, classes=None):
        self.items = items
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(x, y)


def make():
"""


@pytest.fixture
def make(tmp_path):
    """The name of a function with these lines."""

    def write(*lines):
        file = tmp_path / "mine.py"
        file.write_text(HEAD + "".join(f"    {line}\n" for line in lines), encoding="utf-8")
        return f"{file}:make"

    return write


def examples(found):
    return found.private.non_private("a test")


def test_rows_and_classes(make):
    name = make("return TorchData(train=TensorDataset(x, y), test=TensorDataset(x[:5] + 9, y[:5]), classes=2)")
    found = data.load(name)
    assert found.task == "classification" == data.task_of(name)
    assert (len(found.private), len(found.holdout), found.private.num_classes) == (60, 5, 2)
    assert found.holdout_visibility == "private hold-out" and found.normalization.mean == (0.0,)
    np.testing.assert_array_equal(examples(found).inputs.numpy()[:, 0], (np.arange(60, dtype=np.float32) * 3) / 100)
    assert examples(found).targets.tolist() == [0, 1] * 30
    assert len(data.load(name, limit=7).private) == 7
    assert len(data.load_public(name, limit=9)) == 9


def test_a_pair_whose_first_names_its_classes_as_torchvision_does(make):
    name = make(
        "images = [Image.fromarray(np.full((4, 5), v, np.uint8)) for v in range(N)]",
        "train = Items([(image, int(v)) for image, v in zip(images, y)], classes=['a', 'b', 'c'])",
        "return train, Items([(np.full((4, 5), 255, np.uint8), 2)])",
    )
    found = data.load(name)
    assert (found.private.input_shape, found.private.num_classes) == ((1, 4, 5), 3)
    assert found.holdout.inputs.flatten().tolist() == [255] * 20
    assert examples(found).inputs[:, 0, 0, 0].tolist() == list(range(60))


@pytest.mark.parametrize(
    ("image", "shape", "first"),
    [
        ("torch.full((3, 2, 4), 0.2)", (3, 2, 4), 51),
        ("np.full((2, 4, 3), 7, np.uint8)", (3, 2, 4), 7),
        ("torch.full((2, 4), 9, dtype=torch.uint8)", (1, 2, 4), 9),
        ("torch.full((5,), 9)", (5,), 9.0),
    ],
)
def test_images_and_rows(make, image, shape, first):
    item = f"({image}, 0)"
    found = data.load(make(f"return TorchData(train=Items([{item}] * 4), test=Items([{item}]), classes=2)"))
    assert found.private.input_shape == shape
    assert found.holdout.inputs.flatten()[0] == first


def test_numbers_and_labels(make):
    found = data.load(make("return TorchData(train=TensorDataset(x, x[:, 0] * 100), target_range=(0, 90))"))
    assert found.task == "regression"  # a sixth is held out
    assert len(found.private) + len(found.holdout) == 60 and 1 < len(found.holdout) < 25
    targets = examples(found).targets
    assert targets.min() >= -1 and targets.max() == 1 and (targets == 1).sum() > 10  # cut off at 90
    name = make("return TorchData(train=TensorDataset(x, torch.stack([y, 1 - y], 1)), labels=['a', 'b'])")
    found = data.load(name)
    assert (found.task, found.private.num_labels) == ("multilabel", 2)
    assert (examples(found).targets.sum(dim=1) == 1).all()


def test_the_fingerprint_is_that_of_the_content(make):
    line = "return TorchData(train=TensorDataset(x + {}, y), test=TensorDataset(x[:5], y[:5]), classes=2)"
    first = data.load(make(line.format(0))).private.fingerprint
    assert data.load(make("z = 1", line.format(0))).private.fingerprint == first
    assert data.load(make(line.format(1))).private.fingerprint != first


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["return Stream(), None"], r"train = 'Stream': is an iterable data set.*map-style"),
        (["return TorchData(train=Stream(), classes=2)"], r"train = 'Stream': is an iterable data set.*map-style"),
        (["return TorchData(train=7, classes=2)"], "must be a map-style torch data set"),
        (["return None"], "must be a map-style torch data set"),
        (["return TensorDataset(x, y)"], r"without saying what its targets are.*TorchData"),
        (["return TorchData(train=TensorDataset(x, y))"], "must state what targets are: one of classes"),
        (["return TorchData(train=TensorDataset(x, y), classes=2, labels=2)"], "one of classes"),
        (["return TorchData(train=TensorDataset(x, y), classes=1)"], "classes = 1"),
        (["return TorchData(train=TensorDataset(x, y), classes='ab')"], "list of names"),
        (["return TorchData(train=TensorDataset(x, y), target_range=3)"], r"must be \(low, high\)"),
        (["return TorchData(train=TensorDataset(x, y), target_range=(3, 3))"], "must exceed low"),
        (["return TorchData(train=TensorDataset(x[:0], y[:0]), classes=2)"], "at least one example"),
        (["return TorchData(train=TensorDataset(x, y + 1), classes=2)"], r"target of item 1 = .*\[0, 2\)"),
        (["return TorchData(train=TensorDataset(x, y.float()), classes=2)"], r"item 0 = .*state target_range"),
        (["return TorchData(train=TensorDataset(x, y), labels=2)"], "vector of 2 zeros and ones"),
        (["return TorchData(train=TensorDataset(x), classes=2)"], r"must be a pair \(input, target\)"),
        (
            ["x[3, 1] = float('nan')", "return TorchData(train=TensorDataset(x, y), classes=2)"],
            "input of item 3.*finite",
        ),
        (
            ["return TorchData(train=TensorDataset(x, x[:, 0] / 0), target_range=(0, 1))"],
            "target of item 0 = .*one finite number",
        ),
        (
            ["return TorchData(train=Items([(torch.zeros(3), 0), (torch.zeros(4), 1)]), classes=2)"],
            r"input of item 1.*must be float32 of shape \(3,\)",
        ),
        (
            ["return TorchData(train=TensorDataset(torch.randn(N, 1, 4, 4), y), classes=2)"],
            r"must be pixels in \[0, 1\].*Normalize",
        ),
        (["return TorchData(train=TensorDataset(torch.zeros(N, 1, 2, 3, 4), y), classes=2)"], "flatten other shapes"),
        (
            ["a, b = random_split(TensorDataset(x, y), [40, 20])", "return TorchData(train=a, test=b, classes=2)"],
            r"must be the same each time.*fixed generator",
        ),
        (
            ["train = TensorDataset(x + torch.rand(1), y)", "return TorchData(train=train, classes=2)"],
            "must be the same each time",
        ),
        (["raise RuntimeError('no disk')"], "fails: RuntimeError: no disk"),
    ],
)
def test_what_is_refused(make, lines, message):
    with pytest.raises(InvalidValue, match=message):
        data.load(make(*lines))


def test_names_that_lead_nowhere(make):
    name = make("return None")
    with pytest.raises(UnknownName, match="Did you mean make"):
        data.load(name.replace(":make", ":mak"))
    with pytest.raises(InvalidValue, match="must name a function"):
        data.load(name.replace(":make", ":N"))
    assert "mine" not in sys.modules
