"""Calibration: the noise multipliers with which a trial's phases spend exactly its budget.

All phases but the last are calibrated alone, each to its nominal share of epsilon at the full delta. The last one takes
what the *composition* leaves (``split="composed"``). Adding epsilons up instead (``split="naive"``) is private as well
and wastes a quarter of the budget; its certificate shows how much.

A budget with further points is met at each of them: the last sigma is the largest that any point asks for, so that
one of them is met exactly and the others with room to spare.

Epsilon is smooth in sigma, so a bracketed secant on (log sigma, log epsilon) needs a handful of evaluations, started
where the composition would be Gaussian. What is searched is the upper bound itself, at the rounded sigma that is
returned: calibration and certificate cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from raydp import _validate
from raydp.errors import Infeasible, InvalidValue, RaydpError
from raydp.privacy import gaussian
from raydp.privacy.accountants import ACCOUNTANTS, accountant_for, evaluate, pld, profiles
from raydp.privacy.accountants.refusal import Refused
from raydp.privacy.budget import Adjacency, Budget
from raydp.privacy.cache import PlanCache, plan_key
from raydp.privacy.mechanism import Mechanism, Phase, PhaseSpec
from raydp.privacy.plan import SPLITS, Interval, Plan

# The certified upper bound of a composed plan ends in [epsilon (1 - SLACK), epsilon].
SLACK = 1e-4
_AIM = 1 - 2e-5
_ACCEPT = 1 - 8e-5
_SMALLEST_SIGMA, _LARGEST_SIGMA = 1e-3, 1e12
_EVALUATIONS = 80


def calibrate(
    *,
    budget: Budget,
    phases: Sequence[PhaseSpec],
    accountant: str = "pld",
    split: str = "composed",
    cross_check: Sequence[str] = ("pld", "prv", "rdp"),
    cache: PlanCache | None = None,
) -> Plan:
    """Solve for every noise multiplier and certify the result.

    Args:
        budget: what the trial may spend.
        phases: in order of execution; every one but the last with a nominal ``share`` of epsilon.
        accountant: whose upper bound is held against the budget.
        split: ``composed`` or ``naive``.
        cross_check: further accountants whose bounds join the certificate.
        cache: where solved plans are kept, or None.

    Returns:
        A Plan. ``composed``: its certified upper bound lies in [epsilon (1 - 1e-4), epsilon]; with further points, that
        is so at one of the points, and none is exceeded. Where every phase is a Gaussian on all data and the accountant
        is pld, epsilon is exact and sigma the least there is, up to rounding. A phase of ``classical`` calibration
        spends what the certificate says.

    Raises:
        InvalidValue: no phase, a missing or superfluous share, two phases of one name.
        UnknownName: no such accountant or split.
        Infeasible: no noise multiplier makes the plan spend its budget; says which phase, and the nearest split.
        RaydpError: two accountants contradict each other.

    Two phases; the second takes what the composition leaves:

    >>> from raydp.privacy import Budget, PhaseSpec, calibrate
    >>> sizes = {"batch_size": 256, "population": 4000, "clip_norm": 1.0}
    >>> warmup = PhaseSpec(name="warmup", steps=25, share=0.3, **sizes)
    >>> sparse = PhaseSpec(name="sparse", steps=100, **sizes)
    >>> plan = calibrate(budget=Budget(epsilon=3.0, delta=1e-5), phases=[warmup, sparse])
    >>> [(phase.name, round(phase.noise_multiplier, 2)) for phase in plan.phases]
    [('warmup', 1.76), ('sparse', 1.27)]
    >>> sorted(plan.certificate), 3.0 * (1 - 1e-4) <= plan.epsilon.upper <= 3.0
    (['pld', 'prv', 'rdp'], True)
    """
    phases = tuple(phases)
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    _validate.one_of("split", split, SPLITS)
    cross_check = tuple(_validate.one_of("cross_check", name, ACCOUNTANTS) for name in cross_check)
    _check_phases(phases)
    # Noise multipliers are relative to clip norms, so a plan is solved, and kept, once for all clip norms.
    solved = tuple(replace(spec, clip_norm=1.0) for spec in phases)
    key = plan_key(budget=budget, phases=solved, accountant=accountant, split=split, cross_check=cross_check)
    if cache is not None and (known := cache.get(key)) is not None:
        # A file of that name is believed only as far as it answers this question.
        asked = (budget, solved, accountant, split)
        if (known.budget, tuple(phase.spec for phase in known.phases), known.accountant, known.split) == asked:
            return _clipped(known, phases)
    plan = _solve(budget, solved, accountant, split, cross_check)
    if cache is not None:
        cache.put(key, plan)
    return _clipped(plan, phases)


def _clipped(plan: Plan, phases: tuple[PhaseSpec, ...]) -> Plan:
    """The plan with these phases' clip norms, on which nothing else in it depends."""
    specs = zip(plan.phases, phases, strict=True)
    return replace(plan, phases=tuple(replace(phase, spec=spec) for phase, spec in specs))


