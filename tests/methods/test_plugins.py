"""A method of one's own: a package of one file that is installed beside raydp, and searched like any other."""

import os
import subprocess
import sys

import pytest

from raydp.errors import InvalidValue, UnknownName
from raydp.methods import DpSgd, _loaded, _Methods

# The worked example of README.md.
DP_ADAMW = '''"""DP-AdamW: the private gradient through Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

from dataclasses import dataclass

import torch

from raydp import _validate
from raydp.methods import GradientHyperparameters, Method
from raydp.methods.base import option
from raydp.methods.dp_sgd import DensePolicy


@dataclass(frozen=True, kw_only=True)
class AdamWHyperparameters(GradientHyperparameters):
    decay: float = option(0.01, "decoupled weight decay, in units of the learning rate")

    def __post_init__(self):
        super().__post_init__()
        _validate.between("decay", self.decay, 0, 1)


class AdamWPolicy(DensePolicy):
    """Every coordinate is clipped and noised; what follows is a function of what was released, so it costs nothing."""

    def __init__(self, hyperparameters, setting):
        super().__init__(setting.sizes)
        self.decay, self.count = hyperparameters.decay, 0
        self.parameters = [p for p in setting.model.parameters() if p.requires_grad]
        self.first = [torch.zeros(size) for size in setting.sizes]
        self.second = [torch.zeros(size) for size in setting.sizes]

    def direction(self, phase, step, released):
        self.count += 1
        found = []
        for mean, square, weight, gradient in zip(self.first, self.second, self.parameters, released):
            mean.mul_(0.9).add_(gradient, alpha=0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            scaled = (mean / (1 - 0.9**self.count)) / ((square / (1 - 0.999**self.count)).sqrt() + 1e-8)
            found.append(scaled + self.decay * weight.detach().flatten())
        return found

    def state_dict(self):
        return {"count": self.count, "first": self.first, "second": self.second}

    def load_state_dict(self, state):
        self.count, self.first, self.second = state["count"], state["first"], state["second"]


class DpAdamW(Method):
    name = "dp_adamw"
    summary = "DP-SGD's private gradient through AdamW"
    hyperparameters = AdamWHyperparameters

    def policy(self, hyperparameters, setting):
        return AdamWPolicy(hyperparameters, setting)
'''
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "dp-adamw-for-raydp"
version = "1.0"

[project.entry-points."raydp.methods"]
dp_adamw = "dp_adamw:DpAdamW"

[tool.setuptools]
py-modules = ["dp_adamw"]
"""
SEARCH = """
from ray import tune
import raydp

search = raydp.Search(
    name="adamw",
    method="dp_adamw",
    data="digits",
    budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={"learning_rate": tune.loguniform(0.005, 0.02)},
    fixed={"epochs": 3, "batch_size": 128},
    trials=1,
    reports=3,
    resources=raydp.Resources(total_cpus=1),
)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package as pip installs it, in a folder of its own."""
    source, site = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("site")
    (source / "dp_adamw.py").write_text(DP_ADAMW, encoding="utf-8")
    (source / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(source)], check=True, capture_output=True)
    return site


@pytest.mark.slow
def test_an_installed_method_is_listed_searched_and_verified(installed, tmp_path):
    (tmp_path / "search.py").write_text(SEARCH, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{installed}:{':'.join(p for p in sys.path if p)}"}

    def raydp(*arguments):
        command = [sys.executable, "-m", "raydp", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "decay" in raydp("methods", "dp_adamw")
    assert "dp_adamw" in raydp("methods")
    raydp("run", "search.py", "--storage", "run")
    assert "ok" in raydp("verify", "run")


class _Point:
    def __init__(self, name, found):
        self.name, self.value, self.found = name, f"somewhere:{name}", found

    def load(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("other", DpSgd, "must have the name 'other'"),
        ("other", int, "must be a raydp.methods.Method"),
        ("other", ImportError("no torchopt"), "cannot be loaded: ImportError: no torchopt"),
    ],
)
def test_packages_that_do_not_keep_to_it_are_named(name, found, message):
    with pytest.raises(InvalidValue, match=message):
        _loaded(_Point(name, found))


def test_a_name_that_is_taken_is_refused(monkeypatch):
    monkeypatch.setattr("raydp.methods.entry_points", lambda group: [_Point("dp_sgd", DpSgd)])
    with pytest.raises(InvalidValue, match="is the name of another method"):
        _Methods((DpSgd(),))["tp_topk"]


def test_near_names_include_those_of_packages(monkeypatch):
    monkeypatch.setattr("raydp.methods.entry_points", lambda group: [_Point("dp_adamw", DpSgd)])
    known = _Methods((DpSgd(),))
    assert list(known) == ["dp_sgd", "dp_adamw"] and len(known) == 2 and "dp_adamw" in known
    with pytest.raises(UnknownName, match="Did you mean dp_adamw"):
        known["dp_adamv"]
