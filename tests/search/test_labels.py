"""A search over a table with several yes/no labels: measured, noised on a private hold-out, verified and replayed."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import tune

from raydp.errors import InvalidValue
from raydp.privacy.budget import Budget
from raydp.search import report, statement
from raydp.search.preview import preview
from raydp.search.results import Result
from raydp.search.runner import check
from raydp.search.verify import verify
from tests.search.helpers import drive, session_in, small_search

LABELS = 3


@pytest.fixture(scope="module")
def chest(tmp_path_factory):
    """Labels that follow from the inputs, of about half, a quarter and a tenth of the rows; no row occurs twice."""
    directory = tmp_path_factory.mktemp("chest")
    draws = np.random.default_rng(0)
    inputs = draws.uniform(-1, 1, (900, 8))
    scores = inputs @ draws.normal(0, 1, (8, LABELS))
    found = scores > np.quantile(scores, [0.5, 0.75, 0.9], axis=0).diagonal()
    for name, rows in (("train", slice(0, 600)), ("test", slice(600, None))):
        columns = {
            "vector": list(inputs[rows]),
            "findings": pa.array(found[rows].tolist(), pa.list_(pa.bool_(), LABELS)),
        }
        pq.write_table(pa.table(columns), directory / f"{name}.parquet")
    file = directory / "chest.toml"
    file.write_text(
        'train = "train.parquet"\ntest = "test.parquet"\n'
        '[target]\ncolumn = "findings"\nlabels = ["effusion", "mass", "nodule"]\n'
        "[features.vector]\nlow = -1\nhigh = 1\nlength = 8\n",
        encoding="utf-8",
    )
    return str(file)


def labelled(data, **changes):
    values = {
        "data": data,
        "method": "dp_sgd",
        "space": {"learning_rate": tune.loguniform(0.5, 4.0)},
        "fixed": {"epochs": 6, "batch_size": 128, "momentum": 0.9},
        "budget": Budget(epsilon=8.0, delta=1e-4),
        "trials": 2,
    }
    return small_search(**{**values, **changes})


def test_it_learns_and_is_verified_and_replayed(tmp_path: Path, chest: str) -> None:
    search = labelled(chest, metric="auroc", task="multilabel:weights=1,2,5")
    check(search)
    drive(session_in(tmp_path / "run", search))
    result = Result.load(tmp_path / "run")
    assert [trial.state for trial in result.trials] == ["complete", "complete"]
    best = result.best
    assert best is not None and best.mean("auroc") > 0.75
    assert {"accuracy", "exact_match", "average_precision", "recall", "minority_recall"} <= set(best.metrics)
    assert verify(tmp_path / "run")["ok"]
    assert "chest" in statement.text(statement.build(tmp_path / "run"))
    assert report.write([result], tmp_path / "report.html")


def test_a_private_hold_out_is_measured_through_noise(tmp_path: Path, chest: str) -> None:
    search = labelled(chest, metric="exact_match", holdout_budget=Budget(epsilon=2.0, delta=1e-4))
    check(search)
    drive(session_in(tmp_path / "run", search))
    result = Result.load(tmp_path / "run")
    assert all(set(trial.metrics) == {"exact_match"} for trial in result.trials)
    found = verify(tmp_path / "run")
    assert found["ok"] and found["holdout"]


def test_what_has_no_bound_is_not_measured_through_noise(chest: str) -> None:
    with pytest.raises(InvalidValue, match=r"'auroc': cannot be released.*bounded: accuracy, exact_match"):
        labelled(chest, metric="auroc", holdout_budget=Budget(epsilon=2.0, delta=1e-4))


def test_the_plan_times_it_and_other_tasks_and_models_are_refused(chest: str) -> None:
    assert preview(labelled(chest))["plans"]
    with pytest.raises(InvalidValue, match=r"3 labels.*needs classes"):
        check(labelled(chest, task="classification"))
    with pytest.raises(InvalidValue, match="4 labels, one a weight"):
        check(labelled(chest, task="multilabel:weights=1,1,1,1"))
    with pytest.raises(InvalidValue, match="none that dp_ngd can train"):
        check(labelled(chest, method="dp_ngd", space={"learning_rate": tune.loguniform(0.5, 4.0)}))
