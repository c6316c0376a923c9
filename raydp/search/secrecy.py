"""Random stopping in a run directory: a private store for all trials, and the release of the best one.

The number of trials, when each began, and all that lost are secrets of the driver. So the search runs in a run
directory of its own, ``private/`` (mode 0700), which no tracker, table or display sees; the public run directory holds
nothing until the end, and then one trial, under a key that says nothing about its place among the others.

What stays outside of the guarantee: whoever watches the machine while the search runs (its processes, Ray's own logs,
the clock) can guess the number of trials, and whoever reads the private store knows all of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydp.errors import CorruptFile
from raydp.privacy.budget import Budget
from raydp.privacy.noise import NoiseKey
from raydp.privacy.selection import RandomStopping
from raydp.search import holdout
from raydp.search.definition import Search
from raydp.search.records import TrialRecord, key_of
from raydp.search.run_directory import HELD, RunDirectory, trial_budget

STORE = "private"
_KEY = "selection.key"
#: What is released of the best run. Not error.txt, nor anything that a later version adds without thinking of this.
_RELEASED = ("ledger.jsonl", "metrics.jsonl", "weights.pt", "holdout.jsonl", holdout.LEDGER)


@dataclass(frozen=True, kw_only=True, repr=False)
class Terms:
    """What a session under random stopping knows and the definition does not say. Never shown, and kept by a key.

    Attributes:
        runs: K, the secret number of trials.
        sampler_seed: of the proposals. From the secret key as well: with a known seed, the proposals would be known
            in advance, and the trials no independent draws.
        budget: of each trial.
        holdout_budget: of what each trial releases of a private hold-out; None where it is not measured through noise.
        home: the public run directory, which messages may name.
    """

    runs: int
    sampler_seed: int
    budget: Budget
    home: Path
    holdout_budget: Budget | None = None


class SilentTracker:
    """Stands where a tracker stands, and tells nobody anything."""

    def trial_proposed(self, record: TrialRecord) -> None:
        """Nothing."""

    def trial_started(self, record: TrialRecord) -> None:
        """Nothing."""

    def trial_finished(self, record: TrialRecord) -> None:
        """Nothing."""

    def log_metrics(self, key: str, step: int, metrics: Mapping[str, float], *, seed: int = 0) -> None:
        """Nothing."""


def open_store(search: Search, home: RunDirectory) -> tuple[RunDirectory, Terms]:
    """The private store of a search that was not released yet, new or of an earlier driver, and its terms.

    K is a function of the store's key, so that a search that goes on has the number that it began with.

    Raises:
        CorruptFile: the store has lost its key, so that the number of trials is unknown.
    """
    rule = search.rule
    assert isinstance(rule, RandomStopping)
    path = home.path / STORE
    begun = (path / "raydp.json").exists()
    if begun:
        store = RunDirectory.open(path)
    else:
        path.mkdir(mode=0o700, exist_ok=True)
        os.chmod(path, 0o700)  # whatever the umask
        store = RunDirectory.create(path, search.to_json())
    key_file = store.secrets / _KEY
    if search.insecure_seed is not None:
        key = NoiseKey.insecure(search.insecure_seed)
    elif key_file.exists():
        key = NoiseKey.load(key_file)
    elif begun and store.events():
        raise CorruptFile(f"{key_file} is gone, and with it the number of trials. Start a new search.")
    else:
        key = NoiseKey.generate()
        key.save(key_file)
    budget = trial_budget(store)
    held = trial_budget(store, HELD)
    if budget is None:
        budget, held = search.trial_budget, holdout.budget_of_run(search)
        store.append(_selection(budget, held))
    seed = int(key.generator("selection", "proposals").integers(0, 1 << 62))
    return store, Terms(runs=rule.runs.draw(key), sampler_seed=seed, budget=budget, home=home.path, holdout_budget=held)


def _selection(budget: Budget, held: Budget | None) -> dict[str, Any]:
    """The event of the journal that states what each trial may spend."""
    event: dict[str, Any] = {"event": "selection", "trial_budget": budget.to_json()}
    if held is not None:
        event[HELD] = held.to_json()
    return event


def is_released(directory: RunDirectory) -> bool:
    """Whether the search has come to its end, and its store has been closed."""
    return any(event["event"] == "released" for event in directory.events())


def release(search: Search, store: RunDirectory, home: RunDirectory) -> None:
    """Copy the best trial from the store to the public run directory, and destroy the store unless it is to be kept.

    A trial that failed or diverged keeps its place with the worst score. When no trial is complete, nothing is
    released. Can be repeated after a crash at any point.
    """
    rule = search.rule
    assert isinstance(rule, RandomStopping)
    best = _best(search, store.records())
    done = {event["event"] for event in home.events()}
    if not done:
        home.stamp()  # that the search began long before its release would tell how long it took
    budget = trial_budget(store)
    if budget is not None and "selection" not in done:
        home.append(_selection(budget, trial_budget(store, HELD)))
    if best is not None:
        key = key_of(0)
        target = home.trial_directory(key)
        if "finished" not in done:
            _copy(store.trial_directory(best.key), target)
        assert best.plan is not None
        held = {} if best.holdout_plan is None else {"holdout_plan": best.holdout_plan}
        heads = {} if best.holdout_plan is None else {"holdout_heads": dict(best.holdout_heads)}
        events: list[dict[str, Any]] = [
            {"event": "proposed", "number": 0, "config": dict(best.config), "plan": best.plan.digest, **held},
            {"event": "started", "attempt": 1},
            {
                "event": "finished",
                "state": best.state,
                "reason": None,
                "metrics": {name: list(values) for name, values in best.metrics.items()},
                "seconds": None,
                "epsilon": {name: interval.to_json() for name, interval in best.epsilon.items()},
                "measured_on": best.measured_on,
                "heads": dict(best.heads),
                **heads,
            },
        ]
        for event in events:
            if event["event"] not in done:
                home.append({**event, "key": key})
    home.append({"event": "released", "trials": int(best is not None)})
    NoiseKey.destroy(store.secrets / _KEY)
    if not rule.keep_losers:
        shutil.rmtree(store.path)


def _best(search: Search, records: Mapping[str, TrialRecord]) -> TrialRecord | None:
    """The complete trial of the best score; of equals the first, which is a random one, for trials are exchangeable."""
    metric, sign = search.metrics[0], 1 if search.modes[0] == "max" else -1
    scored = [(record.mean(metric), record) for record in records.values() if record.state == "complete"]
    known = [(sign * score, record) for score, record in scored if score is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def _copy(source: Path, target: Path) -> None:
    """The files of a trial that are released; a copy that a crash cut short is made anew."""
    if target.exists():
        shutil.rmtree(target)
    run = target / "seed-0"
    run.mkdir(parents=True)
    for name in ("config.json", "plan.json", holdout.PLAN):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    for name in _RELEASED:
        if (source / "seed-0" / name).exists():
            shutil.copyfile(source / "seed-0" / name, run / name)


__all__ = ["STORE", "SilentTracker", "Terms", "is_released", "open_store", "release"]
