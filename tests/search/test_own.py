"""A person's own network on their own table, from the README alone: two files, one command."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import tune

from raydp import cli, data
from raydp.errors import InvalidValue
from raydp.search import report
from raydp.search.definition import Search
from raydp.search.files import load_searches
from raydp.search.results import Result
from raydp.search.runner import check
from raydp.search.verify import verify
from tests.search.helpers import drive, session_in, small_search

NETS = """
from torch import nn

def make(input_shape, outputs):
    return nn.Sequential(nn.Linear(input_shape[0], 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, outputs))
"""
SEARCH = """
from ray import tune
import raydp

search = raydp.Search(
    name="visits",
    data="visits.toml",
    model="nets.py:make",
    task="classification:weights=1,3",
    budget=raydp.Budget(epsilon=3.0, delta=1e-4),
    space={"learning_rate": tune.loguniform(0.1, 2.0)},
    fixed={"epochs": 2, "batch_size": 64},
    metric="auroc",
    trials=1,
    reports=1,
    resources=raydp.Resources(total_cpus=1),
)
"""


def main(arguments):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def write_visits(directory, rows=600):
    draws = np.random.default_rng(0)
    age, ward = draws.uniform(20, 90, rows), draws.integers(0, 3, rows)
    ill = (age + 20 * (ward == 2) + draws.normal(0, 10, rows)) > 75
    table = pa.table({"age": age, "ward": [("a", "b", "c")[w] for w in ward], "readmitted": ill})
    pq.write_table(table, directory / "visits.parquet")


@pytest.fixture
def own(tmp_path, monkeypatch):
    write_visits(tmp_path)
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "search.py").write_text(SEARCH, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def described(draft):
    """What a person fills in."""
    head, _, rest = draft.partition("low =\nhigh =\n# missing")
    filled = f"{head}low = 18\nhigh = 100\n# missing{rest}"
    target, _, features = filled.partition("values = []               # the classes")
    features = features.replace("values = []", 'values = ["a", "b", "c"]')
    return f"{target}values = [false, true]  # the classes{features}"


def test_from_a_parquet_file_to_a_verified_result(own, capsys):
    assert main(["describe", "visits.parquet", "--target", "readmitted"]) == 0
    (own / "visits.toml").write_text(described(capsys.readouterr().out), encoding="utf-8")
    assert main(["run", "search.py", "--storage", "runs/visits"]) == 0
    result = Result.load(own / "runs/visits")
    (trial,) = result.trials
    assert trial.state == "complete"
    assert {"auroc", "balanced_accuracy", "kappa", "minority_recall", "sensitivity", "specificity"} <= set(
        trial.metrics
    )
    assert trial.mean("auroc") > 0.6
    capsys.readouterr()
    assert main(["verify", "runs/visits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    definition = json.loads((own / "runs/visits/raydp.json").read_text(encoding="utf-8"))["definition"]
    assert definition["model"] == f"{own / 'nets.py'}:make"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "nets.py:mak"}, "Did you mean make"),
        ({"task": "classification:weights=1,2,3"}, "3 classes, one a weight"),
        ({"task": "classification:weights=1,x"}, "must list numbers"),
        ({"task": "nets.py:make"}, "must name a raydp.tasks.Task"),
    ],
)
def test_mistakes_are_named_before_anything_is_spent(own, capsys, change, message):
    main(["describe", "visits.parquet", "--target", "readmitted"])
    (own / "visits.toml").write_text(described(capsys.readouterr().out), encoding="utf-8")
    ((name, value),) = change.items()
    assert main(["run", "search.py", "--storage", "runs/visits", "--set", f"{name}={value}"]) == 2
    assert message in capsys.readouterr().err
    assert not (own / "runs/visits").exists()


def test_a_search_file_is_read_from_any_directory(own, capsys):
    main(["describe", "visits.parquet", "--target", "readmitted"])
    (own / "visits.toml").write_text(described(capsys.readouterr().out), encoding="utf-8")
    (search,) = load_searches(own / "search.py").values()
    assert search.model_name() == f"{own / 'nets.py'}:make"


TORCH = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from raydp.data import TorchData


def visits():
    draws = torch.Generator().manual_seed(0)
    x = torch.rand(500, 4, generator=draws) * 2 - 1
    y = (x[:, 0] + x[:, 1] > 0).long()
    return TorchData(train=TensorDataset(x[:400], y[:400]), test=TensorDataset(x[400:], y[400:]), classes=2)


def net(input_shape, outputs):
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.Tanh(), nn.Linear(8, outputs))
"""


