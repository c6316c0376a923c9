"""Discrete privacy-loss distributions of one step of a Poisson-subsampled Gaussian, from above and from below.

The mechanism, its dominating pairs (P, Q) for ADD, REMOVE and REPLACE, and the pessimistic discretisation are
dp-accounting's. Two things are added here: its scalar inverse of the privacy loss is evaluated on arrays, and an
*optimistic* distribution that is as tight as the pessimistic one (the library's own rounds each step down by up to
one grid interval, which T steps turn into T intervals).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.linalg import solve_banded
from scipy.special import ndtr

from raydp.privacy.mechanism import Mechanism

# log of the tail mass of one step that is moved to an infinite loss. 1e5 steps of it stay far below delta = 1e-12.
LOG_TAIL = -60.0
DIRECTIONS = {"remove": AdjacencyType.REMOVE, "add": AdjacencyType.ADD, "replace": AdjacencyType.REPLACE}


@dataclass(frozen=True)
class Pmf:
    """Probabilities on the losses ``(first + i) * width`` of one step, ``infinity`` at an infinite loss."""

    width: float
    first: int
    probs: np.ndarray
    infinity: float

    @functools.cached_property
    def losses(self) -> np.ndarray:
        return (self.first + np.arange(len(self.probs))) * self.width


class _VectorizedGaussianLoss(GaussianPrivacyLoss):
    """dp-accounting's privacy loss of the sampled Gaussian, with its inverse on arrays."""

    def cutoffs(self, losses: np.ndarray) -> np.ndarray:
        """The largest x whose privacy loss is at least each loss; +-infinity outside the range of losses."""
        q, variance, sensitivity = self.sampling_prob, self._standard_deviation**2, self.sensitivity
        if self.adjacency_type == AdjacencyType.REPLACE:
            if q == 1.0:
                return -losses * variance / sensitivity / 2
            log_alpha = 0.5 * sensitivity**2 / variance + math.log1p(-q) - math.log(q)
            half = np.abs(losses) / 2
            with np.errstate(divide="ignore"):
                log_sinh = log_alpha + half + np.log(-np.expm1(-2 * half)) - math.log(2)
            # arcsinh(e^y) = log(e^y + sqrt(e^2y + 1)), without overflow for large y and exact for small ones.
            arcsinh = np.where(
                log_sinh > 0,
                np.logaddexp(log_sinh, 0.5 * np.logaddexp(0, 2 * log_sinh)),
                np.arcsinh(np.exp(np.minimum(log_sinh, 0))),
            )
            return -np.sign(losses) * variance / sensitivity * (arcsinh + half)
        sign = -1.0 if self.adjacency_type == AdjacencyType.ADD else 1.0
        shift = 0.5 * sensitivity if sign < 0 else -0.5 * sensitivity
        plain = sign * losses
        if q < 1.0:
            # plain = log(1 + (e^loss - 1)/q); expm1 keeps small losses, the second form keeps large ones.
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                small = np.log1p(np.expm1(plain) / q)
                large = plain - math.log(q) + np.log1p((q - 1) * np.exp(-plain))
                plain = np.where(plain > 30, large, np.where(np.expm1(plain) <= -q, -np.inf, small))
        return shift - sign * plain * variance / sensitivity

    def get_delta_for_epsilon(self, epsilon):  # type: ignore[no-untyped-def]  # signature of the library
        """Hockey-stick divergence at each epsilon, as in the library, on arrays."""
        epsilon = np.asarray(epsilon, dtype=float)
        x = self.cutoffs(epsilon)
        inside = np.isfinite(x)
        deltas = np.where(x == -np.inf, 0.0, -np.expm1(np.minimum(epsilon, 0)))
        x = x[inside]
        # logcdf of scipy.stats is slow on arrays; mu_upper - e^eps mu_lower in the library's own terms.
        deltas[inside] = self.mu_upper_cdf(x) - np.exp(epsilon[inside] + self.mu_lower_log_cdf(x))
        return np.clip(deltas, 0, 1)

    def mixture_masses(self, x: np.ndarray, *, upper: bool) -> np.ndarray:
        """Masses of mu_upper (else mu_lower) on the intervals between consecutive *decreasing* x, accurately in
        both tails."""
        adjacency, q = self.adjacency_type, self.sampling_prob
        if upper:
            shifted = 0.0 if adjacency == AdjacencyType.ADD else -self.sensitivity
        else:
            shifted = 0.0 if adjacency == AdjacencyType.REMOVE else self.sensitivity
        masses = _normal_masses(x - shifted, self._standard_deviation)
        if shifted != 0.0 and q < 1.0:
            masses = q * masses + (1 - q) * _normal_masses(x, self._standard_deviation)
        return masses


