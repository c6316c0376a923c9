"""Which point next: Optuna's samplers behind ask and tell. No Ray, no storage.

The journal of the run directory is the truth; the study here lives in memory and is rebuilt from it
(:meth:`Sampling.restore`). The sampler of proposal number k is seeded from (seed, k) alone, so a proposal depends on
the seed, its number and what was told before, and not on how often the driver was restarted in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.samplers import BaseSampler, GPSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.search.history import History, HistoryTpe
from raydp.search.spaces import Config, Space, canonical, quiet

SAMPLERS: tuple[str, ...] = ("tpe", "random", "gp", "grid")
_DIRECTIONS = {
    "max": StudyDirection.MAXIMIZE,
    "maximize": StudyDirection.MAXIMIZE,
    "min": StudyDirection.MINIMIZE,
    "minimize": StudyDirection.MINIMIZE,
}

# Every told trial carries one constraint: Optuna takes a trial as feasible when it is <= 0.
_CONSTRAINT = "trainable"
_FEASIBLE, _INFEASIBLE = -1.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One point to try.

    Attributes:
        number: consecutive from 0, never used twice, also across resumes.
        config: every name of the space with its value.
        repeats: number of the earliest equal proposal, or None. A repeat is returned as it is: it is another run,
            with other noise and its own charge, never a free copy of the first.
    """

    number: int
    config: Config
    repeats: int | None = None


