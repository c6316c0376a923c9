"""Composition of discrete privacy-loss distributions by one FFT, exact enough for delta = 1e-12.

The loss of a composition is the sum of independent losses, its distribution a convolution. A plain FFT has an
*absolute* round-off near T·1e-16, too coarse for the tail that decides a small delta. So each distribution is first
tilted, p(l)·exp(theta·l)/M(theta), with theta chosen so that the composed tilted distribution has its bulk where
epsilon lies; the tilt is undone after the FFT, and round-off becomes *relative* to delta. The window of the FFT need
then hold only the bulk. What lies outside of it is bounded by Chernoff and, with a bound on round-off, added to delta
(upper bound) or taken from it (lower bound). Nothing is dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import fft

from raydp.privacy.accountants._pmf import Pmf

MAX_WINDOW = 1 << 21
_LOG_OUTSIDE = math.log(1e-10)  # tilted mass allowed on either side of the window; less for delta < 1e-5
_UNIT = float(np.finfo(float).eps)


class GridTooLarge(Exception):
    """The composition does not fit into the bounded window at this grid width."""


def _log_moments(pmf: Pmf, theta: np.ndarray) -> np.ndarray:
    """log E[exp(theta·loss)] over the finite losses, for each theta."""
    exponents = np.multiply.outer(theta, pmf.losses)
    exponents += pmf.log_probs
    top = exponents.max(axis=1)
    exponents -= top[:, None]
    return top + np.log(np.exp(exponents, out=exponents).sum(axis=1))


def _power(base: np.ndarray, count: int) -> np.ndarray:
    """base**count by repeated squaring: numpy's complex power takes a logarithm of each entry."""
    result = np.ones_like(base)
    while count:
        if count & 1:
            result *= base
        count >>= 1
        if count:
            base = base * base
    return result