def _check_phases(phases: tuple[PhaseSpec, ...]) -> None:
    names = [spec.name for spec in phases]
    if not names or len(set(names)) != len(names):
        raise InvalidValue("phases", names, "must be one or more phases of different names", "Name each once.")
    for spec in phases[:-1]:
        if spec.share is None:
            raise InvalidValue(
                f"{spec.name}.share", None, "must be given for every phase but the last", "Give it a share in (0, 1)."
            )
    if phases[-1].share is not None:
        raise InvalidValue(
            f"{phases[-1].name}.share",
            phases[-1].share,
            "must be None for the last phase, which takes what the composition leaves",
            "Leave it out.",
        )
    if len(phases) > 1 and any(spec.calibration == "classical" for spec in phases):
        raise InvalidValue("calibration", "classical", "is for the only phase of a plan", "Choose 'exact'.")


def _solve(
    budget: Budget, phases: tuple[PhaseSpec, ...], accountant: str, split: str, cross_check: tuple[str, ...]
) -> Plan:
    solver = _Solver(budget, accountant)
    *earlier, last = phases
    solved: list[Phase] = []
    for spec in earlier:
        share = spec.share or 0.0
        sigma = solver.sigma(spec, (), budget.epsilon * share, nominal=True)
        solved.append(Phase(spec=spec, noise_multiplier=sigma))
    fixed = tuple(phase.mechanism for phase in solved)
    nominal = sum(spec.share or 0.0 for spec in earlier)
    if split == "naive":
        if nominal > 1 - SLACK:
            shrunk = {spec.name: (spec.share or 0.0) * 0.99 / nominal for spec in earlier}
            raise Infeasible(last.name, f"the shares of the phases before it add up to {nominal:.6g}", shrunk)
        sigma = solver.sigma(last, (), budget.epsilon * (1 - nominal))
    else:
        spent = solver.upper(fixed) if len(fixed) > 1 else budget.epsilon * nominal
        if spent > budget.epsilon * (1 - SLACK):
            reason = f"the phases before it already spend epsilon = {spent:.6g} of {budget.epsilon:.6g}"
            raise Infeasible(last.name, reason, _nearest(solver, earlier))
        sigma = (
            _classical(solver, last) if last.calibration == "classical" else solver.sigma(last, fixed, budget.epsilon)
        )
    sigma = _further(budget, last, fixed, sigma)
    solved.append(Phase(spec=last, noise_multiplier=sigma))
    mechanisms = tuple(phase.mechanism for phase in solved)
    certificate = {accountant: solver.certificate(mechanisms)}
    for name in cross_check:
        if name not in certificate:
            other = evaluate(accountant_for(name), mechanisms, delta=budget.delta, adjacency=budget.adjacency)
            if other.lower > certificate[accountant].upper:
                raise RaydpError(
                    f"accountants contradict each other: {name} proves epsilon >= {other.lower:.9g}, "
                    f"{accountant} claims <= {certificate[accountant].upper:.9g} for {mechanisms}. Report it."
                )
            certificate[name] = other
    return Plan(
        budget=budget,
        phases=tuple(solved),
        certificate=certificate,
        accountant=accountant,
        split=split,
        further=tuple(delta_at(mechanisms, budget)(epsilon) for epsilon, _ in budget.further),
    )