def _normal_masses(x: np.ndarray, scale: float) -> np.ndarray:
    high, low = x[:-1] / scale, x[1:] / scale
    flip = low > 0  # right of the mean, differences of survival functions keep their digits
    return np.where(flip, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


def support(mechanism: Mechanism, direction: str) -> tuple[float, float]:
    """Least and greatest privacy loss of one step, up to a mass of e^LOG_TAIL."""
    bounds = _loss(mechanism, direction).connect_dots_bounds()
    return float(bounds.epsilon_lower), float(bounds.epsilon_upper)


def _loss(mechanism: Mechanism, direction: str) -> _VectorizedGaussianLoss:
    return _VectorizedGaussianLoss(
        mechanism.noise_multiplier,
        log_mass_truncation_bound=LOG_TAIL,
        sampling_prob=mechanism.sample_rate,
        adjacency_type=DIRECTIONS[direction],
    )


@functools.lru_cache(maxsize=16)
def pessimistic(noise_multiplier: float, sample_rate: float, direction: str, width: float, cap: int) -> Pmf:
    """Connect-the-dots (Doroshenko et al. 2022, arXiv 2207.04380, Algorithm 1) by dp-accounting: dominates the step.

    Losses above ``cap·width`` count as infinite, which the algorithm does at the end of any grid.
    """
    mechanism = Mechanism(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=1)
    loss = _loss(mechanism, direction)
    low, high = support(mechanism, direction)
    first, last = math.floor(low / width), min(math.ceil(high / width), cap)
    last = max(last, first + 1)
    # As pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap, which passes through a dictionary of Python floats.
    deltas = np.minimum.accumulate(loss.get_delta_for_epsilon(np.arange(first, last + 1) * width))
    rises, growth = np.diff(deltas), math.expm1(width)
    probs = np.empty_like(deltas)
    probs[0] = 1 - deltas[0] + rises[0] / growth
    probs[1:-1] = (rises[1:] - rises[:-1] * math.exp(width)) / growth
    probs[-1] = rises[-1] / math.expm1(-width)
    return Pmf(width, first, np.maximum(probs, 0.0), float(deltas[-1]))


@functools.lru_cache(maxsize=16)
def optimistic(noise_multiplier: float, sample_rate: float, direction: str, width: float, cap: int) -> Pmf:
    """A distribution that the step dominates: a randomised coarsening of its outcomes, so delta can only shrink.

    Outcomes are gathered in buckets of losses around the grid points (data processing: P and Q masses add). A bucket
    whose log(P/Q) misses its grid point receives a little mass of the neighbour on the other side, in the proportion
    that puts the mixture exactly on the grid. What cannot be mixed is rounded down, and tails are dropped.
    """
    mechanism = Mechanism(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=1)
    loss = _loss(mechanism, direction)
    low, high = support(mechanism, direction)
    first, last = math.floor(low / width), min(math.ceil(high / width), cap)
    grid = np.arange(first, last + 1) * width
    edges = loss.cutoffs((np.arange(first, last + 2) - 0.5) * width)
    p, q = (loss.mixture_masses(edges, upper=upper) for upper in (True, False))
    usable = (p > 1e-290) & (q > 1e-290)
    start, stop = _run(usable, p)
    grid, p, q, first = grid[start:stop], p[start:stop], q[start:stop], first + start
    # In exact arithmetic a bucket's loss lies inside the bucket.
    offset = np.clip(np.log(p) - np.log(q) - grid, -width / 2, width / 2)
    rise = np.concatenate(([0.0], np.diff(offset))) + width  # distance to the bucket below, in loss
    fall = np.concatenate((np.diff(offset), [0.0])) + width
    from_below = np.where(offset > 0, -np.expm1(-offset) / np.expm1(np.maximum(rise - offset, width / 4)), 0.0)
    from_above = np.where(offset < 0, np.expm1(-offset) / -np.expm1(-np.maximum(fall + offset, width / 4)), 0.0)
    below, above = np.concatenate(([0.0], p[:-1])), np.concatenate((p[1:], [0.0]))
    from_below[from_below * p > 0.45 * below] = 0.0  # the neighbour is too thin: the bucket is rounded down
    sinks = (offset < 0) & (from_above * p > 0.45 * above)
    from_above[sinks] = 0.0
    # kept_i + (what its neighbours take from it) = p_i, with takes proportional to what the takers keep.
    bands = np.ones((3, len(p)))
    bands[0, 1:], bands[0, 0] = from_below[1:], 0.0
    bands[2, :-1], bands[2, -1] = from_above[:-1], 0.0
    kept = np.maximum(solve_banded((1, 1), bands, p), 0.0)
    probs = kept * (1 + from_below + from_above)
    sunk = np.where(sinks, probs, 0.0)
    probs = probs - sunk
    probs[:-1] += sunk[1:]
    # Losses beyond the last bucket are rounded down to it.
    probs[-1] += float(loss.mixture_masses(np.array([edges[stop], -np.inf]), upper=True)[0])
    return Pmf(width, first, probs, 0.0)


def _run(usable: np.ndarray, p: np.ndarray) -> tuple[int, int]:
    """The contiguous run of usable buckets around the mode."""
    mode = int(np.argmax(np.where(usable, p, 0.0)))
    holes = np.flatnonzero(~usable)
    return int(holes[holes < mode].max(initial=-1)) + 1, int(holes[holes > mode].min(initial=len(p)))
