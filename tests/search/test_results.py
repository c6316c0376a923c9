import functools
import math

import pyarrow.parquet as pq
import pytest

from raydp.errors import CorruptFile, InvalidValue
from raydp.privacy import accountants
from raydp.privacy.accountants.rdp import RunningRdp
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.ledger import LedgerWriter
from raydp.privacy.mechanism import Mechanism, PhaseSpec
from raydp.privacy.plan import Interval
from raydp.search.records import TrialRecord
from raydp.search.results import Result, write_trials_parquet
from raydp.search.run_directory import RunDirectory

BUDGET = Budget(epsilon=1.0, delta=1e-5)
DEFINITION = {"name": "mine", "method": "dp_sgd", "metric": "accuracy", "mode": "max", "budget": BUDGET.to_json()}


@functools.cache
def plan_of(steps):
    return calibrate(
        budget=BUDGET,
        phases=[
            PhaseSpec(name="warmup", steps=5, batch_size=50, population=1000, clip_norm=1.0, share=0.5),
            PhaseSpec(name="sparse", steps=steps, batch_size=50, population=1000, clip_norm=0.5),
        ],
    )


def execute(directory, key, seed, plan, steps=None):
    """Write the ledger of a run that executed the whole plan, or its first steps."""
    run = directory.run_path(key, seed)
    run.mkdir(parents=True)
    left = plan.steps if steps is None else steps
    with LedgerWriter(run / "ledger.jsonl", plan) as ledger:
        for phase in plan.phases:
            for step in range(min(left, phase.steps)):
                ledger.record(phase.name, step)
                if step % 3 == 0:
                    ledger.commit()
            left -= min(left, phase.steps)


def trial(directory, number, values, *, steps=20, state="complete", config=None, metric="accuracy", executed=None):
    plan = plan_of(steps)
    key = f"t{number:04d}"
    directory.write_json(f"trials/{key}/plan.json", plan.to_json())
    event = {"event": "proposed", "key": key, "number": number, "config": config or {"lr": 0.1}, "plan": plan.digest}
    directory.append(event)
    directory.append({"event": "started", "key": key, "attempt": 1})
    for seed in range(len(values)):
        execute(directory, key, seed, plan, executed)
    directory.append(
        {
            "event": "finished",
            "key": key,
            "state": state,
            "reason": None if state == "complete" else "because",
            "metrics": {metric: values},
            "seconds": 1.5,
            "epsilon": {name: interval.to_json() for name, interval in plan.certificate.items()},
            "measured_on": "public hold-out",
        }
    )


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", DEFINITION)


def test_best_is_the_best_mean_of_the_complete_trials(directory):
    trial(directory, 0, [0.7, 0.9])
    trial(directory, 1, [0.81, 0.81])
    trial(directory, 2, [0.99], state="failed")
    trial(directory, 3, [0.81, 0.81])
    trial(directory, 4, [0.9, None])
    result = Result.load(directory.path)
    assert result.best.key == "t0001"  # the earlier of two equals; neither the failed one nor half a one
    assert result.epsilon_trial == plan_of(20).epsilon
    text = result.summary().splitlines()
    assert "4 complete, 1 failed" in text[0] and "0.81 ± 0" in text[1] and text[3] == "measured on: public hold-out"
    assert text[-2].startswith("epsilon of the trial: ") and "by pld" in text[-2] and "target 1" in text[-2]
    assert text[-1].startswith("epsilon of the whole search: ")
    assert text[-1].endswith("(all that ran: 9 runs)")


def test_best_of_a_metric_to_be_minimised(directory):
    definition = {**DEFINITION, "metric": ["loss"], "mode": ["min"]}
    directory = RunDirectory.create(directory.path.parent / "other", definition)
    trial(directory, 0, [0.7], metric="loss")
    trial(directory, 1, [0.2], metric="loss")
    assert Result.load(directory.path).best.key == "t0001"


def test_epsilon_of_the_search_is_the_composition_of_every_executed_step(directory):
    """Failed and unfinished trials count, seeds count, and a run that was cut short counts as far as it came."""
    trial(directory, 0, [0.7, 0.9], steps=20)
    trial(directory, 1, [0.8], steps=30, state="failed", executed=11)
    execute(directory, "t0009", 0, plan_of(20), steps=7)  # its trial is not in the journal
    warmup, sparse = plan_of(20).mechanisms
    other, long = plan_of(30).mechanisms
    expected = accountants.epsilon(
        [
            warmup,
            sparse,
            sparse,
            warmup,
            other,
            Mechanism(noise_multiplier=long.noise_multiplier, sample_rate=long.sample_rate, steps=6),
            warmup,
            Mechanism(noise_multiplier=sparse.noise_multiplier, sample_rate=sparse.sample_rate, steps=2),
        ],
        delta=BUDGET.delta,
    )
    result = Result.load(directory.path)
    assert result.runs == 4
    assert result.epsilon_search.upper == pytest.approx(expected.upper, rel=1e-4)
    assert result.epsilon_search.lower <= expected.upper and expected.lower <= result.epsilon_search.upper
    assert BUDGET.epsilon < result.epsilon_search.upper < 4 * BUDGET.epsilon
    spending = RunningRdp()
    (everything,) = result.compositions
    spending.add(everything)
    quick = spending.epsilon(delta=BUDGET.delta, adjacency=BUDGET.adjacency)
    assert quick.accountant == "rdp" and quick.upper >= result.epsilon_search.lower


def test_the_stated_epsilon_is_rounded_up(directory):
    trial(directory, 0, [0.7])
    result = Result.load(directory.path)
    for line, interval in zip(
        result.summary().splitlines()[-2:], (result.epsilon_trial, result.epsilon_search), strict=True
    ):
        stated = float(line.split(": ")[1].split(" ")[0])
        assert interval.upper <= stated <= interval.upper * (1 + 1e-5)


