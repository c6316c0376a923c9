"""Small searches on the bundled digits, driven without Ray where Ray is not the point."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ray import tune

from raydp.privacy.budget import Budget
from raydp.search.definition import Search
from raydp.search.display import Display
from raydp.search.run_directory import RunDirectory
from raydp.search.session import Session
from raydp.search.trainable import outcomes


def small_search(**changes: Any) -> Search:
    """A search whose trials train for a second."""
    values: dict[str, Any] = {
        "name": "small",
        "method": "tp_topk",
        "data": "digits",
        "model": "mlp",
        "budget": Budget(epsilon=3.0, delta=1e-5),
        "space": {"learning_rate": tune.loguniform(0.1, 4.0), "warmup_share": tune.uniform(0.2, 0.5)},
        "fixed": {"epochs": 1, "batch_size": 256},
        "trials": 3,
        "sampler": "random",
        "reports": 2,
    }
    return Search(**{**values, **changes})


class NullTracker:
    """Keeps what a session tells its tracker. (The real one has tests of its own and runs end to end.)"""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def trial_proposed(self, record: Any) -> None:
        self.told.append(("proposed", record.key))

    def trial_started(self, record: Any) -> None:
        self.told.append(("started", record.key))

    def trial_finished(self, record: Any) -> None:
        self.told.append((record.state, record.key))

    def log_metrics(self, key: str, step: int, metrics: Mapping[str, float], *, seed: int = 0) -> None:
        self.told.append(("metrics", key))


def session_in(path: Path, search: Search) -> Session:
    """A session on a new run directory, or on the one that is there."""
    if (path / "raydp.json").exists():
        directory = RunDirectory.open(path)
    else:
        directory = RunDirectory.create(path, search.to_json())
    display = Display(trials=search.trials, metric=search.metrics, quiet=True)
    return Session(search, directory, tracker=NullTracker(), display=display)  # type: ignore[arg-type]


def drive(session: Session, *, change: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None) -> list[str]:
    """Run everything that the session hands out, one trial after the other, as a driver with one process would.

    Args:
        change: (key, last item of a trial) -> the item that the session is told instead.

    Returns:
        The keys that were run.
    """
    keys = []
    while (task := session.next_task()) is not None:
        keys.append(task.key)
        session.started(task.key)
        for item in outcomes(task):
            if not item["done"]:
                session.progressed(task.key, item)
            else:
                session.finished(task.key, item if change is None else change(task.key, item))
    session.close()
    return keys


def contents(root: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of everything below a directory, tables and databases included."""
    for path in sorted(root.rglob("*")):
        if path.suffix == ".parquet":
            yield path.name, str(pq.read_table(path).to_pylist())
        elif path.suffix == ".db":
            with sqlite3.connect(path) as database:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    yield f"{path.name}: {table}", str(database.execute(f'SELECT * FROM "{table}"').fetchall())
        elif path.is_file() and path.suffix != ".pt":  # weights are what was released
            yield str(path.relative_to(root)), path.read_text(encoding="utf-8")
