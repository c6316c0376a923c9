"""Tuning on a secret subsample in a search: which part a run sees, how the final run is made, what all of it costs.

The trials of the search train on the subsample, under plans for its expected size. When all of them are finished, the
config of the best one is carried over to the final run, a trial of its own that the journal marks as final. Whoever is
in the subsample is decided by a key in the secrets of the run directory, which is destroyed after the final run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydp import data
from raydp.errors import InvalidValue, RaydpError
from raydp.methods.base import Hyperparameters, Scalar
from raydp.privacy import selection
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.noise import NoiseKey
from raydp.privacy.selection import Subsample
from raydp.privacy.selection_bounds import Bound
from raydp.privacy.selection_subsample import subsample_bound
from raydp.search.records import TrialRecord
from raydp.search.run_directory import RunDirectory
from raydp.search.spending import executed_runs, merged

if TYPE_CHECKING:
    from raydp.search.definition import Search

KEY = "subsample.key"
#: Expected numbers of examples, which are whole ones, so they grow with the number of examples.
_SIZES = ("batch_size", "curvature_batch_size")
#: Of updates by an average of gradients, whose noise shrinks as the batch grows.
_RATES = ("learning_rate", "sparse_learning_rate")


def check_definition(search: Search) -> None:
    """Refuse what would void the bound, as far as the definition tells.

    Raises:
        InvalidValue: names the field, and says why.
    """
    because = "would void tuning on a subsample, whose bound"
    rules: tuple[tuple[str, Any, bool, str, str], ...] = (
        (
            "paired",
            search.paired,
            not search.paired,
            f"{because} asks for noise of the final run that no trial had",
            "Set paired=False, or selection='composition'.",
        ),
        (
            "metric",
            search.metrics,
            len(search.metrics) == 1,
            "must be one metric: the config of one best trial is carried over to the final run, not a Pareto set",
            "Name one metric, or set selection='composition'.",
        ),
        (
            "accountant",
            search.accountant,
            search.accountant == "pld",
            "has no privacy profile, from which the cost of tuning on a subsample is computed",
            "Set accountant='pld'.",
        ),
        (
            "selection",
            search.rule.rule,
            not data.is_family(search.data),
            f"is for one private set, and {search.data!r} is a family of them",
            "Set selection='composition'.",
        ),
    )
    for name, value, holds, rule, remedy in rules:
        if not holds:
            raise InvalidValue(name, value, rule, remedy)


def population(search: Search, whole: int, *, final: bool) -> int:
    """The number of private examples that a run's plan is made for: expected, and public.

    Args:
        whole: N, of the data set.
        final: of the final run instead of a trial.

    Raises:
        InvalidValue: the fraction leaves no example to one of the parts.
    """
    rule = search.rule
    if not isinstance(rule, Subsample):
        return whole
    inside, rest = data.part_sizes(whole, rule.fraction)
    return inside if not final else rest if rule.final == "rest" else whole


def part_of(search: Search, *, final: bool) -> str | None:
    """Which part of the data a run sees: ``subsample``, ``rest``, or None for all."""
    rule = search.rule
    if not isinstance(rule, Subsample) or (final and rule.final == "all"):
        return None
    return "rest" if final else "subsample"


def final_config(search: Search, hyperparameters: Hyperparameters, config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The config of the final run: that of the best trial, carried over to more examples.

    With r the quotient of the expected sizes, batch sizes are multiplied by r, so that the sample rate and the number
    of steps stay as they were tuned, and with them the noise multiplier. The noise on an average of r times as many
    gradients is r times smaller, which pays for a learning rate r times larger (Koskela & Kulkarni 2023, who scale the
    learning rate of DP-SGD linearly and leave that of Adam as it is).
    """
    rule = search.rule
    assert isinstance(rule, Subsample)
    if rule.scaling == "none":
        return dict(config)
    whole = len(data.load(search.data, limit=search.data_limit).private)
    before, after = (population(search, whole, final=final) for final in (False, True))
    found = dict(config)
    for name in _SIZES:
        size = getattr(hyperparameters, name, None)
        if size is not None:
            found[name] = min(after, max(1, round(size * after / before)))
    if rule.scaling == "all" and getattr(hyperparameters, "optimizer", None) == "sgd":
        for name in _RATES:
            rate = getattr(hyperparameters, name, None)
            if rate is not None:
                found[name] = rate * after / before
    return found


def prepare_key(search: Search, directory: RunDirectory, records: Mapping[str, TrialRecord]) -> None:
    """Make the secret that decides who is in the subsample, once for a run directory.

    Raises:
        RaydpError: trials exist and the secret is gone, so that nobody knows what they saw.
    """
    if search.insecure_seed is not None:
        return
    path = key_file(directory)
    if path.exists():
        return
    if any(record.plan is not None for record in records.values()):
        raise RaydpError(
            f"{path} is gone, and with it who is in the subsample: neither a trial nor the final run can go on. What "
            "was spent stands in the ledgers. Start a new search."
        )
    NoiseKey.generate().save(path)


def key_file(directory: RunDirectory) -> Path:
    """Of the secret that decides who is in the subsample."""
    return directory.secrets / KEY


def final_of(records: Mapping[str, TrialRecord]) -> TrialRecord | None:
    """The final run, if it was proposed. Of several, which only damage could make, the last."""
    return next((record for record in reversed(records.values()) if record.final), None)  # type: ignore[call-overload]


def spent(directory: RunDirectory, records: Mapping[str, TrialRecord]) -> tuple[list[Mechanism], list[Mechanism]]:
    """What ran on the subsample, and what ran as the final run: from the ledgers, damaged ones as their whole plans."""
    tuning: list[Mechanism] = []
    final: list[Mechanism] = []
    for run in executed_runs(directory):
        record = records.get(run.key)
        plan = record.plan if record else directory.plan(run.key)
        executed = run.ledger.mechanisms if run.ledger is not None else () if plan is None else plan.mechanisms
        (final if record is not None and record.final else tuning).extend(executed)
    return tuning, final


def cost(
    rule: Subsample,
    budget: Budget,
    tuning: Sequence[Mechanism],
    final: Sequence[Mechanism],
    before: Sequence[Mechanism] = (),
) -> Bound:
    """Epsilon of everything that ran, also ``before`` in earlier searches on all examples, by the smallest bound."""
    return subsample_bound(merged(tuning), merged(final), rule, budget, before=merged(before))


def rule_of(definition: Mapping[str, Any]) -> Subsample | None:
    """The rule of a stored definition if it tunes on a subsample."""
    stored = definition.get("selection")
    rule = selection.from_json(stored) if stored else None
    return rule if isinstance(rule, Subsample) else None


__all__ = [
    "KEY",
    "check_definition",
    "cost",
    "final_config",
    "final_of",
    "key_file",
    "part_of",
    "population",
    "prepare_key",
    "rule_of",
    "spent",
]