def test_nothing_ran(directory):
    result = Result.load(directory.path)
    assert result.best is None and result.epsilon_trial is None and result.epsilon_search.upper == 0
    assert "none" in result.summary().splitlines()[-2] and result.summary().endswith("0 runs)")
    assert result.to_pandas().empty and result.pareto == ()


def test_a_damaged_ledger_counts_as_its_whole_plan(directory):
    trial(directory, 0, [0.7], executed=3, state="failed")
    (directory.run_path("t0000", 0) / "ledger.jsonl").write_text("garbage\n")
    with pytest.warns(UserWarning, match="whole plan of t0000"):
        result = Result.load(directory.path)
    assert result.epsilon_search.upper == pytest.approx(plan_of(20).epsilon.upper, rel=1e-4)
    (directory.trial_directory("t0000") / "plan.json").unlink()
    with pytest.raises(CorruptFile, match="t0000"):
        Result.load(directory.path)


def record(number, **metrics):
    values = {name: (value,) for name, value in metrics.items()}
    interval = Interval(lower=0.5, estimate=0.6, upper=0.7 + number / 100, accountant="pld")
    return TrialRecord(key=f"t{number:04d}", number=number, state="complete", metrics=values, epsilon={"pld": interval})


def test_several_objectives(tmp_path):
    definition = {**DEFINITION, "metric": ["accuracy", "loss"], "mode": ["max", "min"]}
    trials = [
        record(0, accuracy=0.9, loss=0.5),
        record(1, accuracy=0.8, loss=0.1),
        record(2, accuracy=0.8, loss=0.2),  # beaten by 1
        record(3, accuracy=0.9, loss=0.5),  # as good as 0
        record(4, accuracy=0.99),  # lacks an objective
    ]
    result = Result(directory=tmp_path, search=definition, trials=tuple(trials))
    assert [trial.key for trial in result.pareto] == ["t0000", "t0001", "t0003"]
    assert result.epsilon_trial.upper == pytest.approx(0.73)
    with pytest.raises(InvalidValue, match="pareto"):
        _ = result.best
    assert result.to_json()["best"] is None and "Pareto" in result.summary()
    with pytest.raises(InvalidValue, match="mode"):
        _ = Result(directory=tmp_path, search={**definition, "mode": ["max"] * 3}, trials=()).objectives


def test_table(directory):
    trial(directory, 0, [0.7, 0.9], config={"lr": 0.5, "mixed": 1, "flag": True, "big": 2**70, "whole": 1})
    trial(directory, 1, [math.nan], config={"lr": 2, "mixed": "one", "flag": False, "big": 1}, state="diverged")
    directory.append({"event": "infeasible", "key": "t0002", "number": 2, "config": {"lr": 9}, "reason": "no room"})
    path = write_trials_parquet(directory.path)
    assert path == directory.path / "trials.parquet" and not list(directory.path.glob(".trials*"))
    table = pq.read_table(path)
    epsilon = [f"epsilon.{name}.{bound}" for name in ("pld", "prv", "rdp") for bound in ("lower", "estimate", "upper")]
    assert table.column_names == [
        *["key", "state", "reason", "number", "attempts", "seconds"],
        *["config.big", "config.flag", "config.lr", "config.mixed", "config.whole"],
        *["metric.accuracy.mean", "metric.accuracy.std", "metric.accuracy.values"],
        *epsilon,
        *["target_epsilon", "delta", "adjacency", "measured_on"],
    ]
    columns = table.to_pydict()
    assert columns["state"] == ["complete", "diverged", "infeasible"]
    assert columns["config.lr"] == [0.5, 2.0, 9.0]
    assert columns["config.mixed"] == ["1", "one", None]
    assert columns["config.flag"] == [True, False, None]
    assert columns["config.big"] == [str(2**70), "1", None]
    assert columns["config.whole"] == [1, None, None]
    assert columns["metric.accuracy.mean"] == [pytest.approx(0.8), None, None]
    assert columns["metric.accuracy.values"] == [[0.7, 0.9], [None], None]
    assert columns["epsilon.pld.upper"][0] == plan_of(20).epsilon.upper and columns["epsilon.pld.upper"][2] is None
    assert columns["attempts"] == [1, 1, 0]
    frame = Result.load(directory.path).to_pandas()
    assert list(frame.columns) == table.column_names and frame["config.whole"].tolist()[0] == 1
    assert str(frame["config.whole"].dtype) == "Int64"
    assert write_trials_parquet(directory) == path  # again, over the old one


def test_notebook_table_is_escaped(directory):
    trial(directory, 0, [0.7], config={"name": "<script>"})
    text = Result.load(directory.path)._repr_html_()
    assert "&lt;script&gt;" in text and "<script>" not in text
    assert "epsilon of the trial" in text and "epsilon of the whole search" in text
    assert "measured on: public hold-out" in text
    assert "1 complete" in repr(Result.load(directory.path))


def test_notebook_table_says_how_many_it_leaves_out(directory):
    for number in range(12):
        trial(directory, number, [number / 20])
    text = Result.load(directory.path)._repr_html_()
    assert text.count("<tr>") == 11 and "and 2 more: result.to_pandas()" in text
    assert text.index("t0011") < text.index("t0002")  # the best first


def test_insecure_noise_is_shown_wherever_the_result_is(tmp_path):
    result = Result(directory=tmp_path, search={**DEFINITION, "insecure_seed": 0}, trials=())
    for text in (result.summary(), result._repr_html_()):
        assert "nothing here is private" in text
    assert result.to_json()["insecure"] is True
    assert "INSECURE" not in Result(directory=tmp_path, search=DEFINITION, trials=()).summary()