def _further(budget: Budget, last: PhaseSpec, fixed: tuple[Mechanism, ...], sigma: float) -> float:
    """The smallest noise multiplier from ``sigma`` on with which the further points of the budget hold too."""
    for epsilon, delta in budget.further:

        def upper(value: float, epsilon: float = epsilon) -> float:
            mechanism = Mechanism(noise_multiplier=value, sample_rate=last.sample_rate, steps=last.steps)
            return delta_at((*fixed, mechanism), budget)(epsilon)

        if upper(sigma) <= delta:
            continue
        if fixed and delta_at(fixed, budget)(epsilon) > delta * (1 - SLACK):
            raise Infeasible(
                last.name,
                f"the phases before it already exceed delta = {delta:.4g} at epsilon = {epsilon:.4g}, which the "
                "selection asks of every trial. Lower their shares",
            )
        sigma = _search(upper, delta, sigma, last)
    return sigma


def delta_at(mechanisms: tuple[Mechanism, ...], budget: Budget) -> Callable[[float], float]:
    """Certified upper bounds of delta, on the grid that suits the budget's main point."""
    return profiles.profile(mechanisms, adjacency=budget.adjacency, epsilon=budget.epsilon, delta=budget.delta)


def _classical(solver: _Solver, spec: PhaseSpec) -> float:
    """Sigma of the classical formula for T releases of equal noise, if it keeps to the budget.

    Raises:
        Infeasible: it does not; with its true epsilon and the sigma that would.
    """
    budget = solver.budget
    sigma = math.sqrt(spec.steps) * gaussian.classical_noise_multiplier(budget)
    spent = solver.upper((Mechanism(noise_multiplier=sigma, sample_rate=1.0, steps=spec.steps),))
    if spent > budget.epsilon:
        needed = math.sqrt(spec.steps) * gaussian.noise_multiplier(budget)
        raise Infeasible(
            spec.name,
            f"the classical formula gives sigma = {sigma:.6g}, which spends epsilon = {spent:.4g} and not "
            f"{budget.epsilon:g} at delta = {budget.delta:g}: it is proven for epsilon < 1 only. The analytic "
            f"calibration takes sigma = {needed:.6g}",
        )
    return sigma


def _nearest(solver: _Solver, earlier: Sequence[PhaseSpec]) -> dict[str, float]:
    """The largest common scaling of the earlier shares that leaves the last phase half a percent of epsilon."""
    budget = solver.budget
    low, high = 0.0, min(1.0, 0.995 / max(spec.share or 0.0 for spec in earlier))
    for _ in range(8 if len(earlier) > 1 else 0):
        middle = (low + high) / 2
        fixed = tuple(
            Phase(
                spec=spec, noise_multiplier=solver.sigma(spec, (), budget.epsilon * (spec.share or 0.0) * middle)
            ).mechanism
            for spec in earlier
        )
        low, high = (middle, high) if solver.upper(fixed) <= 0.995 * budget.epsilon else (low, middle)
    scale = low if len(earlier) > 1 else high
    return {spec.name: (spec.share or 0.0) * scale for spec in earlier}


