"""Search spaces: Ray Tune's own domains, or an Optuna define-by-run function, as one kind of object.

raydp invents no space language. A space is written either as a flat dictionary of Tune's functions::

    {"learning_rate": tune.loguniform(1e-2, 10), "batch_size": tune.choice([256, 512]), "momentum": 0.9}

or as a function that receives an ``optuna.Trial``, suggests what it likes, and may return a dictionary of further
(computed or constant) hyperparameters::

    def space(trial):
        epochs = trial.suggest_int("epochs", 2, 40)
        return {"warmup_epochs": 1 if epochs < 10 else 2}

Both become Optuna distributions, so every sampler, and every question that is asked before training (centre, corners,
digest), sees one thing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import BaseTrial, FrozenTrial

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue, RaydpError, UnknownName
from raydp.search.dimensions import (
    Scalar,
    candidates,
    choice_at,
    choices_of,
    contains,
    describe,
    from_domain,
    is_numeric,
    middle,
    require_contained,
    scalar,
    suggest,
)

Config = dict[str, Scalar]
DefineByRun = Callable[[optuna.Trial], Mapping[str, Scalar] | None]

_PROBES = 16  # random calls of a define-by-run function that find its names
_MAX_CORNERS = 16
_MAX_GRID = 100_000
# Columns of a two-level design in 16 rows: bit masks of the row number. The first four alone give all 2^4 corners;
# the rest are their products, so that up to 15 dimensions still see each pair of ends together (resolution III).
_DESIGN = (1, 2, 4, 8, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Where the trials of a search come from. Make one with :meth:`from_definition`.

    Attributes:
        distributions: suggested name -> Optuna distribution. For a function: as found by probing it; bounds that
            depend on other suggestions are those of one probe.
        constants: names of a dictionary space that hold one value.
        grids: the names that were written as ``tune.grid_search([...])``.
        function: the define-by-run function, or None for a dictionary space.
        computed: names that the function returns beside its suggestions.
        dynamic: suggested names whose distribution differs between probes, or which not every probe suggests.

    >>> from ray import tune
    >>> from raydp.search.spaces import Space
    >>> space = Space.from_definition({"learning_rate": tune.loguniform(0.25, 4.0), "momentum": 0.9})
    >>> space.names, space.constants, space.centre()
    (('learning_rate', 'momentum'), {'momentum': 0.9}, {'learning_rate': 1.0, 'momentum': 0.9})
    """

    distributions: Mapping[str, BaseDistribution]
    constants: Mapping[str, Scalar] = field(default_factory=dict)
    grids: frozenset[str] = frozenset()
    function: DefineByRun | None = None
    computed: frozenset[str] = frozenset()
    dynamic: frozenset[str] = frozenset()

    @classmethod
    def from_definition(cls, definition: Mapping[str, Any] | DefineByRun | Space) -> Space:
        """Read a space as people write it.

        Args:
            definition: a flat dictionary (name -> Tune domain, ``tune.grid_search([...])`` or constant), or an
                Optuna define-by-run function, which is called a few times with random suggestions to learn its names.

        Raises:
            InvalidValue: a name with a slash or a capital, a domain that Optuna cannot sample (normal, sample_from,
                quantised logarithmic), a nested dictionary, a choice that is not a str, int, float or bool.
        """
        if isinstance(definition, Space):
            return definition
        if isinstance(definition, Mapping):
            return _from_mapping(definition)
        if callable(definition):
            return _from_function(definition)
        raise InvalidValue(
            "space",
            definition,
            "must be a dictionary of Tune domains or a function of an Optuna trial",
            "Write {'learning_rate': tune.loguniform(1e-2, 10)} or def space(trial): …",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a config of this space may hold, sorted: suggested, constant and computed ones."""
        return tuple(sorted({*self.distributions, *self.constants, *self.computed}))

    @property
    def varying(self) -> tuple[str, ...]:
        """The names whose value differs between trials, sorted."""
        suggested = {name for name, found in self.distributions.items() if name in self.dynamic or not found.single()}
        return tuple(sorted(suggested | self.computed))

    def without(self, name: str) -> Space:
        """This space without one of its names, which is then held fixed elsewhere.

        Raises:
            InvalidValue: the space is a function, which proposes what it likes.
        """
        if self.function is not None:
            raise InvalidValue(
                name,
                "fixed",
                "is proposed by the space's function",
                "Change the function, or write a dictionary space.",
            )
        return replace(
            self,
            distributions={key: value for key, value in self.distributions.items() if key != name},
            constants={key: value for key, value in self.constants.items() if key != name},
            grids=self.grids - {name},
        )

    @property
    def is_grid(self) -> bool:
        """Whether a parameter was written as ``tune.grid_search``: only the sampler "grid" visits such a space."""
        return bool(self.grids)

    def suggest(self, trial: BaseTrial) -> Config:
        """The config that ``trial`` proposes.

        Names are suggested in alphabetical order, so that the same seed proposes the same points whatever the order
        in which a dictionary was written or stored.

        Raises:
            InvalidValue: a define-by-run function used a bad name, value or choice, or returned a value that
                contradicts its own suggestion.
        """
        if self.function is None:
            suggested = {name: suggest(trial, name, self.distributions[name]) for name in sorted(self.distributions)}
            return dict(sorted({**suggested, **self.constants}.items()))
        return _call(self.function, trial)

    def replay(self, config: Mapping[str, Any]) -> tuple[Config, dict[str, BaseDistribution]]:
        """The suggested part of an earlier config and the distributions it came from.

        Names that are not of this space (hyperparameters that the search holds fixed) are left out.

        Raises:
            InvalidValue: the space cannot propose this config: it changed, or the config was never its own.
        """
        trial = optuna.trial.FixedTrial(dict(config))
        try:
            with quiet():
                again = self.suggest(trial)
        except ValueError as error:
            raise _foreign(config, str(error)) from error
        changed = sorted(name for name, value in again.items() if name not in config or config[name] != value)
        if changed:
            raise _foreign(config, f"{', '.join(changed)} would differ")
        for name, distribution in trial.distributions.items():
            if not contains(distribution, config[name]):
                raise _foreign(config, f"{name} = {config[name]!r} lies outside {describe(distribution)}")
        return {name: config[name] for name in trial.params}, dict(trial.distributions)

    def check_config(self, config: Mapping[str, Any], *, field: str = "config") -> None:
        """Check a whole or partial config that is to be proposed as it is (a warm start).

        Raises:
            UnknownName: a name that this space does not have.
            InvalidValue: a value that its distribution does not contain, or that the space holds constant or
                computes otherwise: it would be ignored silently.
        """
        for name, value in config.items():
            if name not in self.names:
                raise UnknownName(field, name, self.names)
            if name in self.distributions and name not in self.dynamic:
                require_contained(f"{field}[{name!r}]", value, self.distributions[name])
        study = scratch_study(optuna.samplers.RandomSampler(seed=0))
        with quiet():
            study.enqueue_trial(dict(config))
            trial = study.ask()
            proposed = self.suggest(trial)
        for name, value in config.items():
            if name in trial.distributions:
                require_contained(f"{field}[{name!r}]", value, trial.distributions[name])
            if name not in proposed or proposed[name] != value:
                held = repr(proposed[name]) if name in proposed else "no value with these other values"
                raise InvalidValue(
                    f"{field}[{name!r}]",
                    value,
                    f"would be ignored: the space gives it {held} itself",
                    "Leave it out, or let the space suggest it.",
                )

    def centre(self) -> Config:
        """The middle of every dimension: geometric for logarithmic ones, the middle choice for categorical ones."""
        return self._at(lambda name, distribution: middle(distribution))

    def corners(self) -> list[Config]:
        """Configs at the ends of the numeric dimensions, without repeats.

        All 2^k combinations up to k = 4 numeric dimensions; above that the 16 rows of a two-level fractional design,
        in which (up to 15 dimensions) every pair of dimensions meets at all four combinations of ends. Categorical
        dimensions cycle through their choices from corner to corner. A define-by-run function is asked the same way
        (each suggestion answered with an end of the range that it asks for), so that dependent bounds are kept.
        """
        numeric = [name for name in sorted(self.distributions) if is_numeric(self.distributions[name])]
        column = {name: _DESIGN[i % len(_DESIGN)] for i, name in enumerate(numeric)}
        choices = [len(d.choices) for d in self.distributions.values() if isinstance(d, CategoricalDistribution)]
        rows = min(_MAX_CORNERS, max([2 ** min(len(numeric), 4), *choices]))
        found: dict[str, Config] = {}
        for row in range(rows):

            def end(name: str, distribution: BaseDistribution, row: int = row) -> Scalar:
                if isinstance(distribution, CategoricalDistribution):
                    return choice_at(distribution, row)
                assert isinstance(distribution, FloatDistribution | IntDistribution)
                high = (row & column.get(name, 1)).bit_count() % 2
                return distribution.high if high else distribution.low

            config = self._at(end)
            found.setdefault(canonical(config), config)
        return list(found.values())

    def _at(self, choose: Callable[[str, BaseDistribution], Scalar]) -> Config:
        """The config in which each suggestion is answered by ``choose``."""
        study = scratch_study(_Chosen(choose))
        with quiet():
            return self.suggest(study.ask())

    def grid(self) -> dict[str, list[Scalar]]:
        """The candidates of every suggested name, for the sampler "grid".

        Values of ``grid_search``, choices, all integers of a range, all multiples of a quantised float.

        Raises:
            InvalidValue: a continuous dimension or a function has no finite grid, or the grid is too large.
        """
        if self.function is not None:
            raise InvalidValue(
                "sampler", "grid", "needs a dictionary space: a function has no grid", "Use sampler='random' or 'tpe'."
            )
        found = {name: candidates(name, self.distributions[name]) for name in sorted(self.distributions)}
        size = math.prod(len(values) for values in found.values())
        if size > _MAX_GRID:
            raise InvalidValue(
                "space",
                {name: len(values) for name, values in found.items()},
                f"has {size} grid points, more than {_MAX_GRID}",
                "Write fewer values with tune.grid_search([...]).",
            )
        return found

    def grid_size(self) -> int:
        """The number of points of :meth:`grid`."""
        return math.prod(len(values) for values in self.grid().values())

    def digest(self) -> str:
        """SHA-256 (hex) of what the space can propose, equal in every process.

        A function is digested by what probing finds. Ranges that depend on other suggestions enter by their kind
        only: Optuna lets them change within a study (but never the choices of a categorical parameter).
        """
        record: dict[str, Any] = {
            "distributions": {
                name: [type(found).__name__, getattr(found, "log", None), getattr(found, "step", None)]
                if name in self.dynamic
                else json.loads(distribution_to_json(found))
                for name, found in self.distributions.items()
            },
            "constants": dict(self.constants),
            "computed": sorted(self.computed),
            "dynamic": sorted(self.dynamic),
            "function": self.function is not None,
        }
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """What a run directory stores. A function is described, not stored: its file is."""
        return {
            "function": None if self.function is None else getattr(self.function, "__name__", "space"),
            "distributions": {name: json.loads(distribution_to_json(d)) for name, d in self.distributions.items()},
            "constants": dict(self.constants),
            "grids": sorted(self.grids),
            "computed": sorted(self.computed),
            "dynamic": sorted(self.dynamic),
            "digest": self.digest(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Space:
        """Inverse of :meth:`to_json` for dictionary spaces.

        Raises:
            InvalidValue: the record describes a function, which cannot be rebuilt from JSON.
            CorruptFile: it is no record of a space.
        """
        try:
            if record["function"] is not None:
                raise InvalidValue(
                    "space",
                    record["function"],
                    "is a define-by-run function, which JSON cannot hold",
                    "Give the function itself, from the search's Python file.",
                )
            found = record["distributions"].items()
            return cls(
                distributions={name: json_to_distribution(json.dumps(stored)) for name, stored in found},
                constants=dict(record["constants"]),
                grids=frozenset(record["grids"]),
            )
        except RaydpError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptFile(f"the space of a stored search is damaged ({error}). Restore the file.") from error


def canonical(config: Mapping[str, Any]) -> str:
    """One text for each config, by which equal ones are recognised."""
    return json.dumps(dict(config), sort_keys=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna's own log lines and advice (on studies that nobody sees) off the terminal."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def scratch_study(sampler: BaseSampler) -> Study:
    """A study in memory, made without a word on the terminal."""
    with quiet():
        return optuna.create_study(sampler=sampler)


class _Chosen(BaseSampler):
    """Answers every suggestion with what a function chooses."""

    def __init__(self, choose: Callable[[str, BaseDistribution], Scalar]) -> None:
        self._choose = choose

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._choose(param_name, param_distribution)


def _from_mapping(definition: Mapping[str, Any]) -> Space:
    distributions: dict[str, BaseDistribution] = {}
    constants: Config = {}
    grids = set()
    for name, value in definition.items():
        _validate.name("space name", name)
        if isinstance(value, Mapping):
            if set(value) != {"grid_search"}:
                raise InvalidValue(
                    f"space[{name!r}]",
                    dict(value),
                    "must not be a nested dictionary",
                    "Write one flat dictionary, or tune.grid_search([...]) for a grid.",
                )
            distributions[name] = CategoricalDistribution(choices_of(name, value["grid_search"]))
            grids.add(name)
        elif isinstance(value, str | int | float):
            constants[name] = scalar(f"space[{name!r}]", value)
        else:
            distributions[name] = from_domain(name, value)
    return Space(distributions=distributions, constants=constants, grids=frozenset(grids))


def _from_function(function: DefineByRun) -> Space:
    """Learn the names of a define-by-run function from seeded random calls, and from its centre."""
    seen: dict[str, list[BaseDistribution]] = {}
    returned: set[str] = set()
    samplers = [optuna.samplers.RandomSampler(seed=0), _Chosen(lambda _, distribution: middle(distribution))]
    studies = [(scratch_study(samplers[0]), _PROBES), (scratch_study(samplers[1]), 1)]
    for study, calls in studies:
        for _ in range(calls):
            with quiet():
                trial = study.ask()
                config = _call(function, trial)
            for name, distribution in trial.distributions.items():
                seen.setdefault(name, []).append(distribution)
            returned |= config.keys() - trial.params.keys()
    dynamic = set()
    for name, found in seen.items():
        different = any(other != found[0] for other in found)
        if different and any(isinstance(other, CategoricalDistribution) for other in found):
            raise InvalidValue(
                f"space[{name!r}]",
                describe(found[0]),
                "must offer the same choices in every trial (Optuna refuses choices that change)",
                "Suggest an int or a float with changing bounds instead, or use another name for each set of choices.",
            )
        if different or len(found) < _PROBES + 1:
            dynamic.add(name)
    return Space(
        distributions={name: found[-1] for name, found in seen.items()},
        function=function,
        computed=frozenset(returned - seen.keys()),
        dynamic=frozenset(dynamic),
    )


def _call(function: DefineByRun, trial: BaseTrial) -> Config:
    try:
        returned = function(trial)  # type: ignore[arg-type]
    except optuna.TrialPruned as error:
        raise InvalidValue(
            "space",
            getattr(function, "__name__", "function"),
            "must not raise TrialPruned",
            "Suggest the point; raydp finds what has no solution before training and tells the sampler.",
        ) from error
    suggested: Config = {}
    for name, value in trial.params.items():
        _validate.name("space name", name)
        distribution = trial.distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            choices_of(name, list(distribution.choices))
        suggested[name] = float(value) if isinstance(distribution, FloatDistribution) else value
    if returned is not None and not isinstance(returned, Mapping):
        raise InvalidValue(
            "space", returned, "must return None or a dictionary", "Return {name: value} for values beside suggestions."
        )
    for name, value in (returned or {}).items():
        _validate.name("space name", name)
        value = scalar(f"space[{name!r}]", value)
        if name in suggested and suggested[name] != value:
            raise InvalidValue(
                f"space[{name!r}]",
                value,
                f"contradicts the suggested value {suggested[name]!r}",
                "Return it under another name, or suggest it under another name.",
            )
        suggested.setdefault(name, value)
    return dict(sorted(suggested.items()))


def _foreign(config: Mapping[str, Any], why: str) -> InvalidValue:
    return InvalidValue(
        "space",
        dict(config),
        f"cannot propose this earlier trial any more: {why}",
        "Resume with the space that the search began with, or begin a new search.",
    )
