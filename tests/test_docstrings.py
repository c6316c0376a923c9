"""The examples in docstrings run as they stand, and everything that a user touches has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raydp
from raydp import data, geometry, methods, models, privacy, tasks
from raydp.data import drafts
from raydp.geometry import clamping, clipping
from raydp.privacy import gaussian, selection, selection_budget, stopping
from raydp.search import comparison
from raydp.search.results import Result
from tests.search.synthetic import methods_run

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
SKIPPED = ("search.run()", "raydp.resume(")  # these would train; tests/test_readme.py does

#: What a user calls or constructs. Private steps that only methods and training take are not among it.
PUBLIC = {
    raydp: raydp.__all__,
    privacy: [
        "Interval",
        "LedgerWriter",
        "Mechanism",
        "NoiseKey",
        "PhaseSpec",
        "calibrate",
        "epsilon",
        "poisson_sample",
    ],
    gaussian: ["by_adjacency", "epsilon", "noise_multiplier"],
    selection: ["Composition", "Public", "RandomStopping", "Subsample", "parse"],
    stopping: ["NegativeBinomial", "Poisson"],
    selection_budget: ["trial_budget"],
    tasks: ["Classification", "Denoising", "Regression", "Task", "cross_entropy_sum", "task"],
    data: ["PrivateData", "PublicData", "catalogue", "is_family", "load", "load_public", "task_of"],
    drafts: ["draft"],
    methods: ["method"],
    models: ["build_model"],
    geometry: ["Diagonal", "Identity", "Subspace", "Support", "Whitening", "support_size", "top_k"],
    clamping: ["ClampingSchedule", "safe_floor"],
    clipping: ["clip"],
    comparison: ["method_differences"],
}


def modules() -> Iterator[str]:
    """Every module of raydp but what runs when it is imported."""
    yield "raydp"
    for found in pkgutil.walk_packages(raydp.__path__, "raydp."):
        if not found.name.endswith("__main__"):
            yield found.name


def examples(module: str) -> list[doctest.DocTest]:
    """The docstrings of a module that have examples. Each starts with nothing but what its reader types."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(importlib.import_module(module), module, globs={"__name__": "__main__"})
    return [test for test in found if test.examples]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The result that docstrings speak of, which takes no training."""
    return Result.load(methods_run(tmp_path_factory.mktemp("docstrings") / "run"))


@pytest.mark.parametrize(
    "test", [pytest.param(test, id=test.name) for module in modules() for test in examples(module)]
)
def test_an_example_does_what_it_says(
    test: doctest.DocTest, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in test.examples:
        assert doctest.SKIP not in example.options or any(part in example.source for part in SKIPPED), example.source
    said: list[str] = []
    test.globs["result"] = result
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize(
    ("home", "name"),
    [pytest.param(home, name, id=f"{home.__name__}.{name}") for home in PUBLIC for name in PUBLIC[home]],
)
def test_what_a_user_touches_has_an_example(home: Any, name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(home, name)) or ""), f"{home.__name__}.{name} has no example"