class Past(Protocol):
    """What :meth:`Sampling.restore` reads of a trial's record."""

    @property
    def number(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    def mean(self, metric: str) -> float | None: ...


class _Grid(GridSampler):
    """Optuna's grid, without its wish to stop Optuna's own loop, which is not running here."""

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None: ...


class Sampling:
    """Proposes points of a space and learns from what is told about them.

    How each end of a trial is told to Optuna:

    - finite values: COMPLETE.
    - NaN, infinite or missing values (the training diverged), and points without a plan (infeasible): the samplers
      should avoid the region. TPE reads COMPLETE and PRUNED trials and puts those whose constraint is above 0 among
      the bad ones, so they are told as PRUNED with constraint 1, and no value is invented. FAIL would not be learned
      from. The Gaussian process reads COMPLETE trials only and would propose the very same point for ever, at a
      charge each time; for it they are COMPLETE with the worst value seen so far and constraint 1. Optuna's
      ``best_trial`` skips trials whose constraint is above 0, whatever their value.
    - failed for another reason (a crash, a stop): FAIL, from which nothing is learned.

    With one objective, the samplers see a bounded part of a long past (:mod:`raydp.search.history`), so that a proposal
    costs the same however many there were. With several objectives they see all of it.

    Args:
        space: where the points come from.
        sampler: ``tpe``, ``random``, ``gp`` (Gaussian process) or ``grid``, all Optuna's own with their defaults.
        seed: the sampler's seed; it has nothing to do with the noise of the trials.
        directions: ``max`` or ``min`` for each objective.
        warm_start: whole or partial configs proposed first, in this order.

    Raises:
        UnknownName: the sampler or direction does not exist, or a warm start names what the space lacks.
        InvalidValue: ``grid_search`` with another sampler than grid, a space without a grid with it, a warm start
            that would be ignored.
    """

    def __init__(
        self,
        *,
        space: Space,
        sampler: str,
        seed: int,
        directions: Sequence[str],
        warm_start: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        check(space=space, sampler=sampler, warm_start=warm_start)
        if not directions or isinstance(directions, str):
            raise InvalidValue("directions", directions, "must be one or more of max, min", "Write directions=['max'].")
        self._space, self._sampler = space, sampler
        self._seed = _validate.integer("seed", seed, low=0)
        self._warm_start = [dict(config) for config in warm_start]
        self._grid = space.grid() if sampler == "grid" else None
        optuna_directions = [_DIRECTIONS[_validate.one_of("direction", d, _DIRECTIONS)] for d in directions]
        self._minimized = [direction is StudyDirection.MINIMIZE for direction in optuna_directions]
        # A grid needs all of its past; several objectives have no order by which a part could be chosen.
        bounded = self._grid is None and len(optuna_directions) == 1
        self._history = History() if bounded else None
        with quiet():
            # The sampler is set anew for each proposal; this one only stands in while a study is restored.
            self._study = optuna.create_study(
                storage=self._history or InMemoryStorage(), directions=optuna_directions, sampler=RandomSampler(seed=0)
            )
        self._running: dict[int, Trial] = {}
        self._first: dict[str, int] = {}  # canonical config -> number of its first proposal
        self._next = 0
        self._learned = 0  # earlier searches' trials, which stand in the study before the proposals

    @property
    def size(self) -> int | None:
        """The number of proposals that there are: the points of the grid, or None for the other samplers."""
        return None if self._grid is None else math.prod(len(values) for values in self._grid.values())

    @property
    def next_number(self) -> int:
        """The number that the next proposal will carry."""
        return self._next

    @property
    def open(self) -> tuple[int, ...]:
        """Numbers of the proposals that nothing was told about yet."""
        return tuple(sorted(self._running))

    def ask(self) -> Proposal | None:
        """The next point, or None when every point of the grid was proposed."""
        if self.size is not None and self._next >= self.size:
            return None
        number = self._next
        with quiet():
            self._study.sampler = self._sampler_of(number)
            if number < len(self._warm_start):
                self._study.enqueue_trial(self._warm_start[number])
            trial = self._study.ask()
            config = self._space.suggest(trial)
        assert trial.number == self._learned + number
        self._running[number] = trial
        self._next += 1
        first = self._first.setdefault(canonical(config), number)
        return Proposal(number=number, config=config, repeats=None if first == number else first)

    def complete(self, number: int, values: Sequence[float | None]) -> bool:
        """Tell the value of each objective. Returns False if one is None, NaN or infinite: then the trial diverged.

        Raises:
            InvalidValue: the number is not that of an open proposal, or there are more or fewer values than objectives.
        """
        if len(values) != len(self._minimized):
            raise InvalidValue(
                "values", list(values), f"must be {len(self._minimized)}, one an objective", "Tell one value each."
            )
        finite = [value for value in map(_number, values) if value is not None]
        if len(finite) != len(values):
            self._avoid(number, "an objective is missing or not finite")
            return False
        trial = self._take(number)
        trial.set_constraint(_CONSTRAINT, _FEASIBLE)
        self._tell(trial, TrialState.COMPLETE, finite)
        return True

    def diverged(self, number: int, reason: str) -> None:
        """The training left the finite numbers: the sampler learns to avoid the region."""
        self._avoid(number, reason)

    def infeasible(self, number: int, reason: str) -> None:
        """The point has no plan, so nothing was trained: the sampler learns to avoid the region."""
        self._avoid(number, reason)

    def fail(self, number: int, reason: str) -> None:
        """The trial ended for a reason that says nothing about its point (a crash, a stop): nothing is learned."""
        trial = self._take(number)
        trial.set_user_attr("reason", reason)
        self._tell(trial, TrialState.FAIL, None)

    def learn(self, trials: Sequence[tuple[Mapping[str, Any], Sequence[float]]]) -> None:
        """Tell complete trials of earlier searches, before anything is restored or asked. They are no proposals.

        Args:
            trials: (config, the value of each objective).

        Raises:
            InvalidValue: proposals were already made, the sampler is a grid, or the space cannot propose a config.
        """
        if self._next or self._grid is not None:
            raise InvalidValue("learn", self._next, "must come first, and has no meaning for a grid", "Leave it out.")
        for config, values in trials:
            params, distributions = self._space.replay(config)
            with quiet():
                self._study.add_trial(
                    create_trial(
                        state=TrialState.COMPLETE,
                        values=list(values),
                        params=params,
                        distributions=distributions,
                        constraints={_CONSTRAINT: _FEASIBLE},
                    )
                )
            self._learned += 1

    def restore(self, records: Sequence[Past], *, metrics: Sequence[str]) -> None:
        """Rebuild the study from the records of an earlier run, before anything is asked.

        Records in the state ``proposed`` or ``running`` become open proposals again: tell their end when it is known.

        Args:
            records: of trials, in any order.
            metrics: the objectives, in the order of ``directions``; read by ``record.mean(metric)``.

        Raises:
            InvalidValue: proposals were already made, or the space can no longer propose what it once did.
        """
        if self._next:
            raise InvalidValue("restore", self._next, "must come before the first ask", "Make a new Sampling.")
        for record in sorted(records, key=lambda record: record.number):
            while self._next < record.number:  # a number whose record was lost: it is not used again
                self._add(create_trial(state=TrialState.FAIL))
            params, distributions = self._space.replay(record.config)
            config = {name: record.config[name] for name in self._space.names if name in record.config}
            self._first.setdefault(canonical(config), record.number)
            if record.state in ("proposed", "running"):
                with quiet():
                    self._study.enqueue_trial(params)
                    trial = self._study.ask()
                    self._space.suggest(trial)
                self._running[record.number] = trial
                self._next += 1
                continue
            values = [_number(record.mean(metric)) for metric in metrics]
            finite = [value for value in values if value is not None]
            told: list[float] | None
            if record.state == "complete" and len(finite) == len(values):
                state, told, constraint = TrialState.COMPLETE, finite, _FEASIBLE
            elif record.state in ("complete", "diverged", "infeasible"):
                state, told = self._avoided()
                constraint = _INFEASIBLE
            else:
                state, told, constraint = TrialState.FAIL, None, _FEASIBLE
            self._add(
                create_trial(
                    state=state,
                    values=told,
                    params=params,
                    distributions=distributions,
                    constraints={_CONSTRAINT: constraint},
                )
            )

    def _sampler_of(self, number: int) -> BaseSampler:
        """A sampler whose random numbers depend on (seed, number) only; all else it reads from the study."""
        if self._grid is not None:
            return _Grid(self._grid, seed=self._seed)  # the order of the grid is one for the whole search
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        if self._sampler == "random":
            return RandomSampler(seed=seed)
        if self._sampler == "gp":
            return GPSampler(seed=seed)
        return TPESampler(seed=seed) if self._history is None else HistoryTpe(seed=seed, history=self._history)

    def _avoid(self, number: int, reason: str) -> None:
        trial = self._take(number)
        trial.set_user_attr("reason", reason)
        trial.set_constraint(_CONSTRAINT, _INFEASIBLE)
        self._tell(trial, *self._avoided())

    def _avoided(self) -> tuple[TrialState, list[float] | None]:
        """The state and values under which a bad region is told (see the class)."""
        if self._sampler != "gp":
            return TrialState.PRUNED, None
        told = [trial.values for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))]
        if not told:
            return TrialState.COMPLETE, [0.0] * len(self._minimized)
        columns = zip(self._minimized, zip(*told, strict=True), strict=True)
        return TrialState.COMPLETE, [max(column) if minimized else min(column) for minimized, column in columns]

    def _take(self, number: int) -> Trial:
        if number not in self._running:
            raise InvalidValue(
                "number", number, f"is not an open proposal (open: {list(self.open)})", "Tell each proposal once."
            )
        return self._running.pop(number)

    def _tell(self, trial: Trial, state: TrialState, values: list[float] | None) -> None:
        with quiet():
            self._study.tell(trial, values=values, state=state)

    def _add(self, trial: FrozenTrial) -> None:
        with quiet():
            self._study.add_trial(trial)
        self._next += 1


def check(*, space: Space, sampler: str, warm_start: Sequence[Mapping[str, Any]] = ()) -> None:
    """Refuse a sampler that cannot serve the space, or warm starts that would be ignored, before anything is spent.

    Raises:
        UnknownName, InvalidValue: see :class:`Sampling`.
    """
    _validate.one_of("sampler", sampler, SAMPLERS)
    if sampler == "grid":
        space.grid()
        if warm_start:
            raise InvalidValue(
                "warm_start",
                [dict(config) for config in warm_start],
                "has no meaning with sampler = 'grid', which visits every point once",
                "Leave it out, or use sampler='random' or 'tpe'.",
            )
    elif space.is_grid:
        raise InvalidValue(
            "sampler",
            sampler,
            f"cannot visit tune.grid_search of {', '.join(sorted(space.grids))}",
            "Use sampler='grid', or write tune.choice([...]) instead of tune.grid_search([...]).",
        )
    for index, config in enumerate(warm_start):
        space.check_config(config, field=f"warm_start[{index}]")


def _number(value: object) -> float | None:
    """A finite float, or None for everything that is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    number = float(value)
    return number if math.isfinite(number) else None
