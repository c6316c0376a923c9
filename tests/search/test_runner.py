"""What is refused before a run directory is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.utils import check_version_info
from ray.tune.search import Searcher

from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.search import autoscaler, connection, runner
from raydp.search.capacity import Node
from raydp.search.definition import Resources
from raydp.search.run_directory import RunDirectory
from tests.search.helpers import session_in, small_search


class Machines:
    """Ray as it is where nothing runs; once it is started, there are these nodes."""

    def __init__(self) -> None:
        self.nodes = [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 2.0}}]
        self.possible: list[Node] = []
        self.grow = False
        self.refusal = "Could not find any running Ray instance"

    def init(self, address: str | None = None, **_: Any) -> None:
        """Without an address, Ray takes whatever cluster runs on this machine, and refuses its number of cores."""
        if address != "local" and self.refusal:
            kind = RuntimeError if "Version" in self.refusal else ConnectionError
            raise kind(self.refusal)


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines()
    monkeypatch.setattr(ray, "init", found.init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: found.nodes)
    monkeypatch.setattr(connection, "_possible_nodes", lambda: found.possible)
    monkeypatch.setattr(autoscaler, "present", lambda: found.grow)
    return found


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


def test_an_autoscaler_is_taken_at_its_word(machines: Machines) -> None:
    search = small_search(resources=Resources(num_workers=4))
    with pytest.raises(InvalidValue, match="room for 2 such workers"):
        connection.concurrency(search)
    machines.possible = [Node(cpus=4, count=3), Node(cpus=0)]
    assert connection.concurrency(search) == 3
    machines.possible = [Node(cpus=1)]
    with pytest.raises(InvalidValue, match="room for 2 such workers"):
        connection.concurrency(search)
    machines.grow = True  # one that does not say what it may add
    assert connection.concurrency(search) == 1


def test_a_cluster_of_other_versions_is_refused_by_name(tmp_path: Path, machines: Machines) -> None:
    with pytest.raises(RuntimeError) as ray_says:  # its own words, so that a change of them is noticed
        check_version_info({"ray_version": "1.0.0", "python_version": "3.8.1"}, "10.0.0.2")
    machines.refusal = str(ray_says.value)
    with pytest.raises(InvalidValue, match=rf"it has Ray: 1.0.0, Python: 3.8.1; .* Ray: {ray.__version__}, Python: 3"):
        small_search().run(storage=tmp_path / "run", address="10.0.0.1:6379", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", [None, "sqlite:////somewhere/mlflow.db"])
def test_a_file_of_several_machines_is_no_tracker(tmp_path: Path, machines: Machines, uri: str | None) -> None:
    machines.nodes.append({"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 2.0}})
    machines.refusal = ""
    with pytest.raises(InvalidValue, match=r"must be a server for a cluster of 2 machines.*mlflow server"):
        small_search().run(storage=tmp_path / "run", address="auto", tracking_uri=uri, quiet=True)
    assert list(tmp_path.iterdir()) == []
    with connection.connected(small_search(), "auto", tracking_uri="http://10.0.0.1:5000"):
        assert connection.concurrency(small_search()) == 4
    machines.nodes[1]["Alive"] = False
    with connection.connected(small_search(), "auto", tracking_uri=uri):
        assert connection.concurrency(small_search()) == 2


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