def torch_search(**changes):
    values = {"space": {"learning_rate": tune.loguniform(0.5, 2.0)}, "fixed": {"epochs": 3, "batch_size": 64}}
    return small_search(**{**values, "method": "dp_sgd", "trials": 1, **changes})


def test_a_torch_data_set_and_a_network_given_as_functions(own, monkeypatch):
    (own / "mine.py").write_text(TORCH, encoding="utf-8")
    monkeypatch.syspath_prepend(own)
    mine = importlib.import_module("mine")
    search = torch_search(data=mine.visits, model=mine.net)
    assert (search.data, search.model) == (f"{own / 'mine.py'}:visits", f"{own / 'mine.py'}:net")
    check(search)
    drive(session_in(own / "run", search))
    (trial,) = Result.load(own / "run").trials
    assert trial.state == "complete" and trial.mean("accuracy") > 0.6
    assert verify(own / "run")["ok"]
    again = Search.from_json(json.loads((own / "run/raydp.json").read_text(encoding="utf-8"))["definition"])
    assert again.data_source == search.data and data.load(again.data).summary.startswith("400 private and 100")


def test_functions_that_other_processes_cannot_import(own):
    def inner():
        return None

    for function in (lambda: None, inner):
        with pytest.raises(InvalidValue, match=r"cannot be imported by other processes.*%%writefile"):
            torch_search(data=function)
    script = own / "script.py"
    script.write_text(
        TORCH + "import raydp\nraydp.Search(name='x', data=visits, budget=raydp.Budget(epsilon=1, "
        "delta=1e-5), space={})\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert "data = 'visits': stands in the program that runs" in done.stderr


def test_a_search_file_names_its_own_functions(own):
    text = TORCH + SEARCH.replace('"visits.toml"', "visits").replace('"nets.py:make"', "net")
    (own / "search.py").write_text(text, encoding="utf-8")
    (search,) = load_searches(own / "search.py").values()
    assert search.data_source == f"{own / 'search.py'}:visits"
    check(search)


TASKS = """
from raydp.tasks import Classification


class NoMetric(Classification):
    name = "no_metric"

    def evaluate(self, model, held_out):
        return dict.fromkeys(super().evaluate(model, held_out), float("nan"))


class Fails(Classification):
    name = "fails"

    def loss(self, outputs, targets):
        raise RuntimeError("no such thing")


class Vanishes(Classification):
    name = "vanishes"

    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * float("nan")
"""


@pytest.fixture
def torch_files(own):
    (own / "mine.py").write_text(TORCH, encoding="utf-8")
    (own / "tasks.py").write_text(TASKS, encoding="utf-8")
    return {"data": str(own / "mine.py:visits"), "model": str(own / "mine.py:net")}


def test_metrics_that_are_not_finite_are_a_diverged_trial_that_can_be_read_and_verified(own, torch_files):
    search = torch_search(**torch_files, task="tasks.py:NoMetric", reports=2)
    drive(session_in(own / "run", search))
    result = Result.load(own / "run")
    assert [trial.state for trial in result.trials] == ["diverged"] and result.best is None
    assert result.trials[0].reason == "a metric is missing or not finite"
    assert verify(own / "run")["ok"]
    assert "NaN" not in (own / "run/trials/t0000/seed-0/metrics.jsonl").read_text(encoding="utf-8")
    assert report.write([result], own / "report.html", pictures=False)
    assert result.plot_steps("t0000")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Fails", "fails on made-up examples of shape .*RuntimeError: no such thing"),
        ("Vanishes", r"gradients that are not finite.*Look for a logarithm"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_named_before_anything_is_spent(own, torch_files, task, message):
    with pytest.raises(InvalidValue, match=rf"task = '.*tasks\.py:{task}, .*{message}"):
        check(torch_search(**torch_files, task=f"tasks.py:{task}"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("lambda d, o: nn.Linear(d[0], o + 1)", r"returns \(3, 3\) for 3 examples, and the targets need \(3, 2\)"),
        ("lambda d, o: Unused(d[0], o)", r"'spare\.weight, spare\.bias': get no gradient"),
    ],
)
def test_models_that_do_not_suit_are_named_before_anything_is_spent(own, torch_files, model, message):
    unused = (
        "class Unused(nn.Linear):\n    def __init__(self, d, o):\n        super().__init__(d, o)\n"
        "        self.spare = nn.Linear(2, 2)\n"
    )
    (own / "models.py").write_text(f"from torch import nn\n{unused}\nmake = {model}\n", encoding="utf-8")
    with pytest.raises(InvalidValue, match=message):
        check(torch_search(**{**torch_files, "model": "models.py:make"}))
