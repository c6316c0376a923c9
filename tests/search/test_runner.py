"""What is refused before a run directory is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.search import runner
from raydp.search.definition import Resources
from raydp.search.run_directory import RunDirectory
from tests.search.helpers import session_in, small_search


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray as it is where nothing runs, with one small node once it is started."""

    def init(address: str | None = None, **_: Any) -> None:
        if address is not None:
            raise ConnectionError(f"Could not find any running Ray instance at {address}")

    monkeypatch.setattr(runner.ray, "init", init)
    monkeypatch.setattr(runner.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(runner.ray, "shutdown", lambda: None)
    monkeypatch.setattr(runner.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])


def test_an_address_without_a_cluster_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="must be a running Ray cluster"):
        small_search().run(storage=tmp_path / "run", address="10.0.0.1:6379", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_fits_no_node_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"1 worker of 3 CPU \+ 0 GPU a trial.*2 CPU \+ 0 GPU"):
        small_search(resources=Resources(cpus_per_worker=3)).run(storage=tmp_path / "run", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_more_workers_than_the_cluster_has_room_for_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"3 workers of 1 CPU \+ 0 GPU a trial.*room for 2 such workers"):
        small_search(resources=Resources(num_workers=3)).run(storage=tmp_path / "run", quiet=True)
    with pytest.raises(InvalidValue, match="There are no GPUs"):
        small_search(resources=Resources(gpus_per_worker=0.5)).run(storage=tmp_path / "run", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_an_earlier_version_holds_the_same_search(tmp_path: Path) -> None:
    search = small_search(resources=Resources(cpus_per_worker=2))
    definition = search.to_json()
    earlier = {"cpus_per_trial": 2, "gpus_per_trial": 0.0, "max_concurrent": None, "total_cpus": None, "retries": 2}
    RunDirectory.create(tmp_path / "run", {**definition, "resources": earlier})
    same = runner._same_search(tmp_path / "run", definition)
    assert same is not None
    assert runner.stored_search(same).resources == search.resources


def test_a_tracker_that_is_no_server_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="must be a server or a database"):
        small_search().run(storage=tmp_path / "run", tracking_uri=str(tmp_path / "mlruns"), quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"metric": [], "mode": []}, {"space": {}}, {"budget": 3}, {"resources": None}])
def test_a_stored_definition_that_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    definition = {**small_search().to_json(), **change}
    with pytest.raises(CorruptFile, match="damaged"):
        runner.stored_search(RunDirectory(tmp_path, {"definition": definition}))


def test_a_session_that_cannot_go_on_ends_the_search_instead_of_breaking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong while a proposal is planned (a full disk, accountants that disagree) is the search's end."""
    session = session_in(tmp_path / "run", small_search())

    def broken() -> None:
        raise RaydpError("accountants contradict each other")

    monkeypatch.setattr(session, "next_task", broken)
    assert runner._Proposals(session).suggest("any") == Searcher.FINISHED
    assert session.failure == "accountants contradict each other"
