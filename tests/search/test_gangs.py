"""Trials of several workers are the trials of one worker, and leave nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import tune

from raydp import cli
from raydp.privacy.ledger import Ledger
from raydp.search.definition import Resources, Search
from raydp.search.results import Result
from raydp.search.run_directory import RunDirectory
from raydp.search.verify import verify
from tests.search.helpers import drive, session_in, small_search

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_cores() -> Iterator[None]:
    """A cluster that stays when a search ends, as a person's own would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # Ray lets its workers wait for everything else
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


def _free_cores() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def _search(workers: int) -> Search:
    return small_search(
        space={"learning_rate": tune.grid_search([0.5, 1e30])},
        fixed={"epochs": 1, "batch_size": 256, "weight_decay": 1.0},
        trials=2,
        sampler="grid",
        insecure_seed=7,
        resources=Resources(num_workers=workers, time_limit=200.0),
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_workers_do_what_one_does_and_give_everything_back(two_cores: None, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    drive(session_in(alone, _search(1)))
    _search(2).run(storage=together, quiet=True)
    assert _free_cores() == 2.0  # at once: the next search must not wait
    one, two = RunDirectory.open(alone), RunDirectory.open(together)
    for key, expected in one.records().items():
        found = two.records()[key]
        assert (found.state, found.attempts) == (expected.state, 1)
        assert found.epsilon == expected.epsilon
        ledgers = [Ledger.read(directory.run_path(key, 0) / "ledger.jsonl") for directory in (one, two)]
        assert ledgers[0] == ledgers[1]
        assert set(found.metrics) == set(expected.metrics)
        for name, values in expected.metrics.items():
            assert found.metrics[name] == pytest.approx(values, abs=1e-3), name
    assert sorted(record.state for record in two.records().values()) == ["complete", "diverged"]
    assert not list(two.secrets.iterdir())
    assert not [path for path in two.path.rglob("*") if path.name.startswith(("workers-", "hang"))]
    assert [problem.partition(":")[0] for problem in verify(together)["problems"]] == ["INSECURE"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_commands_of_the_readme(two_cores: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Many workers")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("raydp ")]
    assert [line.split()[1] for line in lines] == ["plan", "run"]
    for line in lines:
        arguments = [str(ROOT / part) if part.startswith("searches/") else part for part in line.split()[1:]]
        if arguments[0] == "run":
            arguments += ["--storage", str(tmp_path / "run")]
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        if arguments[0] == "plan":
            assert "// 2 a trial" in capsys.readouterr().out
    result = Result.load(tmp_path / "run")
    assert [record.state for record in result.trials] == ["complete"]
    assert result.search["resources"]["num_workers"] == 2
    assert _free_cores() == 2.0
