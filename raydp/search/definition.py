"""The search: method, data, budget, space, sampler, resources. It describes; :mod:`raydp.search.runner` acts."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from raydp import _reference, _validate, tasks
from raydp.errors import InvalidValue, UnknownName
from raydp.methods import METHODS, Method, method
from raydp.methods.base import ENGINES, PRECISIONS, Config, Hyperparameters, Scalar, coerce, hyperparameter_types
from raydp.privacy import selection as selections
from raydp.privacy.accountants import ACCOUNTANTS
from raydp.privacy.budget import Budget
from raydp.privacy.plan import SPLITS, Plan
from raydp.privacy.selection import Composition, RandomStopping, Selection, Subsample
from raydp.search import holdout, notebook, subsample
from raydp.search.dimensions import describe
from raydp.search.sampling import SAMPLERS
from raydp.search.sampling import check as check_sampler
from raydp.search.spaces import Space
from raydp.tasks import Task

if TYPE_CHECKING:
    from raydp.cluster import Submission
    from raydp.search.results import Result


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a trial occupies, and how many run at once.

    Attributes:
        num_workers: processes that train one trial together, on one machine or several. ``(low, high)`` lets a trial
            have as many of them as there is room for, and go on with fewer when a machine is lost. The mechanism is the
            same for any number.
        cpus_per_worker: CPU cores of each, and the number of threads that it computes with.
        gpus_per_worker: 0 trains on the CPU. A fraction lets several trials of one worker share a GPU.
        max_concurrent: trials at once; None takes as many as fit the cluster.
        total_cpus: cores of the local cluster that a run starts; None takes those of the machine. Has no meaning when
            an address is given.
        retries: how often a trial whose process died goes on from its checkpoint before it counts as failed.
        time_limit: seconds that a trial may work without a report. It is ended then as one that hangs, which counts as
            the death of its process. None waits for ever.

    >>> from raydp import Resources
    >>> Resources(num_workers=(1, 4), cpus_per_worker=2).workers
    (1, 4)
    """

    num_workers: int | tuple[int, int] = 1
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0
    max_concurrent: int | None = None
    total_cpus: int | None = None
    retries: int = 2
    time_limit: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, Sequence) and not isinstance(self.num_workers, str):
            object.__setattr__(self, "num_workers", tuple(self.num_workers))
            if len(self.workers) != 2:
                raise InvalidValue(
                    "resources.num_workers", self.num_workers, "must be a number or (low, high)", "Write (1, 4), say."
                )
            low = _validate.integer("resources.num_workers[0]", self.workers[0], low=1)
            _validate.integer("resources.num_workers[1]", self.workers[1], low=low)
        else:
            _validate.integer("resources.num_workers", self.num_workers, low=1)
        _validate.integer("resources.cpus_per_worker", self.cpus_per_worker, low=1)
        _validate.between("resources.gpus_per_worker", self.gpus_per_worker, 0, 64)
        if self.gpus_per_worker % 1 and (self.workers != (1, 1) or self.gpus_per_worker > 1):
            raise InvalidValue(
                "resources.gpus_per_worker",
                self.gpus_per_worker,
                "must be a whole number for more than one worker (nccl wants a GPU for each), or below 1 for one",
                "Give each worker one GPU, or set resources.num_workers to 1.",
            )
        _validate.integer("resources.retries", self.retries, low=0)
        for name in ("max_concurrent", "total_cpus"):
            if getattr(self, name) is not None:
                _validate.integer(f"resources.{name}", getattr(self, name), low=1)
        if self.time_limit is not None:
            _validate.positive("resources.time_limit", self.time_limit)

    @property
    def workers(self) -> tuple[int, int]:
        """The least and the greatest number of workers of a trial."""
        return (self.num_workers, self.num_workers) if isinstance(self.num_workers, int) else self.num_workers

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Resources:
        """Inverse of :func:`dataclasses.asdict`, through JSON; earlier versions spoke of trials of one worker."""
        former = {"cpus_per_trial": "cpus_per_worker", "gpus_per_trial": "gpus_per_worker"}
        return cls(**{former.get(name, name): value for name, value in record.items()})


