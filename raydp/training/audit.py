"""Audits of the training path: a certified plan is run for real on public canaries, and its output is attacked.

What is audited is the code, from the sampler to the released weights, under a method's own phases and a budget. A lower
bound above the claim refutes it; one below proves nothing but that this attack did not succeed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydp import _validate, data, models
from raydp.data import canaries
from raydp.errors import InvalidValue
from raydp.methods import PublicExamples, Setting, method
from raydp.methods.base import Config, hyperparameter_types
from raydp.privacy.audit import Audit, OneRunAudit, epsilon_lower_bound, one_run_lower_bound
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.plan import Plan
from raydp.tasks import task
from raydp.training.run import RunSpec, execute

Progress = Callable[[str], None]
_MODEL = "bright_map"
_SMALL = 8  # canaries of a repeated run: one is tested, the others always take part
# What an audit sets itself. Small steps keep every canary's gradient far above the clip norm until the end.
_FIXED: Config = {
    "learning_rate": 0.01,
    "clip_norm": 1.0,
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "schedule": "constant",
    "ema_decay": 0.0,
    "augmentation": "none",
    "augmentation_multiplicity": 1,
}


@dataclass(frozen=True, kw_only=True)
class AuditSpec:
    """What is audited, and how hard.

    Attributes:
        method, config: as of a trial. Step size, clip norm, batch size and the number of steps are the audit's own;
            splits, ratios and the like are the trial's.
        budget: whose claim is attacked. Its epsilon should lie below the attack's reach, about 5 for 1,000 canaries.
        canaries: m >= 10, of the one run.
        runs: >= 10, with the canary and as many without it, of the repeated runs.
        confidence: in (0, 1), of each of the two bounds.
        public, public_limit: a public set of images, for a method that uses one, and how many of them are drawn. They
            are brought to the shape of the canaries (:func:`raydp.data.canaries.write_public`).
        seed: of the coins, the noise and the samples, so that an audit can be repeated. Canaries need no protection.
    """

    method: str
    config: Config
    budget: Budget
    canaries: int = 1000
    runs: int = 200
    confidence: float = 0.95
    public: str | None = None
    public_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _validate.integer("canaries", self.canaries, low=10)
        _validate.integer("runs", self.runs, low=10)
        _validate.between("confidence", self.confidence, 0, 1, low_open=True, high_open=True)
        _validate.integer("seed", self.seed, low=0)


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What both attacks found.

    Attributes:
        spec: what was audited.
        one_run_claim, repeated_claim: epsilon's certified upper bound of the plans that ran.
        one_run, repeated: the lower bounds.
        one_run_scores, included: of each canary.
        with_canary, without_canary: scores of the repeated runs.
    """

    spec: AuditSpec
    one_run_claim: float
    repeated_claim: float
    one_run: OneRunAudit
    repeated: Audit
    one_run_scores: np.ndarray
    included: np.ndarray
    with_canary: np.ndarray
    without_canary: np.ndarray

    @property
    def passed(self) -> bool:
        """Whether no lower bound exceeds its claim."""
        return self.one_run.epsilon_lower <= self.one_run_claim and self.repeated.epsilon_lower <= self.repeated_claim

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form: ``config`` is the trial's, ``ran_with`` the one run's, at the audit's sizes."""
        return {
            "audit": 1,
            "passed": self.passed,
            "method": self.spec.method,
            "config": dict(self.spec.config),
            "ran_with": _config(self.spec, self.spec.canaries),
            "budget": self.spec.budget.to_json(),
            "seed": self.spec.seed,
            "relation": "a canary takes part, or a dark image whose gradient is zero stands in its place",
            "one_run": {
                "claim": self.one_run_claim,
                **dataclasses.asdict(self.one_run),
                "theorem": "Steinke, Nasr & Jagielski 2023, Theorem 5.2",
            },
            "repeated": {
                "claim": self.repeated_claim,
                "runs": 2 * self.spec.runs,
                **dataclasses.asdict(self.repeated),
                "theorem": "Clopper-Pearson limits in the hypothesis test of Kairouz et al. 2015",
            },
        }


