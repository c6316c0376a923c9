"""What a search has spent, by its ledgers: every run, and what the people behind the examples went through in all."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raydp.errors import CorruptFile
from raydp.privacy.ledger import Ledger
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval
from raydp.search.run_directory import RunDirectory

Composition = tuple[Mechanism, ...]
#: Of earlier searches: (member of a family that it concerns, or None for everybody; what was spent).
Carried = tuple[tuple[int | None, Composition], ...]
#: Said wherever epsilon of a search over a family is stated.
OF_MEMBERS = "members are different people: the largest of them"


def merged(mechanisms: Iterable[Mechanism]) -> tuple[Mechanism, ...]:
    """The same composition with fewer mechanisms: equal noise multipliers and sample rates add up their steps.

    Privacy losses of composed mechanisms add up, in whatever order, so a hundred trials of one plan cost an accountant
    as much as one trial with a hundred times the steps.
    """
    steps: Counter[tuple[float, float]] = Counter()
    for mechanism in mechanisms:
        steps[mechanism.noise_multiplier, mechanism.sample_rate] += mechanism.steps
    return tuple(
        Mechanism(noise_multiplier=sigma, sample_rate=rate, steps=count) for (sigma, rate), count in steps.items()
    )


@dataclass(frozen=True, kw_only=True)
class ExecutedRun:
    """One ledger of a search: what one run of a trial executed.

    Attributes:
        key, seed: of the run.
        path: of the ledger.
        ledger: None if it is damaged.
        problem: why it is damaged, else None.
    """

    key: str
    seed: int
    path: Path
    ledger: Ledger | None
    problem: str | None = None


def executed_runs(directory: RunDirectory, ledger: str = "ledger") -> list[ExecutedRun]:
    """Every ledger in the run directory, whether or not the journal knows its trial, in the order of keys and seeds.

    Args:
        ledger: how the files' names begin; ``holdout-ledger`` for those of a private hold-out.
    """
    runs = []
    for key in directory.trial_keys():
        for seed, run in directory.runs(key):
            for path in sorted(run.glob(f"{ledger}*.jsonl")):
                try:
                    runs.append(ExecutedRun(key=key, seed=seed, path=path, ledger=Ledger.read(path)))
                except CorruptFile as error:
                    runs.append(ExecutedRun(key=key, seed=seed, path=path, ledger=None, problem=str(error)))
    return runs


def executed_mechanisms(
    directory: RunDirectory, ledger: str = "ledger", plan_file: str = "plan.json", *, carried: Carried = ()
) -> tuple[tuple[Composition, ...], int]:
    """(what each member's people went through, see :func:`compositions`; runs that executed at least one step).

    A damaged ledger counts as its whole plan, with a warning: what ran under it is unknown, and was at most that.

    Args:
        ledger, plan_file: of the training, or of a private hold-out.
        carried: what earlier searches spent, which is composed with the runs and is none of those that are counted.

    Raises:
        CorruptFile: a ledger is damaged and there is no readable plan beside it.
    """
    runs: list[tuple[int, Composition]] = []
    for run in executed_runs(directory, ledger):
        if run.ledger is None:
            plan = directory.plan(run.key, plan_file)
            if plan is None:
                raise CorruptFile(f"{run.problem} There is no {plan_file} for {run.key} to bound it by.")
            warnings.warn(f"{run.problem} The whole plan of {run.key} is counted as spent.", stacklevel=2)
            spent = plan.mechanisms
        else:
            spent = run.ledger.mechanisms
        runs.append((run.seed, spent))
    count = sum(bool(spent) for _, spent in runs)
    return compositions(runs, family=is_family(directory.definition), carried=carried), count


def is_family(definition: Mapping[str, Any]) -> bool:
    """Whether run i of each trial took member i of a family of private sets, of different people.

    Run directories of earlier versions do not say so. They count as one private set: an upper bound.
    """
    return definition.get("family") is True


def compositions(
    runs: Iterable[tuple[int, Composition]], *, family: bool, carried: Carried = ()
) -> tuple[Composition, ...]:
    """What the people of a search went through: the composition of all runs, or in a family of each member's runs.

    Members of a family are different people, so nobody's examples are in the runs of two members. By parallel
    composition (McSherry, SIGMOD 2009) each person is protected by the composition of the own member's runs, over all
    trials, and the search by the worst of them. Someone who is in several members would have to add those up.

    Args:
        runs: (position of the seed, which is the member in a family; what was executed) of each.
        family: whether positions are members.
        carried: what earlier searches spent on the same people (:mod:`raydp.search.earlier`).

    Returns:
        Merged, each different one once; at least one, which may be empty.
    """
    members: dict[int, list[Mechanism]] = {}
    everybody = [mechanism for member, mechanisms in carried if member is None for mechanism in mechanisms]
    own = [(member, mechanisms) for member, mechanisms in carried if member is not None]
    for position, mechanisms in (*runs, *own):
        members.setdefault(position if family else 0, []).extend(mechanisms)
    if everybody and not members:
        members[0] = []
    return tuple(dict.fromkeys(merged([*everybody, *found]) for found in members.values())) or ((),)


def largest(intervals: Iterable[Interval]) -> Interval:
    """Bounds of the largest of several epsilons: each bound is the largest of its kind. For one or more."""
    found = list(intervals)
    worst = max(found, key=lambda interval: interval.upper)
    return replace(worst, lower=max(each.lower for each in found), estimate=max(each.estimate for each in found))
