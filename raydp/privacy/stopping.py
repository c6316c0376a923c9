"""How often a search with random stopping runs: distributions of the number of trials K.

K is drawn before anything runs, independently of the data, and is a secret: what the theorems of
:mod:`raydp.privacy.selection_bounds` promise holds for those who do not know it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.privacy.noise import NoiseKey

#: The smallest gamma: below it a search may take millions of trials.
SMALLEST_GAMMA = 1e-5
#: What a quantile or a draw may leave out of the tail: below the resolution of a uniform of 53 bits.
_TAIL = 2.0**-53
MEANS = (1.0, 1e5)


class _Counts:
    """What both families share: everything that follows from the probabilities."""

    @property
    def first(self) -> int:
        """The smallest number that can be drawn."""
        raise NotImplementedError

    @property
    def mean(self) -> float:
        """E[K], the expected number of trials: the expected cost of the search."""
        raise NotImplementedError

    @property
    def _limit(self) -> float:
        """The limit of P(K = k + 1) / P(K = k)."""
        raise NotImplementedError

    def log_pmf(self, counts: np.ndarray) -> np.ndarray:
        """log P(K = k) of each k >= ``first``."""
        raise NotImplementedError

    def pmf(self, count: int) -> float:
        """P(K = count)."""
        count = _validate.integer("count", count, low=0)
        return 0.0 if count < self.first else float(np.exp(self.log_pmf(np.array([float(count)])))[0])

    @cached_property
    def _cumulative(self) -> np.ndarray:
        """P(K <= k) from k = ``first`` on, up to where a uniform of 53 bits no longer tells it from 1."""
        size = 1 << max(8, math.ceil(math.log2(8 * self.mean)))
        while True:
            probabilities = np.exp(self.log_pmf(np.arange(self.first, self.first + size, dtype=float)))
            total = np.cumsum(probabilities)
            # The ratio of neighbouring probabilities tends to its limit monotonically: the larger one bounds the rest.
            last = probabilities[-1] / probabilities[-2] if probabilities[-2] > 0 else 0.0
            ratio = max(float(last), self._limit)
            if ratio < 1 and probabilities[-1] * ratio / (1 - ratio) < _TAIL:
                return total
            size *= 2

    def quantile(self, level: float) -> int:
        """The smallest k with P(K <= k) >= level, for a level in (0, 1)."""
        level = _validate.between("level", level, 0, 1, low_open=True, high_open=True)
        return self.first + int(np.searchsorted(self._cumulative, level * (1 - 1e-12)))

    def draw(self, key: NoiseKey) -> int:
        """K, from the secret key: the same key gives the same number, so that a resumed search knows it.

        The inverse of the distribution function at one uniform of 53 bits; the distribution that is drawn from differs
        from the one that is stated by at most 2^-53 in total variation.
        """
        uniform = float(key.generator("selection", "runs").random())
        return self.first + min(int(np.searchsorted(self._cumulative, uniform, side="right")), len(self._cumulative))


@dataclass(frozen=True, kw_only=True)
class NegativeBinomial(_Counts):
    """The truncated negative binomial distribution on K = 1, 2, … (Papernot & Steinke 2022, Definition 1).

    P(k) is proportional to (1 - gamma)^k · prod_{l < k} (l + eta)/(l + 1).

    Attributes:
        eta: > -1, the shape: 0 is the logarithmic, 1 the geometric distribution. A smaller one costs less privacy for
            the same mean and spreads K more.
        gamma: in [1e-5, 1); the smaller, the more trials. ``NegativeBinomial.with_mean`` solves it for a mean.

    Raises:
        InvalidValue: a value out of range.

    >>> from raydp.privacy.stopping import NegativeBinomial
    >>> geometric = NegativeBinomial.with_mean(eta=1, mean=10)
    >>> round(geometric.gamma, 6), round(geometric.pmf(1), 6), geometric.quantile(0.5)
    (0.1, 0.1, 7)
    """

    eta: float
    gamma: float

    name = "negative_binomial"

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", _validate.between("eta", self.eta, -1, 100, low_open=True))
        gamma = _validate.between("gamma", self.gamma, SMALLEST_GAMMA, 1, high_open=True)
        object.__setattr__(self, "gamma", gamma)

    @classmethod
    def with_mean(cls, *, eta: float, mean: float) -> NegativeBinomial:
        """The distribution of that shape whose mean is ``mean`` (within one part in 10^12).

        Raises:
            InvalidValue: mean not above 1, or out of reach for this shape.
        """
        eta = _validate.between("eta", eta, -1, 100, low_open=True)
        mean = _validate.between("mean", mean, *MEANS, low_open=True)
        low, high = math.log(SMALLEST_GAMMA), math.log1p(-1e-12)
        if _mean(eta, math.exp(low)) < mean:
            raise InvalidValue("mean", mean, f"cannot be reached with eta = {eta:g}", "Choose a larger eta.")
        root = brentq(lambda x: math.log(_mean(eta, math.exp(x)) / mean), low, high, xtol=1e-14, rtol=1e-14)
        return cls(eta=eta, gamma=math.exp(float(root)))

    @property
    def first(self) -> int:
        return 1

    @property
    def mean(self) -> float:
        return _mean(self.eta, self.gamma)

    @property
    def _limit(self) -> float:
        return 1 - self.gamma

    def log_pmf(self, counts: np.ndarray) -> np.ndarray:
        eta, tail = self.eta, counts * math.log1p(-self.gamma)
        if abs(eta) < 1e-9:
            return tail - np.log(counts) - math.log(-math.log(self.gamma))
        # prod_{l<k} (l + eta)/(l + 1) = eta Γ(k + eta) / (Γ(1 + eta) Γ(k + 1)); its sign and that of gamma^-eta - 1
        # are both that of eta.
        product = math.log(abs(eta)) + gammaln(counts + eta) - gammaln(1 + eta) - gammaln(counts + 1)
        return tail + product - math.log(abs(math.expm1(-eta * math.log(self.gamma))))

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form; ``mean`` is written for the reader."""
        return {"name": self.name, "eta": self.eta, "gamma": self.gamma, "mean": self.mean}