def audit(spec: AuditSpec, scratch: Path, *, progress: Progress = lambda line: None) -> AuditReport:
    """Run both attacks.

    Args:
        spec: what to audit.
        scratch: an empty directory for the canaries and the runs.
        progress: is told a line now and then.

    Raises:
        InvalidValue: the method wants public examples and none are given, does not train by gradients, or does not fit
            the canaries.
        Infeasible: the budget has no plan at these sizes.
    """
    _check(spec)
    coins = np.random.default_rng(spec.seed)
    included = coins.random(spec.canaries) < 0.5
    plan, config = _plan(spec, spec.canaries)
    progress(f"one run of {plan.steps} steps with {spec.canaries} canaries, claimed epsilon {plan.epsilon.upper:.4g}")
    examples = canaries.write(scratch / "canaries", included)
    scores = _scores(
        spec, plan, config, examples=examples, directory=scratch / "one", noise=0, population=spec.canaries
    )
    one_run = one_run_lower_bound(scores, included, delta=spec.budget.delta, confidence=spec.confidence)
    progress(f"one run: epsilon >= {one_run.epsilon_lower:.4g} ({one_run.correct} of {one_run.guesses} guesses right)")
    small, config = _plan(spec, _SMALL)
    worlds = []
    for world, present in enumerate((True, False)):
        examples = canaries.write(scratch / f"world-{world}", [present] + [True] * (_SMALL - 1))
        found = []
        for run in range(spec.runs):
            directory = scratch / f"run-{world}-{run}"
            noise = 1 + 2 * run + world
            found.append(
                _scores(spec, small, config, examples=examples, directory=directory, noise=noise, population=_SMALL)[0]
            )
            if (run + 1) % max(1, spec.runs // 4) == 0:
                progress(f"repeated runs {'with' if present else 'without'} the canary: {run + 1} of {spec.runs}")
        worlds.append(np.array(found))
    repeated = epsilon_lower_bound(
        worlds[0], worlds[1], delta=spec.budget.delta, confidence=spec.confidence, seed=spec.seed
    )
    progress(f"repeated runs: epsilon >= {repeated.epsilon_lower:.4g}")
    return AuditReport(
        spec=spec,
        one_run_claim=plan.epsilon.upper,
        repeated_claim=small.epsilon.upper,
        one_run=one_run,
        repeated=repeated,
        one_run_scores=scores,
        included=included,
        with_canary=worlds[0],
        without_canary=worlds[1],
    )


def _check(spec: AuditSpec) -> None:
    chosen = method(spec.method)
    if "learning_rate" not in hyperparameter_types(chosen.hyperparameters):
        raise InvalidValue("method", spec.method, "does not train by gradients", "Audit a search of another method.")
    if _uses_public(spec) and spec.public is None:
        raise InvalidValue(
            "public", None, f"must name public images, for {spec.method} uses public examples", "Name a public set."
        )


def _uses_public(spec: AuditSpec) -> bool:
    chosen = method(spec.method)
    return chosen.uses_public(chosen.parse(spec.config))


def _config(spec: AuditSpec, population: int) -> dict[str, Any]:
    """The trial's config at the audit's sizes: half of the examples a step, eight steps."""
    known = hyperparameter_types(method(spec.method).hyperparameters)
    own = {**_FIXED, "batch_size": population // 2, "epochs": 4, "steps": None}
    if "residual_clip_norm" in known:  # two parts of a gradient are clipped apart, and the one norm has no effect
        del own["clip_norm"]
    return {**spec.config, **{name: value for name, value in own.items() if name in known}}


def _plan(spec: AuditSpec, population: int) -> tuple[Plan, dict[str, Any]]:
    chosen, config = method(spec.method), _config(spec, population)
    phases = chosen.phases(chosen.parse(config), population=population)
    return calibrate(budget=spec.budget, phases=phases, cross_check=()), config


def _scores(
    spec: AuditSpec, plan: Plan, config: Config, *, examples: str, directory: Path, noise: int, population: int
) -> np.ndarray:
    """Train once, and tell for each canary how far the released weights moved along its own (negative) gradient."""
    public = None
    if _uses_public(spec):
        public = str(directory.parent / f"public-{population}.parquet")
        if not Path(public).exists():
            images = data.load_public(spec.public or "", limit=spec.public_limit, seed=spec.seed)
            canaries.write_public(Path(public), images, population)
    run = RunSpec(
        directory=directory,
        key_file=directory.with_suffix(".key"),
        method=spec.method,
        config=config,
        plan=plan,
        data=examples,
        public=public,
        model=_MODEL,
        seed=spec.seed,
        insecure_seed=spec.seed * 1_000_003 + noise,
        reports=1,
    )
    for _ in execute(run):
        pass
    start = _initial_weights(run)
    end = torch.load(directory / "weights.pt", weights_only=True)
    (name,) = start
    moved = (end[name] - start[name]).double().numpy()  # (2, pixels)
    towards = (moved[1] - moved[0])[: canaries.PIXELS * population].reshape(population, canaries.PIXELS).sum(axis=1)
    return np.where(canaries.labels(population) == 1, towards, -towards)


def _initial_weights(run: RunSpec) -> dict[str, Tensor]:
    """The weights before the first private step: as they are made, then changed by public means where a method does."""
    dataset = data.load(run.data)
    private = dataset.private
    model = models.build_model(run.model, input_shape=private.input_shape, outputs=private.outputs, seed=run.seed)
    if run.public is not None:
        public = data.load_public(run.public)
        examples = PublicExamples(
            inputs=dataset.normalization.apply(public.inputs), targets=public.targets, num_classes=public.num_classes
        )
        chosen = method(run.method)
        setting = Setting(
            plan=run.plan,
            model=model,
            seed=run.seed,
            public=examples,
            input_shape=private.input_shape,
            task=task(dataset.task),
            num_classes=private.num_classes,
        )
        chosen.policy(chosen.parse(run.config), setting).prepare()
    return model.state_dict()