class _Solver:
    """Smallest noise multipliers under one budget's delta and adjacency by one accountant."""

    def __init__(self, budget: Budget, accountant: str) -> None:
        self.budget, self.accountant = budget, accountant
        self._last: tuple[tuple[Mechanism, ...], Interval] | None = None

    def upper(self, mechanisms: tuple[Mechanism, ...]) -> float:
        """The certified upper bound; infinite where there is none."""
        try:
            return self._interval(mechanisms).upper
        except Refused:
            return math.inf

    def certificate(self, mechanisms: tuple[Mechanism, ...]) -> Interval:
        """The interval that the search of the last sigma ended with, or a fresh one."""
        if self._last is not None and self._last[0] == mechanisms:
            return self._last[1]
        return self._interval(mechanisms)

    def _interval(self, mechanisms: tuple[Mechanism, ...]) -> Interval:
        return evaluate(
            accountant_for(self.accountant, precise=True),
            mechanisms,
            delta=self.budget.delta,
            adjacency=self.budget.adjacency,
        )

    def sigma(self, spec: PhaseSpec, fixed: tuple[Mechanism, ...], target: float, *, nominal: bool = False) -> float:
        """Smallest sigma of ``spec`` with which ``fixed`` and it stay within ``target``; rounded up.

        ``nominal``: the target is a phase's share, which the certificate of the whole plan does not depend on.

        Raises:
            Infeasible: epsilon stays below the target even without noise.
        """

        def mechanisms(sigma: float) -> tuple[Mechanism, ...]:
            return (*fixed, Mechanism(noise_multiplier=sigma, sample_rate=spec.sample_rate, steps=spec.steps))

        if self.accountant == "pld" and all(item.sample_rate == 1.0 for item in mechanisms(1.0)):
            return self._gaussian(mechanisms, spec, fixed, target)
        start = _gaussian_guess(spec, fixed, target, self.budget)
        if self.accountant != "pld":
            found = _search(lambda sigma: self.upper(mechanisms(sigma)), target, start, spec)
            self._last = None
            return found
        grid = pld.Grid(
            epsilon=target, delta=self.budget.delta, steps=sum(item.steps for item in pld.merge(mechanisms(1.0)))
        )
        search = _PldSearch(mechanisms, self.budget.delta, self.budget.adjacency, grid)
        while True:
            start = _search(search, target, start, spec)
            interval = search.certify(start)
            if interval.upper > target:
                search.all_directions()
            elif (interval.upper >= target * (1 - SLACK) and not search.too_coarse(interval)) or not search.refine():
                break
        if nominal:
            return start
        # The public accountant picks its own grid. Its answer is what a ledger or a reviewer will find again, so it
        # decides; started here, a few evaluations suffice.
        interval = self._interval(mechanisms(start))
        if not target * (1 - SLACK) <= interval.upper <= target:
            start = _search(lambda sigma: self.upper(mechanisms(sigma)), target, start, spec)
            interval = self._interval(mechanisms(start))
        self._last = (mechanisms(start), interval)
        return start

    def _gaussian(
        self,
        mechanisms: Callable[[float], tuple[Mechanism, ...]],
        spec: PhaseSpec,
        fixed: tuple[Mechanism, ...],
        target: float,
    ) -> float:
        """The least sigma where everything is Gaussian on all data: mu² adds up, so it has a closed form."""
        total = gaussian.mu(target, self.budget.delta) / gaussian.sensitivity(self.budget.adjacency)
        left = total**2 - sum(item.steps / item.noise_multiplier**2 for item in fixed)
        if left <= 0:
            raise Infeasible(spec.name, f"the phases before it leave nothing of epsilon = {target:.6g}")
        sigma = math.sqrt(spec.steps / left)
        while (interval := self._interval(mechanisms(sigma))).upper > target:
            sigma *= 1 + 1e-12  # the certificate is rounded up, so the noise is too
        self._last = (mechanisms(sigma), interval)
        return sigma


class _PldSearch:
    """The pld upper bound as a function of sigma on one grid, in the dominating direction alone while that suffices."""

    def __init__(
        self, mechanisms: Callable[[float], tuple[Mechanism, ...]], delta: float, adjacency: Adjacency, grid: pld.Grid
    ) -> None:
        self._mechanisms, self._delta, self._adjacency, self._grid = mechanisms, delta, adjacency, grid
        self._directions = pld.directions(adjacency)[:1]
        self._theta: float | None = None
        self._refinements, self._used = 0, grid

    def __call__(self, sigma: float) -> float:
        return self._upper(sigma, self._directions)

    def _upper(self, sigma: float, directions: Sequence[str]) -> float:
        merged = pld.merge(self._mechanisms(sigma))
        main, *others = directions
        value, theta, self._used = pld.bound(
            merged, delta=self._delta, direction=main, grid=self._grid, upper=True, theta=self._theta
        )
        if math.isfinite(value):
            self._theta = theta
        return max([value, *pld.upper_bounds(merged, others, delta=self._delta, grid=self._used)])

    def all_directions(self) -> None:
        self._directions = pld.directions(self._adjacency)

    def certify(self, sigma: float) -> Interval:
        """Both bounds at sigma on the present grid, over all directions."""
        merged = pld.merge(self._mechanisms(sigma))
        upper = self._upper(sigma, pld.directions(self._adjacency))
        lower, _, _ = pld.bound(merged, delta=self._delta, direction=self._directions[0], grid=self._used, upper=False)
        return pld.interval(lower, upper)

    def too_coarse(self, interval: Interval) -> bool:
        wide = interval.upper - interval.lower > pld.GAP * interval.upper
        return wide and self._refinements < pld.REFINEMENTS and self._used.width <= self._grid.width

    def refine(self) -> bool:
        """Halve the grid's width; False where memory or the number of refinements forbids it."""
        self._refinements += 1
        self._grid = self._grid.scaled(0.5)
        return self._refinements <= pld.REFINEMENTS


