"""Results of a search: the best trial, the table of all, and the two epsilons.

``trials.parquet`` has one row a trial, in the order of the trials' numbers, and these columns, in this order:

===============================  ========================================================================
key, state, reason               of the trial (see :class:`raydp.search.records.TrialRecord`); strings
number, attempts                 int64
seconds                          float64, null before the trial finished
config.<name>                    one column a hyperparameter, names sorted; null where a trial lacks it. Bool,
                                 int64, float64 or string, whichever holds all values; ints and floats mixed
                                 become float64; any other mixture becomes strings: strings as they are, the
                                 others as JSON (``true``, ``7``, ``0.1``)
metric.<name>.mean, .std         float64 over the seeds; std with ddof = 1
metric.<name>.values             list of float64, one a seed, null where a value is missing
epsilon.<accountant>.lower, .estimate, .upper   float64: certified bounds of the trial's costliest run
target_epsilon, delta            float64: the budget
adjacency, measured_on           strings
===============================  ========================================================================
"""

from __future__ import annotations

import html
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.privacy import accountants
from raydp.privacy import selection as selections
from raydp.privacy.budget import Budget
from raydp.privacy.plan import Interval
from raydp.privacy.selection import Public, RandomStopping, Selection, Subsample
from raydp.privacy.selection_bounds import Bound
from raydp.privacy.selection_budget import released
from raydp.search import notebook, subsample
from raydp.search.earlier import Earlier, carried, carried_of_holdout, earlier_of
from raydp.search.records import STATES, TrialRecord
from raydp.search.run_directory import HELD, RunDirectory, atomic_file, trial_budget
from raydp.search.spending import (
    OF_MEMBERS,
    Composition,
    compositions,
    executed_mechanisms,
    is_family,
    largest,
    merged,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TABLE = "trials.parquet"
INSECURE = "INSECURE: all noise came from a known seed (insecure_seed), so nothing here is private."
_ROWS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found and what it spent. Made by :meth:`load`.

    Attributes:
        directory: the run directory.
        search: the definition of the search, as in raydp.json.
        trials: all trials, in the order of their numbers.
        compositions: what the people of each member went through, merged; the source of :attr:`epsilon_search`. One
            where the data are not a family.
        runs: how many runs executed at least one step.
        trial_budget: what each trial could spend where that is not the search's budget (random stopping), else None.
        holdout_mechanisms: all releases of a private hold-out, merged; the source of :attr:`epsilon_holdout`.
        holdout_trial_budget: what each trial could release of a private hold-out under random stopping, else None.
        earlier: the earlier searches that it goes on from; what they spent on the same people is part of
            :attr:`compositions`.
        parts: what ran on a secret subsample, and what ran as the final run; None for other selections.

    In these examples ``result`` is of a search over two methods and three learning rates, with three seeds a trial:

    >>> result.best.key, result.best.config
    ('t0004', {'method': 'tp_topk', 'learning_rate': 1.0})
    >>> round(result.best.mean("accuracy"), 3), len(result.ranked)
    (0.921, 6)
    >>> result.epsilon_trial.upper <= result.budget.epsilon < result.epsilon_search.upper
    True
    >>> print(result.summary())
    made: 6 trials (6 complete)
    best: t0004  accuracy = 0.921 ± 0.001
      method=tp_topk learning_rate=1
    measured on: digits (public benchmark, 360 examples)
    epsilon of the trial: 2.99... at most by pld (target 3, delta 1e-05, add_remove)
    epsilon of the whole search: 10.2... at most by pld, selection composition (all that ran: 18 runs)
    >>> result.plot_methods().axes[0].get_xlabel()
    'accuracy'
    """

    directory: Path
    search: Mapping[str, Any]
    trials: tuple[TrialRecord, ...]
    compositions: tuple[Composition, ...] = field(default=((),), repr=False)
    runs: int = 0
    trial_budget: Budget | None = None
    holdout_mechanisms: Composition = field(default=(), repr=False)
    holdout_trial_budget: Budget | None = None
    parts: tuple[Composition, Composition] | None = field(default=None, repr=False)
    earlier: tuple[Earlier, ...] = ()

    @classmethod
    def load(cls, directory: str | os.PathLike[str] | RunDirectory) -> Result:
        """Read a run directory, finished or not; nothing is written.

        Raises:
            InvalidValue: it is no run directory.
            CorruptFile: something in it is damaged.
        """
        opened = directory if isinstance(directory, RunDirectory) else RunDirectory.open(directory)
        earlier = earlier_of(opened)
        composed, runs = executed_mechanisms(opened, carried=carried(earlier))
        records, parts = opened.records(), None
        if subsample.rule_of(opened.definition) is not None:
            tuning, final = subsample.spent(opened, records)
            parts = merged(tuning), merged(final)
        return cls(
            directory=opened.path,
            search=opened.definition,
            parts=parts,
            trials=tuple(records.values()),
            compositions=composed,
            runs=runs,
            trial_budget=trial_budget(opened),
            holdout_trial_budget=trial_budget(opened, HELD),
            holdout_mechanisms=executed_mechanisms(
                opened,
                "holdout-ledger",
                "holdout-plan.json",
                carried=tuple((None, released) for released in carried_of_holdout(earlier)),
            )[0][0],
            earlier=earlier,
        )

    @property
    def budget(self) -> Budget:
        """The budget of every trial."""
        return self.trial_budget or self.search_budget

    @property
    def search_budget(self) -> Budget:
        """The budget in the search's definition: of every trial, or under random stopping of the released result."""
        return Budget.from_json(self.search["budget"])

    @property
    def selection(self) -> Selection:
        """How the best trial was chosen."""
        return selections.from_json(self.search.get("selection", {"rule": "composition"}))

    @cached_property
    def epsilon_released(self) -> Interval:
        """Bounds of epsilon of what the search releases, at the search's delta, by the theorem of its selection.

        ``composition``: :attr:`epsilon_search`, whatever is released. ``random_stopping``: of the one released trial,
        for those who do not know the rest; its lower bound is that of the trial alone. ``subsample``: of all trials and
        the final run, for those who do not know who is in the subsample; no lower bound is claimed. ``public``: zero.
        """
        rule = self.selection
        if isinstance(rule, Subsample):
            upper = self.subsample_bound.epsilon
            return Interval(lower=0.0, estimate=upper, upper=upper, accountant="pld")
        if isinstance(rule, Public):
            return Interval(lower=0.0, estimate=0.0, upper=0.0, accountant="public data")
        if not isinstance(rule, RandomStopping):
            return self.epsilon_search
        trial = self.trial_budget
        if trial is None:  # nothing has been released yet
            return Interval(lower=0.0, estimate=0.0, upper=0.0, accountant=self.accountant)
        upper = released(rule, trial).epsilon
        return Interval(lower=min(self.epsilon_search.lower, upper), estimate=upper, upper=upper, accountant="pld")

    @cached_property
    def subsample_bound(self) -> Bound:
        """What tuning on a subsample and the final run cost, and the theorem. For that selection alone.

        Raises:
            InvalidValue: the search has another selection.
        """
        rule = self.selection
        if not isinstance(rule, Subsample) or self.parts is None:
            raise InvalidValue("selection", rule.rule, "must be subsample", "Use result.epsilon_released.")
        before = [mechanism for _, spent in carried(self.earlier) for mechanism in spent]
        return subsample.cost(rule, self.search_budget, *self.parts, before)

    @property
    def accountant(self) -> str:
        """The accountant whose upper bounds are held against the budget."""
        return str(self.search.get("accountant", "pld"))

    @property
    def insecure(self) -> bool:
        """Whether the search debugged with noise from a known seed: whatever the epsilons say, nothing is private."""
        return self.search.get("insecure_seed") is not None

    @property
    def objectives(self) -> tuple[tuple[str, str], ...]:
        """(metric, ``max`` or ``min``) of each objective."""
        metrics, modes = _listed(self.search.get("metric", "accuracy")), _listed(self.search.get("mode", "max"))
        if len(modes) == 1:
            modes *= len(metrics)
        if len(modes) != len(metrics):
            raise InvalidValue("mode", modes, f"must be one, or one for each of {metrics}", "Give each metric a mode.")
        return tuple(
            (metric, _validate.one_of("mode", mode, ("max", "min")))
            for metric, mode in zip(metrics, modes, strict=True)
        )

    @property
    def best(self) -> TrialRecord | None:
        """The complete trial with the best mean over its seeds (of equals the earliest); None if there is none.

        After tuning on a subsample it is the final run, as soon as that is complete, whatever the trials scored.

        Raises:
            InvalidValue: the search has several objectives.
        """
        if len(self.objectives) > 1:
            names = [metric for metric, _ in self.objectives]
            raise InvalidValue("metric", names, "has no single best trial", "Use result.pareto.")
        return next(iter(self.ranked), None)

    @cached_property
    def ranked(self) -> tuple[TrialRecord, ...]:
        """The complete trials that have every objective, the best first by the first one; equals by their numbers.

        The final run after tuning on a subsample stands before all trials.
        """
        return tuple(sorted(self._candidates(), key=lambda trial: (not trial.final, -self._scores(trial)[0])))

    @property
    def pareto(self) -> tuple[TrialRecord, ...]:
        """The complete trials that no other one beats in one objective without losing in another."""
        scored = [(self._scores(trial), trial) for trial in self._candidates()]
        return tuple(
            trial
            for scores, trial in scored
            if not any(
                other != scores and all(o >= s for o, s in zip(other, scores, strict=True)) for other, _ in scored
            )
        )

    @property
    def epsilon_trial(self) -> Interval | None:
        """Bounds of epsilon of the best trial's costliest run, from its ledger; None if no trial is complete.

        With several objectives: the largest in the Pareto set.
        """
        chosen = self.pareto if len(self.objectives) > 1 else (self.best,)
        intervals = [trial.epsilon[self.accountant] for trial in chosen if trial and self.accountant in trial.epsilon]
        return max(intervals, key=lambda interval: interval.upper, default=None)

    @cached_property
    def epsilon_search(self) -> Interval:
        """Bounds of epsilon of the whole search: the composition of every step of every run of every trial.

        By the search's accountant, at the budget's delta (for all of it together, not for each) and adjacency. It is
        what an adversary learns who sees every trial, also those that failed, and holds however the best was chosen.
        Where the search goes on from earlier ones, what those spent on the same people is composed with it.
        A sampler that learns (TPE, GP) chooses plans by earlier results: the number is then the composition of the
        sequence of plans that came about, not a bound over all that could have.

        In a family of private sets (:attr:`family`) run i of every trial saw member i alone. Members are taken to be
        different people, so each member's runs are composed over all trials, and the largest of the members counts
        (parallel composition: McSherry, SIGMOD 2009).
        """
        budget = self.search_budget
        return largest(
            accountants.epsilon(each, delta=budget.delta, adjacency=budget.adjacency, accountant=self.accountant)
            for each in self.compositions
        )

    @cached_property
    def epsilon_carried(self) -> Interval | None:
        """Bounds of epsilon of what earlier searches spent on the same people alone; None where there are none.

        It is part of :attr:`epsilon_search`, and is not to be added to it.
        """
        before = carried(self.earlier)
        if not before:
            return None
        budget = self.search_budget
        return largest(
            accountants.epsilon(each, delta=budget.delta, adjacency=budget.adjacency, accountant=self.accountant)
            for each in compositions([], family=self.family, carried=before)
        )

    @property
    def family(self) -> bool:
        """Whether the runs of a trial took different private sets, of different people."""
        return is_family(self.search)

    @cached_property
    def epsilon_holdout(self) -> Interval | None:
        """Bounds of epsilon of all metrics that were released of a private hold-out, for one of *its* people.

        The composition over all runs of all trials, at the delta of the search's ``holdout_budget``, by the analytic
        Gaussian mechanism; under random stopping, of the released result by its theorem. It stands beside
        :attr:`epsilon_search` and is not added to it: nobody is in both parts. None where there is no such budget.
        """
        if self.search.get("holdout_budget") is None:
            return None
        budget = Budget.from_json(self.search["holdout_budget"])
        rule = self.selection
        if isinstance(rule, RandomStopping):
            if self.holdout_trial_budget is None:  # nothing has been released yet
                return Interval(lower=0.0, estimate=0.0, upper=0.0, accountant="pld")
            upper = released(rule, self.holdout_trial_budget).epsilon
            return Interval(lower=0.0, estimate=upper, upper=upper, accountant="pld")
        return accountants.epsilon(
            self.holdout_mechanisms, delta=budget.delta, adjacency=budget.adjacency, accountant="pld"
        )

    def to_pandas(self) -> pd.DataFrame:
        """One row a trial; the columns of trials.parquet (see the module).

        >>> table = result.to_pandas()  # of the example above
        >>> len(table), table.loc[4, "key"], table.loc[4, "config.method"]
        (6, 't0004', 'tp_topk')
        """
        import pandas as pd

        return self._table().to_pandas(types_mapper={pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}.get)

    def plot_splits(self, x: str = "warmup_fraction", y: str = "warmup_share", metric: str | None = None) -> Figure:
        """The metric over two hyperparameters, the best trial marked; see :func:`raydp.search.plots.plot_splits`."""
        from raydp.search import plots

        return plots.plot_splits(self, x, y, metric)

    def plot_steps(self, key: str, names: Sequence[str] | None = None, *, seed: int = 0) -> Figure:
        """What one run of a trial reported step by step; see :func:`raydp.search.plots.plot_steps`."""
        from raydp.search import plots

        return plots.plot_steps(self, key, names, seed=seed)

    def plot_methods(self, metric: str | None = None) -> Figure:
        """Each method at its best trial, a dot a seed. This and the next ones raise NotShown where they cannot."""
        from raydp.search.report import search_charts

        return search_charts.methods(self, metric).figure

    def plot_hyperparameters(self, metric: str | None = None) -> Figure:
        """The metric against each numeric hyperparameter, one colour a method."""
        from raydp.search.report import search_charts

        return search_charts.slices(self, metric).figure

    def plot_parallel(self, metric: str | None = None) -> Figure:
        """Parallel coordinates: a line a trial, the best ones in colour."""
        from raydp.search.report import search_charts

        return search_charts.parallel(self, metric).figure

    def plot_importance(self, metric: str | None = None) -> Figure:
        """How much each hyperparameter mattered, by Optuna's PED-ANOVA."""
        from raydp.search.report import search_charts

        return search_charts.importance(self, metric).figure

    def plot_distances(self, *others: Result) -> Figure:
        """Fréchet distance and KID of generated images against epsilon: of this search, and of others beside it.

        Args:
            others: results of the same data at other budgets.
        """
        from raydp.search.report import epsilon_charts

        return epsilon_charts.distances([(str(found.search.get("name")), found) for found in (self, *others)]).figure

    def plot_progress(self, metric: str | None = None) -> Figure:
        """Each trial in the order of the proposals, and the best so far."""
        from raydp.search.report import search_charts

        return search_charts.progress(self, metric).figure

    def plot_learning_curves(self, metric: str | None = None) -> Figure:
        """The metric while training, the best trials in colour."""
        from raydp.search.report import trial_charts

        return trial_charts.curves(self, metric).figure

    def plot_budget(self) -> Figure:
        """Where each trial's epsilon went, phase by phase, and what splitting by addition would have wasted."""
        from raydp.search.report import trial_charts

        return trial_charts.budget(self).figure

    def plot_schedule(self, key: str | None = None) -> Figure:
        """DP-NGD's clamping schedule of one trial: floor, clamped fraction, effective dimension, step ratio."""
        from raydp.search.report import trial_charts

        return trial_charts.schedule(self, key).figure

    def plot_support(self) -> Figure:
        """TP-TopK's supports against what pure noise would give."""
        from raydp.search.report import trial_charts

        return trial_charts.support(self).figure

    def to_json(self) -> dict[str, Any]:
        """For ``--json`` output: search, trials, the best key (or the Pareto set's), both epsilons."""
        single = len(self.objectives) == 1
        best = self.best if single else None
        trial = self.epsilon_trial
        return {
            "directory": str(self.directory),
            "search": dict(self.search),
            "budget": self.budget.to_json(),
            "insecure": self.insecure,
            "best": best.key if best else None,
            "pareto": [record.key for record in self.pareto],
            "epsilon_trial": trial.to_json() if trial else None,
            "epsilon_search": self.epsilon_search.to_json(),
            "epsilon_released": self.epsilon_released.to_json(),
            "epsilon_holdout": self.epsilon_holdout.to_json() if self.epsilon_holdout else None,
            "selection": self.selection.to_json(),
            "earlier": [each.to_json() for each in self.earlier],
            "epsilon_carried": self.epsilon_carried.to_json() if self.epsilon_carried else None,
            "family": self.family,
            "runs": self.runs,
            "trials": [record.to_json() for record in self.trials],
        }

    def summary(self) -> str:
        """A few lines for a terminal. The last two are epsilon of the trial and epsilon of the whole search."""
        return "\n".join([*self._headline(), *self._epsilon_lines()])

    def __repr__(self) -> str:
        return f"<Result of {self.search.get('name')!r} in {self.directory}: {self.counts()}>"

    def _repr_html_(self) -> str:
        """A small table for notebooks: the best trials, then the two epsilons."""
        metrics = [metric for metric, _ in self.objectives]
        ranked = {trial.key for trial in self.ranked}
        order = [*self.ranked, *(t for t in self.trials if t.key not in ranked)]
        rows = [
            (trial.key, trial.state, *(_spread(trial, metric) for metric in metrics), _config(trial))
            for trial in order[:_ROWS_SHOWN]
        ]
        hidden = len(order) - len(rows)
        lines = [
            *([f"and {hidden} more: result.to_pandas()"] if hidden else []),
            self._headline()[0],
            *self._measured_on(),
            *([INSECURE] if self.insecure else []),
            *self._epsilon_lines(),
        ]
        text = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        return notebook.table(("trial", "state", *metrics, "config"), rows) + text

    def _candidates(self) -> list[TrialRecord]:
        """Complete trials that have every objective."""
        names = [metric for metric, _ in self.objectives]
        complete = [trial for trial in self.trials if trial.state == "complete"]
        return [trial for trial in complete if all(trial.mean(name) is not None for name in names)]

    def _scores(self, trial: TrialRecord) -> tuple[float, ...]:
        """The objectives, all to be maximised."""
        means = [(trial.mean(metric), mode) for metric, mode in self.objectives]
        return tuple(mean if mode == "max" else -mean for mean, mode in means if mean is not None)

    def counts(self) -> str:
        """How many trials are in which state, in words."""
        counts = Counter(trial.state for trial in self.trials)
        return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no trial"

    def _headline(self) -> list[str]:
        trials = f"{len(self.trials)} trial{'' if len(self.trials) == 1 else 's'}"
        lines = [f"{self.search.get('name')}: {trials} ({self.counts()})"]
        chosen = self.pareto if len(self.objectives) > 1 else self.ranked[:1]
        word = "best" if len(self.objectives) == 1 else "on the Pareto front"
        for trial in chosen:
            scores = ", ".join(f"{metric} = {_spread(trial, metric)}" for metric, _ in self.objectives)
            lines += [f"{word}: {trial.key}  {scores}", f"  {_config(trial)}"]
        lines += self._measured_on()
        if not chosen:
            lines.append("best: none, for no trial is complete")
        return [*lines, INSECURE] if self.insecure else lines

    def _measured_on(self) -> list[str]:
        """What the metrics were measured on, once for all trials: it is one hold-out set; and what that cost it."""
        lines = [f"measured on: {trial.measured_on}" for trial in self._candidates()[:1]]
        return lines if self.epsilon_holdout is None else [*lines, self.holdout_line()]

    def holdout_line(self) -> str:
        """What the metrics cost the people of a private hold-out with a budget, in words; empty where it has none."""
        if self.epsilon_holdout is None:
            return ""
        delta = Budget.from_json(self.search["holdout_budget"]).delta
        stopping = isinstance(self.selection, RandomStopping)
        rule = "of the released result, by random stopping" if stopping else "by composition over all trials"
        return (
            f"epsilon of the hold-out: {_epsilon(self.epsilon_holdout)} (delta {delta:g}; for its own people, who are "
            f"others than the training's; through noise, {rule})"
        )

    def _epsilon_lines(self) -> tuple[str, str]:
        budget, trial = self.budget, self.epsilon_trial
        spent = _epsilon(trial) if trial else "none, for no trial is complete"
        return (
            f"epsilon of the trial: {spent} (target {budget.epsilon:.6g}, delta {budget.delta:g}, {budget.adjacency})",
            self._released_line(),
        )

    def _released_line(self) -> str:
        """Epsilon of what the search releases, and the rule and the theorem that it rests on."""
        rule, budget = self.selection, self.search_budget
        if isinstance(rule, Public):
            data = rule.data or self.search.get("data")
            return f"epsilon of the released result: 0 (selection public: trials ran on {data}, which is public)"
        if isinstance(rule, RandomStopping):
            if self.trial_budget is None:
                return "epsilon of the released result: nothing has been released yet (selection random_stopping)"
            bound = released(rule, self.trial_budget)
            return (
                f"epsilon of the released result: {_epsilon(self.epsilon_released)} (target {budget.epsilon:g}, delta "
                f"{budget.delta:g}; selection random_stopping, {bound.theorem}, for those who do not know the number "
                "of trials)"
            )
        if isinstance(rule, Subsample):
            where = "the rest" if rule.final == "rest" else "all examples"
            return (
                f"epsilon of the released result: {_epsilon(self.epsilon_released)} (delta {budget.delta:g}; trials "
                f"and final run; selection subsample, tuned on a fraction of {rule.fraction:g}, final run on "
                f"{where}; {self.subsample_bound.theorem}; for those who do not know who is in the subsample)"
                f"{self._carried_text()}"
            )
        runs = f"{self.runs} run{'' if self.runs == 1 else 's'}"
        whole = _epsilon(self.epsilon_search)
        members = f"; {OF_MEMBERS}" if self.family else ""
        return (
            f"epsilon of the whole search: {whole}, selection composition (all that ran: {runs}{members})"
            f"{self._carried_text()}"
        )

    def carried_line(self) -> str:
        """Which earlier searches' spending is part of this one's, and whose is not; empty where there are none."""
        added = [each.name for each in self.earlier if each.counted]
        others = [f"{each.name} ({each.why})" for each in self.earlier if not each.counted]
        parts = []
        if added:
            alone = self.epsilon_carried
            spent = "which spent nothing" if alone is None else f"alone {_epsilon(alone)}"
            parts.append(f"with {', '.join(added)}, {spent}")
        if others:
            parts.append(f"without {'; '.join(others)}")
        return "; ".join(parts)

    def _carried_text(self) -> str:
        return f"; goes on from earlier searches: {self.carried_line()}" if self.earlier else ""

    def _table(self) -> pa.Table:
        return _table(self.trials, self.budget)


def write_trials_parquet(directory: str | os.PathLike[str] | RunDirectory) -> Path:
    """Write trials.parquet (columns: see the module) from the journal; a reader sees the old table or the new one."""
    opened = directory if isinstance(directory, RunDirectory) else RunDirectory.open(directory)
    table = _table(tuple(opened.records().values()), Budget.from_json(opened.definition["budget"]))
    target = opened.path / TABLE
    with atomic_file(target) as temporary:
        pq.write_table(table, temporary)
    return target


def _table(trials: Sequence[TrialRecord], budget: Budget) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for name in ("key", "state", "reason"):
        columns[name] = pa.array([getattr(trial, name) for trial in trials], pa.string())
    for name in ("number", "attempts"):
        columns[name] = pa.array([getattr(trial, name) for trial in trials], pa.int64())
    columns["seconds"] = pa.array([trial.seconds for trial in trials], pa.float64())
    for name in sorted({name for trial in trials for name in trial.config}):
        columns[f"config.{name}"] = _column([trial.config.get(name) for trial in trials])
    for name in sorted({name for trial in trials for name in trial.metrics}):
        columns[f"metric.{name}.mean"] = pa.array([trial.mean(name) for trial in trials], pa.float64())
        columns[f"metric.{name}.std"] = pa.array([trial.std(name) for trial in trials], pa.float64())
        values = [trial.metrics.get(name) for trial in trials]
        columns[f"metric.{name}.values"] = pa.array(values, pa.list_(pa.float64()))
    for name in sorted({name for trial in trials for name in trial.epsilon}):
        for bound in ("lower", "estimate", "upper"):
            bounds = [getattr(trial.epsilon[name], bound) if name in trial.epsilon else None for trial in trials]
            columns[f"epsilon.{name}.{bound}"] = pa.array(bounds, pa.float64())
    columns["target_epsilon"] = pa.array([budget.epsilon] * len(trials), pa.float64())
    columns["delta"] = pa.array([budget.delta] * len(trials), pa.float64())
    columns["adjacency"] = pa.array([budget.adjacency] * len(trials), pa.string())
    columns["measured_on"] = pa.array([trial.measured_on for trial in trials], pa.string())
    return pa.table(columns)


def _column(values: list[Any]) -> pa.Array:
    """A column in the narrowest type that holds all values; see the module."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in values if value is not None):
        return pa.array(values, pa.int64())
    if float in kinds and kinds <= {int, float} and all(value is None or float(value) == value for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _spread(trial: TrialRecord, metric: str) -> str:
    mean, std = trial.mean(metric), trial.std(metric)
    if mean is None:
        return "–"
    return f"{mean:.4g}" if std is None else f"{mean:.4g} ± {std:.2g}"


def _config(trial: TrialRecord) -> str:
    values = trial.config.items()
    return " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values)


def _epsilon(interval: Interval) -> str:
    """The upper bound, rounded up: the number that is stated must be one that holds."""
    from decimal import ROUND_CEILING, Context

    upper = f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal_from_float(interval.upper).normalize():f}"
    note = f"; {interval.fallback}" if interval.fallback else ""
    return f"{upper} at most by {interval.accountant}{note}"
