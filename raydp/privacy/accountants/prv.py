"""Privacy random variables (prv-accountant; Gopi, Lee & Wutschitz 2021, arXiv 2106.02848): the independent check.

The grid is chosen here, by the rule of the paper (Theorem 5.5, Remark 5.6: mesh = error/sqrt(m/2·log(12/delta_error)),
half-width from RDP bounds plus 3), with an error relative to epsilon and the RDP bounds of Opacus instead of the
package's slower ones. The size is known before anything is allocated; what is too large is refused.

The package bounds the "remove" direction, which dominates for the epsilons that matter; pld bounds both.

One of its numbers is not taken over: the mean of a privacy loss, which places its grid. The package integrates the
distribution function from -0.1 down to the grid's end, tens of units away, and misses the sliver between log(1 - q),
where a loss begins, and -0.1; from q = 0.1 on its bounds then lie beside the truth (at q = 0.1185, sigma = 1.0803,
T = 160, delta = 1e-4 it proved 8.04 <= epsilon where epsilon is 7.999). :class:`_Truncated` integrates piece by piece.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence

import numpy as np
from prv_accountant import composers, discretisers
from prv_accountant.domain import Domain
from prv_accountant.privacy_random_variables import (
    GaussianMechanism,
    PoissonSubsampledGaussianMechanism,
    PrivacyRandomVariable,
    PrivacyRandomVariableTruncated,
)
from scipy import fft, integrate

from raydp.privacy import gaussian
from raydp.privacy.accountants.pld import equivalent_mu, merge
from raydp.privacy.accountants.rdp import RdpAccountant
from raydp.privacy.accountants.refusal import Refused
from raydp.privacy.accountants.replace import via_add_remove
from raydp.privacy.budget import Adjacency
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval

MAX_GRID = 1 << 20
COMFORTABLE_GRID = 1 << 17


class PrvAccountant:
    """Bounds by the PRV accountant.

    Attributes:
        relative_error: the eps_error of the paper, relative to epsilon: the bounds lie about that far from the
            estimate. 0.01 serves a cross-check; calibration by prv asks for less.
    """

    name = "prv"

    def __init__(self, relative_error: float = 0.01) -> None:
        self.relative_error = relative_error

    def epsilon(self, mechanisms: Sequence[Mechanism], *, delta: float, adjacency: Adjacency) -> Interval:
        """Raises Refused where the grid or the package's arithmetic does not allow an answer."""
        merged = merge(mechanisms)
        replace = adjacency == "replace_one"
        if replace and all(item.sample_rate == 1.0 for item in merged):
            halved = [
                Mechanism(noise_multiplier=item.noise_multiplier / 2, sample_rate=1.0, steps=item.steps)
                for item in merged
            ]
            lower, estimate, upper = self._bounds(halved, delta)
        elif replace:
            lower = self._bounds(merged, delta)[0]  # an example replaced by one of no influence is an example removed
            upper = estimate = via_add_remove(lambda share: self._bounds(merged, share)[2], delta=delta)
        else:
            lower, estimate, upper = self._bounds(merged, delta)
        upper = max(upper, 1e-9)
        estimate = min(max(estimate, 0.0), upper)
        return Interval(lower=min(max(lower, 0.0), estimate), estimate=estimate, upper=upper, accountant="prv")

    def _bounds(self, merged: Sequence[Mechanism], delta: float) -> tuple[float, float, float]:
        delta_error = delta / 200
        steps = [item.steps for item in merged]
        total = sum(steps)
        mu = math.sqrt(sum(equivalent_mu(item) ** 2 for item in merged))
        rdp = RdpAccountant(fractional=False)  # any valid bound of the tails will do

        def tail(items: Sequence[Mechanism], mass: float) -> float:
            return rdp.epsilon(items, delta=mass, adjacency="add_remove").upper

        whole = tail(merged, delta_error / 4)
        singles = [
            tail(
                [Mechanism(noise_multiplier=m.noise_multiplier, sample_rate=m.sample_rate, steps=1)],
                delta_error / 8 / total,
            )
            for m in merged
        ]
        # The error aims at a share of epsilon; of its size a guess suffices, capped by the RDP bound.
        size = min(gaussian.epsilon(delta, min(max(mu, 1e-6), 100.0)) or whole, tail(merged, delta))
        for factor in (1, 2, 4):  # up to four times the error where the grid would otherwise be slow
            eps_error = factor * self.relative_error * size
            half_width = max(whole, *singles, eps_error) + 3
            mesh = eps_error / math.sqrt(total / 2 * math.log(12 / delta_error))
            points = 2 * half_width / mesh
            if points <= COMFORTABLE_GRID:
                break
        if not points <= MAX_GRID:
            raise Refused(f"a PRV grid of {points:.2g} points exceeds {MAX_GRID}")
        # The package makes 2k + 2 points of a half-width in (k - 1, k] meshes; widened so that the FFT is fast.
        size_wanted = 2 * math.ceil(half_width / mesh) + 2
        while size_wanted % 2 or fft.next_fast_len(size_wanted, real=True) != size_wanted:
            size_wanted = fft.next_fast_len(size_wanted + 1, real=True)
        half_width = (size_wanted / 2 - 1.5) * mesh
        variables: list[PrivacyRandomVariable] = [
            GaussianMechanism(noise_multiplier=item.noise_multiplier)
            if item.sample_rate == 1.0
            else PoissonSubsampledGaussianMechanism(item.sample_rate, item.noise_multiplier)
            for item in merged
        ]
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                # What the package's PRVAccountant does, with the half-width above and the means below.
                domain = Domain.create_aligned(-half_width, half_width, mesh)
                truncated = [_Truncated(variable, domain.t_min(), domain.t_max()) for variable in variables]
                discrete = [discretisers.CellCentred().discretise(variable, domain) for variable in truncated]
                composed = composers.Heterogeneous(discrete).compute_composition(num_self_compositions=steps)
                lower, estimate, upper = composed.compute_epsilon(delta, delta_error, eps_error)
        except (RuntimeError, ValueError, OverflowError, AssertionError) as error:
            raise Refused(f"prv-accountant: {error or type(error).__name__}") from error
        if not all(math.isfinite(value) for value in (lower, estimate, upper)):
            raise Refused("prv-accountant returned a value that is not finite")
        return lower, estimate, upper