def _gaussian_guess(spec: PhaseSpec, fixed: Sequence[Mechanism], target: float, budget: Budget) -> float:
    """Sigma in the Gaussian limit, mu² = T q² (e^(1/sigma²) - 1): where the search starts, never what it returns."""
    sensitivity = 2.0 if budget.adjacency == "replace_one" else 1.0
    mu = gaussian.mu(target, budget.delta) / sensitivity
    left = max(mu**2 - sum(pld.equivalent_mu(item) ** 2 for item in fixed), 1e-2 * mu**2)
    if spec.sample_rate == 1.0:
        return math.sqrt(spec.steps / left)
    return 1 / math.sqrt(math.log1p(left / (spec.steps * spec.sample_rate**2)))


def _round_up(sigma: float) -> float:
    """Nine significant digits, rounded up."""
    scale = 10.0 ** (8 - math.floor(math.log10(sigma)))
    return math.ceil(sigma * scale) / scale


def _search(upper: Callable[[float], float], target: float, start: float, spec: PhaseSpec) -> float:
    """Sigma with upper(sigma) in [target·_ACCEPT, target], by a bracketed secant in logarithms.

    Brackets grow geometrically. Where the bound jumps over the interval, the side within the target is returned.
    """
    aim = math.log(target * _AIM)
    low: tuple[float, float] | None = None  # too little noise: (log sigma, log upper - aim > 0)
    high: tuple[float, float] | None = None  # enough noise
    x, step = math.log(start), math.log(2.0)
    for _ in range(_EVALUATIONS):
        sigma = _round_up(math.exp(x))
        if sigma > _LARGEST_SIGMA:
            break
        if sigma < _SMALLEST_SIGMA:
            raise Infeasible(
                spec.name,
                f"even with almost no noise (sigma = {_SMALLEST_SIGMA:g}) epsilon stays below {target:.6g}: "
                f"{spec.steps} steps that sample each example with probability {spec.sample_rate:.3g} see it "
                "too rarely for this delta. Lower epsilon or delta, or take more steps or a larger batch",
            )
        value = upper(sigma)
        if target * _ACCEPT <= value <= target:
            return sigma
        point = (math.log(sigma), (math.log(max(value, 1e-6 * target)) if math.isfinite(value) else 700.0) - aim)
        previous = low if point[1] > 0 else high
        if value > target:
            low = point
        else:
            high = point
        if low is None or high is None:
            # Slope -1 is that of a Gaussian; a known slope is better. Growing steps guarantee a bracket.
            slope = -1.0
            if previous is not None and point[1] != previous[1] and point[0] != previous[0]:
                slope = min((point[1] - previous[1]) / (point[0] - previous[0]), -0.05)
            jump = -point[1] / slope
            x = point[0] + max(min(jump, step), -step)
            if abs(jump) < step / 2:
                x += math.copysign(0.1 * abs(jump) + 1e-6, jump)  # overshoot: the next point closes the bracket
            else:
                step *= 1.5
            continue
        width = high[0] - low[0]
        if width < 1e-9:
            return _round_up(math.exp(high[0]))
        x = low[0] + width * low[1] / (low[1] - high[1]) if low[1] < 100 else low[0] + width / 2
        # A secant that keeps to one end is slow; a tenth from the ends bounds it, halving now and then.
        x = min(max(x, low[0] + 0.02 * width), high[0] - 0.02 * width)
        if _ % 6 == 5:
            x = (low[0] + high[0]) / 2
    if high is not None:
        return _round_up(math.exp(high[0]))
    raise Infeasible(spec.name, f"no noise multiplier up to {_LARGEST_SIGMA:g} keeps epsilon within {target:.6g}")
