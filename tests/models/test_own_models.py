"""Models of the user's own: named by file or module, tried out before anything is spent, and clipped correctly."""

import pytest
import torch

from raydp.errors import InvalidValue, UnknownName
from raydp.models import build_model, model_digest, model_source, public_probe
from raydp.tasks import cross_entropy_sum
from raydp.training.gradients import PerExampleGradients

NETS = '''
import torch
from torch import nn

class Rich(nn.Module):
    """An embedding whose weight is used again as a linear map, attention, a normalisation, a bare parameter."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.token = nn.Embedding(4, 8)
        self.lift = nn.Linear(inputs, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(12, outputs)

    def forward(self, x):
        words = self.token((x[:, :3] * 4).long().clamp(0, 3))
        words = torch.cat([words, self.lift(x)[:, None]], dim=1)
        mixed = self.norm(words + self.attention(words, words, words, need_weights=False)[0]).mean(dim=1)
        tied = torch.tanh(self.frozen(mixed) * self.scale) @ self.token.weight.T
        return self.head(torch.cat([tied, mixed], dim=1))

class Functional(nn.Module):
    """Its hidden layer is never called: only its weight is used."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.hidden, self.head = nn.Linear(inputs, 8), nn.Linear(8, outputs)

    def forward(self, x):
        return self.head(torch.tanh(nn.functional.linear(x, self.hidden.weight, self.hidden.bias)))

class Tied(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, inputs), nn.Linear(inputs, inputs)
        self.head = nn.Linear(inputs, outputs)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

class Centred(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.head = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.head(x - x.mean(dim=0))

class Idle(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.head, self.idle = nn.Linear(inputs, outputs), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(x)

def rich(shape, outputs): return Rich(shape[0], outputs)
def functional(shape, outputs): return Functional(shape[0], outputs)
def tied(shape, outputs): return Tied(shape[0], outputs)
def centred(shape, outputs): return Centred(shape[0], outputs)
def idle(shape, outputs): return Idle(shape[0], outputs)
def wide(shape, outputs): return nn.Linear(shape[0], outputs + 1)
def picky(shape, outputs): return nn.Sequential(nn.Linear(shape[0] + 1, outputs))
def nothing(shape, outputs): return 3
def failing(shape, outputs): raise RuntimeError("no such luck")
def batch_norm(shape, outputs): return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))
number = 3
'''


@pytest.fixture
def nets(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(NETS, encoding="utf-8")
    return file


def build(file, name, outputs=3):
    return build_model(f"{file}:{name}", input_shape=(5,), outputs=outputs, seed=0)


@pytest.mark.parametrize("name", ["rich", "functional", "tied"])
def test_gradients_of_one_example_at_a_time(nets, name):
    """Whatever the model is made of, each row is the gradient of one example's own loss."""
    model = build(nets, name)
    found = PerExampleGradients(model, probe=public_probe(f"{nets}:{name}", (5,)))
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand(6, 5, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    rows = found(inputs, labels)
    for index in range(6):
        loss = cross_entropy_sum(model(inputs[index : index + 1]), labels[index : index + 1])
        for row, wanted in zip(rows, torch.autograd.grad(loss, found.parameters), strict=True):
            torch.testing.assert_close(row[index], wanted, rtol=1e-4, atol=1e-6)
    assert all(float(row.abs().max()) > 0 for row in rows)


def test_a_layer_that_is_not_called_needs_the_probe(nets):
    """Captured calls do not show it: the engine must change, or its gradient would be zero."""
    assert (
        PerExampleGradients(build(nets, "functional"), probe=public_probe(f"{nets}:functional", (5,))).engine == "vmap"
    )
    assert PerExampleGradients(build(nets, "tied"), probe=public_probe(f"{nets}:tied", (5,))).engine == "captured"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("centred", "another output alone than among others"),
        ("idle", r"idle\.weight, idle\.bias.*get no gradient"),
        ("wide", r"returns \(3, 4\) for 3 examples, and the targets need \(3, 3\)"),
        ("picky", r"fails for inputs of shape \(3, 5\)"),
        ("nothing", "returns int"),
        ("failing", "RuntimeError: no such luck"),
        ("batch_norm", r"BatchNorm1d.*GroupNorm"),
        ("number", "must name a function"),
    ],
)
def test_models_that_are_refused(nets, name, message):
    with pytest.raises(InvalidValue, match=message):
        build(nets, name)


def test_names_that_do_not_exist(nets, tmp_path):
    with pytest.raises(UnknownName, match=r"wid.*Did you mean wide"):
        build(nets, "wid")
    with pytest.raises(UnknownName, match=r"net\.py.*nets\.py"):
        build(tmp_path / "net.py", "wide")
    with pytest.raises(InvalidValue, match="does not find"):
        build_model("no_such_package.nets:make", input_shape=(5,), outputs=3, seed=0)
    (tmp_path / "broken.py").write_text("import no_such_thing\n", encoding="utf-8")
    with pytest.raises(InvalidValue, match="cannot be imported: ModuleNotFoundError"):
        build(tmp_path / "broken.py", "make")


def test_the_weights_follow_from_the_seed_and_the_digest_from_the_file(nets, monkeypatch):
    first, second = build(nets, "rich"), build(nets, "rich")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    before = model_digest(f"{nets}:rich")
    monkeypatch.chdir(nets.parent)
    assert model_source("nets.py:rich") == f"{nets}:rich"
    nets.write_text(NETS + "\n# changed\n", encoding="utf-8")
    assert model_digest(f"{nets}:rich") != before


def test_a_module_that_is_installed(nets, monkeypatch):
    monkeypatch.syspath_prepend(str(nets.parent))
    assert build_model("nets:tied", input_shape=(5,), outputs=2, seed=0)(torch.zeros(4, 5)).shape == (4, 2)