@dataclass(frozen=True, kw_only=True)
class Search:
    """Everything that decides what a search proposes and what each trial may spend.

    Attributes:
        name: also the MLflow experiment; made of a-z, 0-9, '_' and '.'.
        method: one of :data:`raydp.methods.METHODS`. The space may propose ``method`` itself instead; hyperparameters
            that only some of the methods have are then left out for the others.
        data: a data set's name, a path (:func:`raydp.data.load`), or ``file.py:function`` or
            ``package.module:function``, a function that returns a torch data set (:mod:`raydp.data.own`); or that
            function itself, if other processes can import it.
        task: what the model is for, a text that :func:`raydp.tasks.task` reads (a name, with class weights or of
            one's own); None takes what the data set says.
        budget: what *every* trial spends, exactly; under random stopping, what the released result spends.
        space: a dictionary of Ray Tune's functions, or an Optuna define-by-run function.
        fixed: hyperparameters held constant.
        model: a model's name; ``file.py:function`` or ``package.module:function`` for a model of one's own, made by
            that function of ``input_shape`` and ``outputs`` (or the function itself); or the file (``.pt``) of a
            denoiser; None takes the default for the data.
        metric, mode: what is optimised, one of the task's metrics, measured on the hold-out set; tuples for several
            objectives. Without a metric the task's first one; without a mode, whichever way is better.
        trials: how many trials are trained. Infeasible points cost nothing and do not count. Under random stopping the
            number is drawn from the selection's distribution instead, and is a secret.
        seeds: runs of each trial (initial weights 0, 1, …); each is charged; the sampler sees the mean. Of a family of
            private data sets, run i takes member i: other people, who are charged for that run alone.
        sampler: ``tpe``, ``random``, ``gp`` or ``grid``.
        accountant: whose upper bound is held against the budget.
        split: ``composed``, or ``naive`` for comparison.
        selection: how the best trial is chosen and what that costs: one of :mod:`raydp.privacy.selection`, or its text
            (``composition``, ``public``, ``geometric:10``, …).
        seed: of the sampler and of the initial weights. Never of the noise.
        paired: share the noise of a phase between runs of one seed that are the same computation up to there (so that
            tp_topk and tp_rand start from one warm-up). Every run is still charged in full.
        insecure_seed: derive all noise from this public number. For debugging; nothing is private then, and every
            result says so.
        data_limit: use at most this many private examples.
        public: a public data set (a name or a path of Parquet files), for the methods that use one; it must share no
            example with the private data. Only what is computed from it costs no privacy.
        public_limit: how many public examples a run draws at random.
        reports: evaluations (and checkpoints) of a run.
        micro_batch: examples whose gradients are held at once. Speed and memory only.
        engine: how per-example gradients come about: ``auto`` (layer by layer, outer products left as such),
            ``materialized`` (every entry of every example) or ``vmap``. Speed and memory only.
        precision: of forward and backward passes, ``float32`` or ``bfloat16``; clipping, sums and noise are as ever.
        holdout_budget: what each run may release of a private hold-out, whose people are others than those who are
            trained on; it is composed over all runs, beside ``budget``. (Under random stopping it is what the released
            result costs them.) The metric is then released through noise at each of the ``reports``, and nothing else
            is measured. None measures without noise, and labels the metrics of a private hold-out as not private.
        resources: what a trial occupies.
        warm_start: configs that are proposed first.
        after: run directories of earlier searches, whose finished trials the sampler learns from. What they spent on
            the same people is part of what this search costs (:mod:`raydp.search.earlier`).
        small, paper: overrides for ``--scale small`` and ``--scale paper``.

    Raises:
        InvalidValue, UnknownName: before anything is spent.

    >>> from ray import tune
    >>> import raydp
    >>> search = raydp.Search(
    ...     name="rates",
    ...     data="digits",
    ...     budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    ...     space={"learning_rate": tune.loguniform(0.25, 4.0)},
    ...     fixed={"epochs": 8, "batch_size": 128},
    ... )
    >>> search.metrics, search.modes, search.model_name()
    (('accuracy',), ('max',), 'mlp')
    >>> search.run().best  # doctest: +SKIP
    """

    name: str
    method: str = "dp_sgd"
    data: str
    budget: Budget
    space: Mapping[str, Any] | Callable[..., Any] | Space
    fixed: Mapping[str, Scalar] = field(default_factory=dict)
    model: str | None = None
    metric: str | tuple[str, ...] | None = None
    mode: str | tuple[str, ...] | None = None
    trials: int = 20
    seeds: int = 1
    sampler: str = "tpe"
    accountant: str = "pld"
    split: str = "composed"
    selection: Selection | str = field(default_factory=Composition)
    seed: int = 0
    paired: bool = False
    insecure_seed: int | None = None
    data_limit: int | None = None
    public: str | None = None
    public_limit: int | None = None
    task: str | None = None
    reports: int = 5
    micro_batch: int = 1024
    engine: str = "auto"
    precision: str = "float32"
    resources: Resources = Resources()
    warm_start: tuple[Mapping[str, Scalar], ...] = ()
    after: str | tuple[str, ...] = ()
    holdout_budget: Budget | None = None
    small: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate.name("name", self.name)
        for name in ("data", "model", "public", "task"):  # what a run directory keeps is a name that can be resolved
            if callable(getattr(self, name)):
                object.__setattr__(self, name, _reference.reference_to(name, getattr(self, name)))
        for name, kind in (("budget", Budget), ("resources", Resources)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidValue(
                    name, getattr(self, name), f"must be a raydp.{kind.__name__}", f"Write raydp.{kind.__name__}(…)."
                )
        if self.holdout_budget is not None and not isinstance(self.holdout_budget, Budget):
            raise InvalidValue(
                "holdout_budget", self.holdout_budget, "must be a raydp.Budget or None", "Write raydp.Budget(…)."
            )
        if not isinstance(self.fixed, Mapping):
            raise InvalidValue("fixed", self.fixed, "must be a dictionary of hyperparameters", "Write fixed={…}.")
        if isinstance(self.warm_start, Mapping):
            raise InvalidValue("warm_start", self.warm_start, "must be a list of configs", "Write warm_start=[{…}].")
        object.__setattr__(self, "warm_start", tuple(self.warm_start))
        self._check_after()
        _validate.one_of("method", self.method, METHODS)
        _validate.integer("trials", self.trials, low=1)
        _validate.integer("seeds", self.seeds, low=1)
        _validate.integer("seed", self.seed, low=0)
        _validate.integer("reports", self.reports, low=1)
        _validate.integer("micro_batch", self.micro_batch, low=1)
        _validate.one_of("engine", self.engine, ENGINES)
        _validate.one_of("precision", self.precision, PRECISIONS)
        for name in ("data_limit", "public_limit"):
            if getattr(self, name) is not None:
                _validate.integer(name, getattr(self, name), low=1)
        if self.insecure_seed is not None:
            _validate.integer("insecure_seed", self.insecure_seed, low=0)
            if self.paired:
                raise InvalidValue(
                    "paired", True, "has no meaning with insecure_seed, which pairs everything", "Set only one of them."
                )
        low, high = self.resources.workers
        if self.paired and (self.resources.gpus_per_worker or low < high):
            raise InvalidValue(
                "paired",
                True,
                "needs the same floats in each run that shares a phase, which neither GPUs nor a changing number of "
                "workers promise",
                "Train on the CPU (resources.gpus_per_worker = 0) with a fixed number of workers, or do not pair.",
            )
        _validate.one_of("accountant", self.accountant, ACCOUNTANTS)
        _validate.one_of("split", self.split, SPLITS)
        _validate.one_of("sampler", self.sampler, SAMPLERS)
        object.__setattr__(self, "selection", selections.parse(self.selection))
        self._check_objectives()
        object.__setattr__(self, "space", Space.from_definition(self.space))
        self._check_names()
        check_sampler(space=self.point_space, sampler=self.sampler, warm_start=self.warm_start)
        if isinstance(self.selection, RandomStopping):
            self._check_random_stopping()
        holdout.check_definition(self)
        if isinstance(self.selection, Subsample):
            subsample.check_definition(self)

    def _check_after(self) -> None:
        given = (self.after,) if isinstance(self.after, str | Path) else self.after
        if not isinstance(given, Sequence) or not all(isinstance(one, str | Path) and str(one) for one in given):
            raise InvalidValue("after", self.after, "must name run directories", 'Write after="runs/NAME-1".')
        object.__setattr__(self, "after", tuple(map(str, given)))

    def _check_objectives(self) -> None:
        known = self.target_task.metrics
        if self.metric is None:
            object.__setattr__(self, "metric", next(iter(known)))
        for metric in self.metrics:
            _validate.one_of(f"metric of the task {self.task_name}", metric, known)
        if self.mode is None:
            modes = tuple(known[metric] for metric in self.metrics)
            object.__setattr__(self, "mode", modes[0] if isinstance(self.metric, str) else modes)
        if not self.metrics:
            raise InvalidValue("metric", self.metric, "must name at least one metric", "Write metric='accuracy'.")
        if len(self.metrics) != len(self.modes):
            raise InvalidValue("mode", self.mode, f"must name one mode for each of {self.metrics}", "Write max or min.")
        for mode in self.modes:
            _validate.one_of("mode", mode, ("max", "min"))

    def _check_random_stopping(self) -> None:
        """Refuse what voids the theorem: runs must be independent draws of one mechanism, and only the best is seen."""
        because = "void random stopping, whose theorem"
        rules: tuple[tuple[str, Any, bool, str, str], ...] = (
            (
                "sampler",
                self.sampler,
                self.sampler == "random",
                f"would {because} asks for independent proposals from one fixed distribution: none may depend "
                "on what an earlier trial scored, or leave out what was tried",
                "Set sampler='random', or selection='composition'.",
            ),
            (
                "warm_start",
                [dict(config) for config in self.warm_start],
                not self.warm_start,
                f"would {because} asks for the same distribution in every proposal, also the first",
                "Leave it out, or set selection='composition'.",
            ),
            (
                "after",
                self.after,
                not self.after,
                f"would {because} is about this search's trials alone: it neither learns from earlier ones nor covers "
                "what they spent",
                "Leave it out, or set selection='composition'.",
            ),
            (
                "seeds",
                self.seeds,
                self.seeds == 1,
                f"would {because} counts each run: several runs of a config would be one run of a costlier mechanism",
                "Set seeds=1, or selection='composition'.",
            ),
            (
                "paired",
                self.paired,
                not self.paired,
                f"would {because} asks for runs with independent noise",
                "Set paired=False, or selection='composition'.",
            ),
            (
                "metric",
                self.metrics,
                len(self.metrics) == 1,
                f"would {because} releases the one best trial by one score, not a Pareto set",
                "Name one metric, or set selection='composition'.",
            ),
            (
                "accountant",
                self.accountant,
                self.accountant == "pld",
                "has no privacy profile, from which random stopping is solved",
                "Set accountant='pld'.",
            ),
        )
        for name, value, holds, rule, remedy in rules:
            if not holds:
                raise InvalidValue(name, value, rule, remedy)

    def _check_names(self) -> None:
        """Every name in ``space`` and ``fixed`` belongs to a method that can be proposed; no name stands in both."""
        known: dict[str, Any] = {"method": str}
        for candidate in self.methods:
            known.update(hyperparameter_types(candidate.hyperparameters))
        for name in (*self.point_space.names, *self.fixed):
            if name not in known:
                raise UnknownName(f"hyperparameter of {', '.join(m.name for m in self.methods)}", name, known)
        for name in sorted(set(self.point_space.names) & set(self.fixed)):
            raise InvalidValue(
                f"fixed[{name!r}]", self.fixed[name], "is also proposed by the space", "Leave it out of one of the two."
            )
        if "method" in self.fixed:
            raise InvalidValue("fixed['method']", self.fixed["method"], "is a field of the Search", "Set method=….")
        for candidate in self.methods:
            candidate.parse(self._for_method(candidate, self.fixed))

    @property
    def point_space(self) -> Space:
        """The space as one kind of object (also when it was given as a dictionary or a function)."""
        assert isinstance(self.space, Space)
        return self.space

    @property
    def metrics(self) -> tuple[str, ...]:
        """The objectives' metrics, always a tuple."""
        assert self.metric is not None  # filled in at construction
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def modes(self) -> tuple[str, ...]:
        """The objectives' directions, always a tuple."""
        assert self.mode is not None
        return (self.mode,) if isinstance(self.mode, str) else tuple(self.mode)

    @property
    def task_name(self) -> str:
        """The task that was chosen, or the data set's."""
        from raydp import data

        return data.task_of(self.data) if self.task is None else tasks.canonical(self.task)

    @property
    def target_task(self) -> Task:
        """What the model is for."""
        return tasks.task(self.task_name)

    @property
    def rule(self) -> Selection:
        """The selection as one kind of object (also when it was given as text)."""
        assert not isinstance(self.selection, str)
        return self.selection

    @cached_property
    def trial_budget(self) -> Budget:
        """What each trial spends: the budget, or under random stopping what is solved from it.

        The plan at the centre of the space is the reference (:mod:`raydp.privacy.selection_budget`). This takes
        seconds, and is done once a search: a run directory keeps the answer.

        Raises:
            Infeasible, InvalidValue: the centre has no plan.
        """
        if not isinstance(self.rule, RandomStopping):
            return self.budget
        from raydp.privacy.calibration import delta_at
        from raydp.privacy.selection_bounds import Profile
        from raydp.privacy.selection_budget import refined

        centre = self.point_space.centre()

        def profile_at(budget: Budget) -> Profile:
            return delta_at(self.plan_for(centre, budget, cross_check=()).mechanisms, budget)

        return refined(self.rule, self.budget, profile_at)

    @property
    def data_source(self) -> str:
        """The data set's name, or an absolute path: other processes have other working directories."""
        return _source(self.data)

    @property
    def public_source(self) -> str | None:
        """The public data set's name or absolute path, if there is one."""
        return None if self.public is None else _source(self.public)

    @property
    def after_directories(self) -> tuple[str, ...]:
        """Absolute paths of the earlier searches' run directories."""
        return tuple(str(Path(path).expanduser().resolve()) for path in self.after)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that a trial of this search can have."""
        distribution = self.point_space.distributions.get("method")
        if distribution is not None:
            return tuple(method(str(name)) for name in distribution.choices)  # type: ignore[attr-defined]
        return (method(str(self.point_space.constants.get("method", self.method))),)

    def point(self, config: Mapping[str, Scalar]) -> tuple[Method, Hyperparameters, dict[str, Scalar]]:
        """The method of a proposed config, its parsed hyperparameters, and the config that they were parsed from."""
        chosen = method(str(config.get("method", self.method)))
        values = self._for_method(chosen, {**self.fixed, **config})
        return chosen, chosen.parse(values), values

    def _for_method(self, chosen: Method, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """``values`` without ``method``, and without what belongs to other methods of the same search."""
        values = {name: value for name, value in values.items() if name != "method"}
        if len(self.methods) == 1:
            return values
        own = hyperparameter_types(chosen.hyperparameters)
        others = {name for other in self.methods for name in hyperparameter_types(other.hyperparameters)}
        return {name: value for name, value in values.items() if name in own or name not in others}

    def plan_for(
        self,
        config: Config,
        budget: Budget | None = None,
        *,
        cross_check: Sequence[str] = ("pld", "prv", "rdp"),
        final: bool = False,
    ) -> Plan:
        """The certified plan of a proposed config, from the cache where it was made before.

        Args:
            budget: of the trial; None takes :attr:`trial_budget`.
            cross_check: accountants whose bounds join the certificate.
            final: of the final run after tuning on a subsample, whose config is one of :meth:`final_config`.

        Raises:
            Infeasible: no noise multiplier exists; with the reason.
            InvalidValue, UnknownName: the config is not one of the method.

        >>> from ray import tune
        >>> import raydp
        >>> search = raydp.Search(
        ...     name="splits",
        ...     method="tp_topk",
        ...     data="digits",
        ...     budget=raydp.Budget(epsilon=3.0, delta=1e-5),
        ...     space={"warmup_share": tune.uniform(0.1, 0.6)},
        ... )
        >>> plan = search.plan_for({"warmup_share": 0.3})
        >>> [phase.name for phase in plan.phases], 3.0 * (1 - 1e-4) <= plan.epsilon.upper <= 3.0
        (['warmup', 'sparse'], True)
        """
        from raydp.privacy.cache import PlanCache
        from raydp.privacy.calibration import calibrate

        chosen, hyperparameters, _ = self.point(config)
        return calibrate(
            budget=budget or self.trial_budget,
            phases=chosen.phases(hyperparameters, population=self.population(final=final)),
            accountant=self.accountant,
            split=self.split,
            cross_check=cross_check,
            cache=PlanCache(),
        )

    def population(self, *, final: bool = False) -> int:
        """The public number of private examples that plans are made for: of all, or of a secret part.

        Args:
            final: of the final run after tuning on a subsample.
        """
        from raydp import data

        whole = len(data.load(self.data, limit=self.data_limit).private)
        return subsample.population(self, whole, final=final)

    def final_config(self, config: Config) -> dict[str, Scalar]:
        """The config of the final run after tuning on a subsample, from that of a trial."""
        _, hyperparameters, _ = self.point(config)
        return subsample.final_config(self, hyperparameters, config)

    def holdout_plan_for(self, plan: Plan, budget: Budget | None = None) -> Plan | None:
        """The certified plan of what a run under ``plan`` releases of a private hold-out; None without a budget.

        Args:
            budget: of the run; None takes ``holdout_budget``, or under random stopping what is solved from it.
        """
        return holdout.plan_for(self, plan, budget)

    def model_name(self) -> str:
        """The model (a name, or the absolute path of its file), or the default for the data's image size."""
        from raydp import data, models

        if self.model is not None:
            return models.model_source(self.model)
        private = data.load(self.data, limit=self.data_limit).private
        return models.default_model(private.input_shape, outputs=private.outputs)

    def with_overrides(self, overrides: Mapping[str, Any]) -> Search:
        """A search with some fields or fixed hyperparameters replaced; what ``--set field=value`` does.

        Args:
            overrides: name -> value, or -> text that is read by the field's type. Names are fields of the Search,
                ``budget.epsilon``, ``resources.cpus_per_worker``, …, or hyperparameters (``fixed.`` may precede them),
                which are then held fixed and leave the space.

        Raises:
            UnknownName: no such name; near names are suggested.
            InvalidValue: the value does not have the field's type, or the space's function proposes that name.

        >>> from ray import tune
        >>> import raydp
        >>> budget, space = raydp.Budget(epsilon=3.0, delta=1e-5), {"learning_rate": tune.loguniform(0.25, 4.0)}
        >>> search = raydp.Search(name="rates", data="digits", budget=budget, space=space)
        >>> changed = search.with_overrides({"budget.epsilon": "1", "learning_rate": "0.5", "trials": "3"})
        >>> changed.budget.epsilon, changed.fixed["learning_rate"], changed.point_space.names, changed.trials
        (1.0, 0.5, (), 3)
        """
        changes: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {"budget": {}, "resources": {}}
        parts = {"budget": self.budget, "resources": self.resources}
        if self.holdout_budget is not None:
            nested["holdout_budget"], parts["holdout_budget"] = {}, self.holdout_budget
        own = {name: kind for name, kind in get_type_hints(Search).items() if _is_plain(kind)}
        own["space"] = own["fixed"] = own["selection"] = object
        hyperparameters: dict[str, Any] = {}
        for name, value in overrides.items():
            head, _, tail = name.partition(".")
            if head in nested and tail:
                kinds = get_type_hints(type(parts[head]))
                _validate.one_of(f"field of {head}", tail, kinds)
                nested[head][tail] = _read(name, value, kinds[tail])
            elif name in ("space", "fixed") and isinstance(value, str):
                raise InvalidValue(
                    "--set", f"{name}={value}", "is not one value", "Set each hyperparameter by its own name."
                )
            elif name in own:
                changes[name] = value if own[name] is object else _read(name, value, own[name])
            else:
                hyperparameters[name.removeprefix("fixed.")] = value
        for head, found in nested.items():
            if found:
                changes[head] = replace(parts[head], **found)  # type: ignore[type-var]
        base = self._with_hyperparameters(hyperparameters, str(changes.get("method", self.method)), own)
        return replace(self, **{**base, **changes})

    def _with_hyperparameters(self, found: Mapping[str, Any], chosen: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Changes to ``fixed`` and ``space`` that hold these hyperparameters constant."""
        if not found:
            return {}
        methods = self.methods if len(self.methods) > 1 else (method(chosen),)
        kinds: dict[str, Any] = {}
        for candidate in methods:
            kinds.update(hyperparameter_types(candidate.hyperparameters))
        fixed, space = dict(self.fixed), self.point_space
        for name, value in found.items():
            if name not in kinds:
                near = {*kinds, *own, *(f"budget.{f.name}" for f in dataclasses.fields(Budget))}
                raise UnknownName("--set", name, near | {f"resources.{f.name}" for f in dataclasses.fields(Resources)})
            fixed[name] = _read(name, value, kinds[name])
            if name in space.names:
                space = space.without(name)
        return {"fixed": fixed, "space": space}

    def scaled(self, scale: str) -> Search:
        """The search with its ``small`` or ``paper`` overrides applied.

        >>> from ray import tune
        >>> import raydp
        >>> budget, space = raydp.Budget(epsilon=3.0, delta=1e-5), {"learning_rate": tune.loguniform(0.25, 4.0)}
        >>> search = raydp.Search(name="rates", data="digits", budget=budget, space=space, small={"trials": 2})
        >>> search.scaled("small").trials
        2
        """
        _validate.one_of("scale", scale, ("small", "paper"))
        overrides = self.small if scale == "small" else self.paper
        if not overrides:
            raise InvalidValue("scale", scale, f"is not defined by the search {self.name!r}", f"Define {scale}={{…}}.")
        return self.with_overrides(overrides)

    def _repr_html_(self) -> str:
        """For notebooks: what is searched, what is fixed, and what is spent."""
        space = self.point_space
        domains = [(name, describe(found)) for name, found in sorted(space.distributions.items())]
        budget, stops = self.budget, isinstance(self.rule, RandomStopping)
        number = (
            f"mean {self.rule.runs.mean:g}, at random" if isinstance(self.rule, RandomStopping) else f"{self.trials}"
        )
        items = {
            "method": ", ".join(found.name for found in self.methods),
            "data": self.data,
            "public data": self.public or "",
            "model": self.model or "",
            f"{'the released result' if stops else 'every trial'} spends": (
                f"ε = {budget.epsilon:g}, δ = {budget.delta:g}, {budget.adjacency}"
            ),
            "selection": "" if isinstance(self.rule, Composition) else self.rule.rule,
            "space": "\n".join(f"{name}: {domain}" for name, domain in domains),
            "fixed": "\n".join(f"{name} = {value}" for name, value in {**space.constants, **self.fixed}.items()),
            "metric": ", ".join(f"{name} ({mode})" for name, mode in zip(self.metrics, self.modes, strict=True)),
            "trials": f"{number}, {self.seeds} seed{'' if self.seeds == 1 else 's'} each, by {self.sampler}",
        }
        return notebook.facts(f"Search {self.name}", items)

    def to_json(self) -> dict[str, Any]:
        """What a run directory stores; a define-by-run function is described, its file is kept beside it."""
        from raydp import data

        record = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name
            not in ("budget", "space", "resources", "small", "paper", "selection", "holdout_budget", "after")
        }
        record["selection"] = self.rule.to_json()
        record["data"], record["public"] = self.data_source, self.public_source
        record["family"] = data.is_family(self.data_source)  # decides which private set a run takes
        record["model"] = None if self.model is None else self.model_name()
        record["fixed"] = dict(self.fixed)
        record["warm_start"] = [dict(config) for config in self.warm_start]
        record["metric"], record["mode"] = list(self.metrics), list(self.modes)
        record["budget"] = self.budget.to_json()
        if self.holdout_budget is not None:  # left out otherwise, as in run directories of earlier versions
            record["holdout_budget"] = self.holdout_budget.to_json()
        if self.after:  # left out otherwise, likewise
            record["after"] = list(self.after_directories)
        record["resources"] = dataclasses.asdict(self.resources)
        record["space"] = self.point_space.to_json()
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any], space: Space | Callable[..., Any] | None = None) -> Search:
        """Inverse of :meth:`to_json`. ``space`` must be given when the space is a function.

        Raises:
            InvalidValue: the given space proposes other things than the one that was stored.
        """
        values = dict(record)
        stored = values.pop("space")
        values.pop("family", None)  # follows from the data
        found = Space.from_json(stored) if space is None else Space.from_definition(space)
        if found.digest() != stored["digest"]:
            raise InvalidValue(
                "space",
                found.names,
                f"is not the space that the search began with ({', '.join(stored['distributions'])})",
                "Restore the file of the search, or start a new search.",
            )
        values["metric"] = tuple(values["metric"]) if len(values["metric"]) > 1 else values["metric"][0]
        values["mode"] = tuple(values["mode"]) if len(values["mode"]) > 1 else values["mode"][0]
        values["budget"] = Budget.from_json(values["budget"])
        if "holdout_budget" in values:
            values["holdout_budget"] = Budget.from_json(values["holdout_budget"])
        values["resources"] = Resources.from_json(values["resources"])
        if "selection" in values:  # run directories of earlier versions have none: they composed
            values["selection"] = selections.from_json(values["selection"])
        values["warm_start"] = tuple(values["warm_start"])
        values["after"] = tuple(values.get("after", ()))
        return cls(space=found, **values)

    def run(
        self,
        *,
        storage: str | Path | None = None,
        tracking_uri: str | None = None,
        address: str | None = None,
        quiet: bool = False,
    ) -> Result:
        """Run the search, or go on with the one in ``storage`` if it is this search.

        Args:
            storage: the run directory; None makes ``runs/<name>-<n>``.
            tracking_uri: of an MLflow server; None takes a SQLite file in the run directory.
            address: of a Ray cluster; None starts a local one and shuts it down afterwards.
            quiet: print nothing.

        Returns:
            The :class:`raydp.search.results.Result`.
        """
        from raydp.search import runner

        return runner.run(
            self,
            storage=None if storage is None else Path(storage),
            tracking_uri=tracking_uri,
            address=address,
            quiet=quiet,
        )

    def submit(
        self,
        *,
        address: str,
        storage: str | None = None,
        tracking_uri: str | None = None,
        python: str | None = None,
    ) -> Submission:
        """Run the search on a cluster that goes on without this process, or attach to the job that runs it already.

        Submitting the same search again goes on with it where it ended early. Paths of data and models must be those
        of the cluster's nodes. What is not in the definition (a space's Python function) travels with its file only:
        ``raydp submit FILE``.

        Args:
            address: of the cluster's jobs API, ``http://HOST:8265``.
            storage: run directory on the cluster, a path that all its nodes see.
            tracking_uri: of an MLflow server that the cluster reaches.
            python: interpreter on the cluster; None takes that of its workers.

        Returns:
            The :class:`raydp.cluster.Submission`; follow its job with :mod:`raydp.cluster`, or ``raydp logs -f ID``.

        Raises:
            InvalidValue: the space is a function, or whatever :func:`raydp.cluster.submit` refuses.
        """
        import json
        import tempfile

        from raydp import cluster

        definition = self.to_json()
        if definition["space"]["function"] is not None:
            raise InvalidValue(
                "space",
                definition["space"]["function"],
                "is a Python function, which travels with its file only",
                "Write the search into a file, and call `raydp submit FILE`.",
            )
        options = [] if tracking_uri is None else ["--tracking-uri", tracking_uri]
        text = json.dumps(json.dumps(definition, sort_keys=True))
        with tempfile.TemporaryDirectory(prefix="raydp-search-") as directory:
            file = Path(directory) / "search.py"
            file.write_text(
                f"import json\n\nimport raydp\n\nsearch = raydp.Search.from_json(json.loads({text}))\n",
                encoding="utf-8",
            )
            return cluster.submit(
                file, name=self.name, address=address, storage=storage, options=options, python=python
            )


def _source(name_or_path: str) -> str:
    from raydp import data

    if _reference.is_reference(name_or_path):
        return _reference.absolute(name_or_path)
    return name_or_path if data.is_named(name_or_path) else str(Path(name_or_path).expanduser().resolve())


def _is_plain(kind: Any) -> bool:
    """Whether a field can be read from text: a scalar, or a union of scalars and tuples of strings."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return all(option in (str, int, float, bool, type(None), tuple[str, ...]) for option in options)


def _read(name: str, value: Any, kind: Any) -> Any:
    """``value`` as the field's type: text is read, other values are checked."""
    if get_origin(kind) is Literal:  # its values are checked where the field is
        kind = str
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if not isinstance(value, str):
        plain = tuple(option for option in options if get_origin(option) is not tuple)
        return value if isinstance(value, tuple) and plain != options else coerce(name, value, kind)
    if type(None) in options and value.lower() in ("none", ""):
        return None
    readers: dict[Any, Callable[[str], Any]] = {
        bool: lambda text: {"true": True, "false": False}[text.lower()],
        int: int,
        float: float,
    }
    if tuple[int, int] in options and "," in value:
        readers = {int: lambda text: tuple(int(part) for part in text.split(","))}
    for option, reader in readers.items():
        if option in options:
            try:
                return reader(value)
            except (ValueError, KeyError):
                continue
    if tuple[str, ...] in options and "," in value:
        return tuple(part.strip() for part in value.split(","))
    if str in options:
        return value
    words = {type(None): "none", bool: "true or false", tuple[int, int]: "low,high"}
    wanted = " or ".join(words.get(option) or option.__name__ for option in options)
    raise InvalidValue(name, value, f"must be {wanted}", f"Write --set {name}=<{wanted}>.")


__all__ = ["Resources", "Search"]
