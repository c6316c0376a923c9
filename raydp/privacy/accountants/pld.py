"""Privacy-loss distributions (dp-accounting): the default accountant, certified from both sides.

The *upper* bound, the one that is held against a budget, is dp-accounting's own from end to end (``library``). Its cost
and its scalar interface make it a poor thing to search with, and it has no lower bound that is of use for many
steps. So
its distributions are also composed here: that finds noise multipliers in milliseconds, bounds epsilon from below, and
answers from above where the library is out of reach (delta below 1e-10, or too many grid points); then the interval's
``fallback`` says so.

What the bounds that are composed here rely on:

* dominating pairs of the Poisson-subsampled Gaussian for ADD, REMOVE (and REPLACE) as dp-accounting defines them, of
  which the composition dominates the adaptive composition (Zhu, Dong & Wang 2022, arXiv 2106.08567);
* from above: connect-the-dots distributions; truncated tails (a millionth of delta in all) count as an infinite loss;
* from below: coarsened distributions, which the mechanism dominates (``_pmf.optimistic``);
* composition by a tilted FFT with bounds on truncation, wrap-around and round-off (``_compose``);
* q = 1 is not discretised when nothing else is composed: Gaussian releases compose exactly (``gaussian``).

The grid follows the number of steps and the tail exponent, not a constant: each step discretised at width w adds a
variance of about w²/6 to the loss, which moves epsilon by T·w²·(theta + 1)/12 (theta: tail exponent of delta).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from raydp.errors import RaydpError
from raydp.privacy import gaussian
from raydp.privacy.accountants import library
from raydp.privacy.accountants._compose import Composition, GridTooLarge
from raydp.privacy.accountants._pmf import Pmf, Shape, optimistic, pessimistic
from raydp.privacy.accountants.refusal import Refused
from raydp.privacy.budget import Adjacency
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval

# Aimed-at relative error of epsilon from discretisation, and the certified gap above which the grid is refined.
GRID_ERROR = 1e-4
GAP = 5e-4
REFINEMENTS = 4
_EXACT = 1e-12
_ROUNDING = 1e-11  # of the last few operations; the FFT's own is bounded where it arises


def merge(mechanisms: Sequence[Mechanism]) -> tuple[Mechanism, ...]:
    """The same composition with fewer terms, independent of order: equal steps added up, and all q = 1 terms replaced
    by the one Gaussian of 1/sigma² = sum T/sigma²."""
    steps: dict[tuple[float, float], int] = {}
    precision = 0.0
    for item in mechanisms:
        if item.sample_rate == 1.0:
            precision += item.steps / item.noise_multiplier**2
        else:
            key = (item.sample_rate, item.noise_multiplier)
            steps[key] = steps.get(key, 0) + item.steps
    merged = [Mechanism(noise_multiplier=s, sample_rate=q, steps=t) for (q, s), t in sorted(steps.items())]
    if precision > 0:
        merged.append(Mechanism(noise_multiplier=precision**-0.5, sample_rate=1.0, steps=1))
    return tuple(merged)


def equivalent_mu(mechanism: Mechanism) -> float:
    """Gaussian mu that T steps tend to: mu² = T·q²·(e^(1/sigma²) - 1). For guesses of size only, never for a claim."""
    exponent = min(mechanism.noise_multiplier**-2, 600.0)
    if mechanism.sample_rate == 1.0:
        return math.sqrt(mechanism.steps) / mechanism.noise_multiplier
    return mechanism.sample_rate * math.sqrt(mechanism.steps * math.expm1(exponent))


def directions(adjacency: Adjacency) -> tuple[str, ...]:
    """Directions in which the composition is bounded; the first one dominates in practice."""
    return ("replace",) if adjacency == "replace_one" else ("remove", "add")


class Grid:
    """How compositions of about ``steps`` steps whose epsilon is about ``epsilon`` at ``delta`` are discretised."""

    def __init__(self, *, epsilon: float, delta: float, steps: int, theta: float | None = None) -> None:
        mu = gaussian.mu(epsilon, delta)
        if theta is None:
            theta = max(epsilon / mu**2 - 0.5, 0.1)
        width = min(math.sqrt(12 * GRID_ERROR * epsilon / (steps * (theta + 1))), epsilon / 500)
        # The tails of all steps together weigh a millionth of delta, and of a loss of 30 above epsilon all but e^-30
        # counts anyway.
        self.shape = Shape(
            width, math.ceil((30 + 2 * epsilon) / width), float(math.floor(math.log(1e-6 * delta / steps)))
        )

    @property
    def width(self) -> float:
        return self.shape.width

    def scaled(self, factor: float) -> Grid:
        """The same grid with its width multiplied."""
        grid = object.__new__(Grid)
        grid.shape = Shape(self.width * factor, math.ceil(self.shape.cap / factor), self.shape.log_tail)
        return grid

    def parts(self, mechanisms: Sequence[Mechanism], direction: str, *, upper: bool) -> list[tuple[Pmf, int]]:
        make = pessimistic if upper else optimistic
        return [
            (make(item.noise_multiplier, item.sample_rate, direction, self.shape), item.steps) for item in mechanisms
        ]


def bound(
    mechanisms: Sequence[Mechanism],
    *,
    delta: float,
    direction: str,
    grid: Grid,
    upper: bool,
    theta: float | None = None,
) -> tuple[float, float, Grid]:
    """One bound of epsilon in one direction, with the tilt that served it and the grid that fitted.

    A grid that is too fine for the bounded memory is coarsened, which widens the bound and keeps it valid.
    """
    while True:
        composition = Composition(grid.parts(mechanisms, direction, upper=upper), delta, theta)
        try:
            value = composition.epsilon(upper=upper) * (1 + _ROUNDING if upper else 1 - _ROUNDING)
            return value, composition.theta, grid
        except GridTooLarge:
            grid = grid.scaled(2.0)


class PldAccountant:
    """See the module. ``epsilon`` costs some hundredths of a second to seconds and at most a few hundred megabytes."""

    name = "pld"

    def epsilon(self, mechanisms: Sequence[Mechanism], *, delta: float, adjacency: Adjacency) -> Interval:
        merged = merge(mechanisms)
        if all(item.sample_rate == 1.0 for item in merged):
            sensitivity = 2.0 if adjacency == "replace_one" else 1.0
            exact = gaussian.epsilon(delta, sensitivity / merged[0].noise_multiplier)
            return interval(exact * (1 - _EXACT), exact * (1 + _EXACT))
        steps = sum(item.steps for item in merged)
        mu = math.sqrt(sum(equivalent_mu(item) ** 2 for item in merged))
        guess = gaussian.epsilon(delta, min(mu, 100.0)) or 0.01 * min(mu, 100.0)
        grid = Grid(epsilon=min(max(guess, 1e-5), 1e4), delta=delta, steps=steps)
        main, *others = directions(adjacency)
        for attempt in range(REFINEMENTS):
            upper, theta, used = bound(merged, delta=delta, direction=main, grid=grid, upper=True)
            wanted = Grid(epsilon=min(max(upper, 1e-5), 1e4), delta=delta, steps=steps, theta=theta)
            if wanted.width > 0.7 * used.width or used.width > grid.width or attempt == REFINEMENTS - 1:
                break
            grid = wanted
        own = certify(merged, delta=delta, adjacency=adjacency, grid=used, upper=upper, theta=theta, others=others)
        return with_library(own, merged, delta=delta, adjacency=adjacency)


def certify(
    merged: Sequence[Mechanism],
    *,
    delta: float,
    adjacency: Adjacency,
    grid: Grid,
    upper: float,
    theta: float,
    others: Sequence[str],
) -> Interval:
    """The interval around an upper bound already found in the dominating direction: the other directions are added,
    the lower bound computed, and the grid refined where the gap exceeds GAP."""
    main = directions(adjacency)[0]
    upper = max([upper, *upper_bounds(merged, others, delta=delta, grid=grid)])
    lower = bound(merged, delta=delta, direction=main, grid=grid, upper=False)[0]
    for _ in range(REFINEMENTS):
        if upper - lower <= GAP * upper:
            break
        finer, _, used = bound(merged, delta=delta, direction=main, grid=grid.scaled(0.5), upper=True, theta=theta)
        if used.width >= grid.width:
            break
        grid = used
        upper = min(upper, max([finer, *upper_bounds(merged, others, delta=delta, grid=grid)]))
        lower = max(lower, bound(merged, delta=delta, direction=main, grid=grid, upper=False)[0])
    return interval(lower, upper)


def with_library(own: Interval, merged: Sequence[Mechanism], *, delta: float, adjacency: Adjacency) -> Interval:
    """``own`` with dp-accounting's upper bound in place of ours, or with the reason why not.

    Raises:
        RaydpError: the library claims less than the proven lower bound.
    """
    grid = Grid(epsilon=min(max(own.upper, 1e-5), 1e4), delta=delta, steps=sum(item.steps for item in merged))
    try:
        upper = library.upper_bound(merged, delta=delta, adjacency=adjacency, width=grid.width)
    except library.OutOfReach as reason:
        return dataclasses.replace(own, fallback=f"{reason}; its distributions were composed by raydp")
    if upper < own.lower * (1 - _ROUNDING):
        raise RaydpError(
            f"dp-accounting claims epsilon <= {upper:.9g}, but {own.lower:.9g} is a proven lower bound, for {merged}. "
            "Report it."
        )
    return interval(own.lower, upper)


def upper_bounds(merged: Sequence[Mechanism], others: Sequence[str], *, delta: float, grid: Grid) -> list[float]:
    """Upper bounds in further directions, each with a tilt of its own."""
    return [bound(merged, delta=delta, direction=other, grid=grid, upper=True)[0] for other in others]


def interval(lower: float, upper: float) -> Interval:
    if not math.isfinite(upper):
        raise Refused("so little noise that no finite epsilon can be certified; raise sigma")
    # Never exactly 0 for a mechanism that touched data (tensorflow/privacy#166).
    upper = max(upper, 1e-9)
    lower = min(lower, upper)
    return Interval(lower=lower, estimate=(lower + upper) / 2, upper=upper, accountant="pld")