def _mean(eta: float, gamma: float) -> float:
    """eta (1 - gamma) / (gamma (1 - gamma^eta)), and its limit at eta = 0."""
    if abs(eta) < 1e-9:
        return (1 - gamma) / gamma / -math.log(gamma)
    return eta * (1 - gamma) / gamma / -math.expm1(eta * math.log(gamma))


@dataclass(frozen=True, kw_only=True)
class Poisson(_Counts):
    """The Poisson distribution on K = 0, 1, …: concentrated around its mean, at a higher price (Theorem 6, ibid.).

    With probability e^-mean nothing runs at all, and the search releases nothing.

    Attributes:
        mu: the mean, in [1, 1e5].

    >>> from raydp.privacy.stopping import Poisson
    >>> round(Poisson(mu=10).pmf(0), 7)
    4.54e-05
    """

    mu: float

    name = "poisson"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", _validate.between("mean", self.mu, *MEANS))

    @property
    def first(self) -> int:
        return 0

    @property
    def mean(self) -> float:
        return self.mu

    @property
    def _limit(self) -> float:
        return 0.0

    def log_pmf(self, counts: np.ndarray) -> np.ndarray:
        return counts * math.log(self.mu) - self.mu - gammaln(counts + 1)

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"name": self.name, "mean": self.mu}


Runs = NegativeBinomial | Poisson


def from_json(record: Mapping[str, Any]) -> Runs:
    """Inverse of ``to_json``. Raises InvalidValue, UnknownName."""
    name = _validate.one_of("distribution", record.get("name"), (NegativeBinomial.name, Poisson.name))
    if name == Poisson.name:
        return Poisson(mu=record["mean"])
    return NegativeBinomial(eta=record["eta"], gamma=record["gamma"])


__all__ = ["NegativeBinomial", "Poisson", "Runs", "from_json"]