class Composition:
    """Distributions of single steps and their counts, with the tilt that suits a delta."""

    def __init__(self, parts: Sequence[tuple[Pmf, int]], delta: float, theta: float | None = None) -> None:
        self._parts, self._delta = parts, delta
        self.width = parts[0][0].width
        self._log_outside = _LOG_OUTSIDE + min(0.0, math.log(delta / 1e-5))
        self._theta = self._choose_theta(theta)

    @property
    def theta(self) -> float:
        return self._theta

    def _log_moment(self, theta: np.ndarray) -> np.ndarray:
        return np.sum([count * _log_moments(pmf, theta) for pmf, count in self._parts], axis=0)

    def _choose_theta(self, guess: float | None) -> float:
        """The minimiser of the moment bound (K(theta) + log(1/delta) - …)/theta; any theta > 0 is correct."""
        lowest, highest = (1e-3, 1e8) if guess is None else (guess / 4, guess * 4)
        points = 12 if guess is None else 7
        for round_ in range(3 if guess is None else 2):
            theta = np.geomspace(lowest, highest, points)
            with np.errstate(all="ignore"):
                bound = (
                    self._log_moment(theta)
                    - math.log(self._delta)
                    + theta * np.log(theta)
                    - (theta + 1) * np.log(theta + 1)
                ) / theta
            best = int(np.argmin(np.where(np.isfinite(bound), bound, np.inf)))
            if guess is not None and round_ == 0 and best in (0, points - 1):
                return self._choose_theta(None)  # the guess was too far off
            lowest, highest = theta[max(best - 1, 0)], theta[min(best + 1, points - 1)]
        return float(theta[best])

    def epsilon(self, *, upper: bool) -> float:
        """A bound of epsilon at delta: above the truth of the parts if ``upper``, below it otherwise."""
        theta, delta = self._theta, self._delta
        if any(pmf.infinity >= 1 for pmf, _ in self._parts):
            return math.inf
        no_infinity = sum(count * math.log1p(-pmf.infinity) for pmf, count in self._parts if pmf.infinity > 0)
        finite_delta = delta + math.expm1(no_infinity) if upper else delta
        if finite_delta <= 0:
            return math.inf
        tilted, log_moment, mean, variance = [], 0.0, 0.0, 0.0
        for pmf, count in self._parts:
            exponent = theta * pmf.losses + pmf.log_probs
            top = float(exponent.max())
            weights = np.exp(exponent - top)
            total = float(weights.sum())
            weights /= total
            first = float(np.dot(weights, pmf.losses))
            tilted.append((pmf, count, weights, first))
            log_moment += count * (top + math.log(total))
            mean += count * first
            variance += count * float(np.dot(weights, (pmf.losses - first) ** 2))
        low, high = self._window(mean, math.sqrt(variance), log_moment)
        size = fft.next_fast_len(max(math.ceil((high - low) / self.width) + 2, 16), real=True)
        if size > MAX_WINDOW:
            raise GridTooLarge(f"{size} grid points")
        spectrum: np.ndarray | float = 1.0
        origin = 0
        for pmf, count, weights, first in tilted:
            centre = round((first - pmf.shift) / self.width)  # centred, phases stay small and accurate
            indices = (pmf.indices - centre) % size
            spectrum = spectrum * _power(fft.rfft(np.bincount(indices, weights=weights, minlength=size)), count)
            origin += count * centre
        probs = fft.irfft(spectrum, size)
        shift = sum(count * pmf.shift for pmf, count in self._parts)
        start = math.floor((low - shift) / self.width)
        probs = np.roll(probs, -((start - origin) % size))
        losses = (start + np.arange(size)) * self.width + shift
        steps = sum(count for _, count in self._parts)
        roundoff = _UNIT * (4 * steps + 8 * math.log2(size)) * float(probs.max())
        probs = np.maximum(probs + roundoff, 0.0) if upper else np.maximum(probs - roundoff, 0.0)
        # delta(e) = e^K sum_{l > e} probs e^{-theta l} (1 - e^{e - l}), here divided by e^(K - theta mean).
        relative = losses - mean
        log_wanted = math.log(finite_delta) - (log_moment - theta * mean)
        if log_wanted > 700.0 and not upper:
            return 0.0  # a tilt far from any that suits this delta; the trivial bound is right
        wanted = math.exp(min(log_wanted, 700.0))
        # Far left of the mean they may, where no delta of interest lies: such entries compare as "too large".
        with np.errstate(over="ignore", invalid="ignore"):
            mass = np.cumsum((probs * np.exp(-theta * relative))[::-1])[::-1]
            dual = np.cumsum((probs * np.exp(-(theta + 1) * relative))[::-1])[::-1]
            slack = 2 * math.exp(self._log_outside) * np.exp(-theta * relative)
            # Beyond the right end mass counts at most with its weight there; wrapped mass may count anywhere.
            beyond = float(slack[-1]) if high < sum(count * pmf.losses[-1] for pmf, count in self._parts) else 0.0
            slack = np.full(size, beyond) if upper else -slack
            deltas = mass - np.exp(relative) * dual + slack
        # Any epsilon with delta(e) <= delta is an upper bound, any with delta(e) > delta a lower one.
        if upper:
            index = int(np.argmax(deltas <= wanted))
            if not deltas[index] <= wanted:
                return math.inf
            if index == 0:
                return max(float(losses[0]), 0.0)
        else:
            above = np.flatnonzero(deltas > wanted)
            index = int(above[-1]) + 1 if len(above) else 0
            if index in (0, size):
                return max(float(losses[index - 1]), 0.0) if index else 0.0
        # Between two grid points delta is linear in e^epsilon; the sums are those of the right one.
        left, right = float(losses[index - 1]), float(losses[index])
        value = (mass[index] + slack[index if upper else index - 1] - wanted) / max(dual[index], 1e-300)
        if not value > 0:
            return max(right if upper else left, 0.0)
        return max(min(max(mean + math.log(value), left), right), 0.0)

    def _window(self, mean: float, deviation: float, log_moment: float) -> tuple[float, float]:
        """Ends outside of which the tilted sum has at most a mass of e^_log_outside on each side (Chernoff)."""
        theta = self._theta
        low = sum(count * pmf.losses[0] for pmf, count in self._parts)
        high = sum(count * pmf.losses[-1] for pmf, count in self._parts)
        if deviation > 0:
            steps = np.array([0.1, 0.3, 1.0, 2.0, 4.0, 8.0]) / deviation
            with np.errstate(all="ignore"):
                right = (self._log_moment(theta + steps) - log_moment - self._log_outside) / steps
                left = (log_moment - self._log_moment(theta - steps) + self._log_outside) / steps
            right, left = right[np.isfinite(right)], left[np.isfinite(left)]
            high = min(high, float(right.min(initial=math.inf)))
            low = max(low, float(left.max(initial=-math.inf)))
        return min(low, mean) - self.width, max(high, mean) + self.width
