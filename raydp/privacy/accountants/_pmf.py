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

# Every grid point up to _FINE intervals from zero; beyond, neighbours differ by the fraction _SPACING of their loss.
_FINE, _SPACING = 4096, 0.002
DIRECTIONS = {"remove": AdjacencyType.REMOVE, "add": AdjacencyType.ADD, "replace": AdjacencyType.REPLACE}


@dataclass(frozen=True)
class Pmf:
    """Probabilities on the losses ``indices * width + shift`` of one step, ``infinity`` at an infinite loss."""

    width: float
    indices: np.ndarray
    probs: np.ndarray
    infinity: float
    shift: float = 0.0

    @functools.cached_property
    def log_probs(self) -> np.ndarray:
        return np.log(self.probs)

    @functools.cached_property
    def losses(self) -> np.ndarray:
        return self.indices * self.width + self.shift


@dataclass(frozen=True)
class Shape:
    """How steps are discretised: grid ``width``, ``cap`` (losses above cap·width count as infinite from above, as
    cap·width from below), and ``log_tail``, the log of the mass at either end of a step that is treated so too."""

    width: float
    cap: int
    log_tail: float


def _grid(low: float, high: float, shape: Shape) -> np.ndarray:
    """Indices of the losses that carry mass: every one near zero, and 0.2 % apart in the tails.

    Both discretisations are valid on any grid. A tail spaced relative to its losses costs no accuracy, and bounds the
    number of points whatever the noise.
    """
    first, last = math.floor(low / shape.width), min(math.ceil(high / shape.width), shape.cap)
    last = max(last, first + 1)
    reach = max(-first, last, _FINE + 1)
    growing = _FINE * np.exp(_SPACING * np.arange(1, math.ceil(math.log(reach / _FINE) / _SPACING) + 1))
    tail = np.ceil(growing).astype(np.int64)
    indices = np.concatenate((-tail[::-1], np.arange(-_FINE, _FINE + 1), tail))
    inside = indices[(indices > first) & (indices < last)]
    return np.concatenate(([first], inside, [last]))


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


def _support(loss: _VectorizedGaussianLoss) -> tuple[float, float]:
    """Least and greatest privacy loss of one step, up to the tail mass that the loss was made with."""
    bounds = loss.connect_dots_bounds()
    return float(bounds.epsilon_lower), float(bounds.epsilon_upper)


def loss_range(noise_multiplier: float, sample_rate: float, direction: str, log_tail: float) -> tuple[float, float]:
    """Least and greatest privacy loss of one step in a direction, up to tails of mass e^log_tail."""
    return _support(_loss(noise_multiplier, sample_rate, direction, log_tail))


def _loss(noise_multiplier: float, sample_rate: float, direction: str, log_tail: float) -> _VectorizedGaussianLoss:
    return _VectorizedGaussianLoss(
        noise_multiplier,
        log_mass_truncation_bound=log_tail,
        sampling_prob=sample_rate,
        adjacency_type=DIRECTIONS[direction],
    )


@functools.lru_cache(maxsize=16)
def pessimistic(noise_multiplier: float, sample_rate: float, direction: str, shape: Shape) -> Pmf:
    """Connect-the-dots (Doroshenko et al. 2022, arXiv 2207.04380, Algorithm 1) by dp-accounting: dominates the step.

    Losses beyond the grid count as infinite, which the algorithm does at the end of any grid.
    """
    loss, width = _loss(noise_multiplier, sample_rate, direction, shape.log_tail), shape.width
    indices = _grid(*_support(loss), shape)
    # As pld_pmf.create_pmf_pessimistic_connect_dots, whose result is a dictionary of Python floats.
    deltas = np.minimum.accumulate(loss.get_delta_for_epsilon(indices * width))
    rises, gaps = np.diff(deltas), np.diff(indices) * width
    probs = np.concatenate(([1 - deltas[0]], rises / np.expm1(-gaps))) + np.append(rises / np.expm1(gaps), 0.0)
    kept = probs > 0  # round-off leaves zeros and worse in the far tails
    return Pmf(width, indices[kept], probs[kept], float(deltas[-1]))


@functools.lru_cache(maxsize=16)
def optimistic(noise_multiplier: float, sample_rate: float, direction: str, shape: Shape) -> Pmf:
    """A distribution that the step dominates: a randomised coarsening of its outcomes, so delta can only shrink.

    Outcomes are gathered in buckets of losses around the grid points (data processing: P and Q masses add). A bucket
    whose log(P/Q) misses its grid point receives a little mass of the neighbour on the other side, in the proportion
    that puts the mixture exactly on the grid. What cannot be mixed is rounded down, and tails are dropped.
    """
    loss, width = _loss(noise_multiplier, sample_rate, direction, shape.log_tail), shape.width
    indices = _grid(*_support(loss), shape)
    shift = 0.0
    for _ in range(2):
        grid = indices * width + shift
        inner = (grid[1:] + grid[:-1]) / 2
        edges = loss.cutoffs(np.concatenate(([grid[0] - width / 2], inner, [grid[-1] + width / 2])))
        p, q = (loss.mixture_masses(edges, upper=upper) for upper in (True, False))
        mode = int(np.argmax(p))
        if shift or p[mode] < 0.2 or q[mode] < 1e-290:
            break
        # Most of the mass in one bucket (rare sampling, little noise): the grid is moved so that it is not rounded.
        shift = math.log(p[mode]) - math.log(q[mode]) - float(grid[mode])
    start, stop = _run((p > 1e-290) & (q > 1e-290), p)
    indices, grid, p, q = (values[start:stop] for values in (indices, grid, p, q))
    gaps = np.diff(grid)
    before, after = np.concatenate(([width], gaps)), np.concatenate((gaps, [width]))
    # In exact arithmetic a bucket's loss lies inside the bucket.
    offset = np.clip(np.log(p) - np.log(q) - grid, -before / 2, after / 2)
    to_lower = before - np.concatenate(([0.0], offset[:-1]))  # from the grid point down to the neighbour's loss
    to_upper = after + np.concatenate((offset[1:], [0.0]))
    from_below = np.where(offset > 0, -np.expm1(-offset) / np.expm1(to_lower), 0.0)
    from_above = np.where(offset < 0, np.expm1(-offset) / -np.expm1(-to_upper), 0.0)
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
    # Sunk mass goes one grid point down.
    indices = np.concatenate(([indices[0] - 1], indices))
    probs = np.append(sunk, 0.0) + np.concatenate(([0.0], probs - sunk))
    # Losses beyond the last bucket are rounded down to it.
    probs[-1] += float(loss.mixture_masses(np.array([edges[stop], -np.inf]), upper=True)[0])
    filled = probs > 0
    return Pmf(width, indices[filled], probs[filled], 0.0, shift)


def _run(usable: np.ndarray, p: np.ndarray) -> tuple[int, int]:
    """The contiguous run of usable buckets around the mode."""
    mode = int(np.argmax(np.where(usable, p, 0.0)))
    holes = np.flatnonzero(~usable)
    return int(holes[holes < mode].max(initial=-1)) + 1, int(holes[holes > mode].min(initial=len(p)))