class _Truncated(PrivacyRandomVariableTruncated):  # type: ignore[misc]
    """The package's truncated variable, with a mean that sees where the loss begins, in half the time."""

    def probability(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Mass of consecutive cells [a_i, b_i], b_i = a_{i+1}: the package computes each edge twice."""
        edges = np.clip(np.append(a, b[-1]), self.t_min, self.t_max)
        return np.diff(self.prv.cdf(edges)) / self.remaining_mass

    def mean(self) -> float:
        """Integration by parts, as in the package, over pieces that are short where the distribution is dense."""
        inner = {sign * 10.0**-exponent for sign in (-1, 1) for exponent in range(1, 6)}
        if isinstance(self.prv, PoissonSubsampledGaussianMechanism):
            start = math.log1p(-float(self.prv.p))  # where the distribution function is not a number: keep off
            inner |= {start * share for share in (1.000001, 0.9999, 0.999, 0.99, 0.9, 0.7, 0.4, 0.1)}
        inner |= {float(edge) for edge in range(-8, 9) if edge}
        points = [self.t_min, *sorted(point for point in inner if self.t_min < point < self.t_max), self.t_max]
        total = 0.0
        for left, right in itertools.pairwise(points):
            area = integrate.quad(self.cdf, left, right, limit=500)[0]
            total += right * float(self.cdf(right)) - left * float(self.cdf(left)) - area
        return total
