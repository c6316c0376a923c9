"""Rényi differential privacy by Opacus' analysis: an independent, looser upper bound.

Mironov 2017 (arXiv 1702.07476) and Mironov, Talwar & Zhang 2019 (arXiv 1908.10530) for the sampled Gaussian; the tight
conversion of Balle et al. 2020 (arXiv 1905.09982, Theorem 21). Orders reach 1024, because a largest order of 63 puts a
floor of log(1/delta)/62 under epsilon; binomials overflow beyond it, and q = 1 needs none, so it goes to 10^8.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import numpy as np
from opacus.accountants.analysis import rdp as analysis

from raydp.privacy.accountants.pld import merge
from raydp.privacy.accountants.refusal import Refused
from raydp.privacy.accountants.replace import via_add_remove
from raydp.privacy.budget import Adjacency
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval

INTEGER_ORDERS: tuple[float, ...] = (
    *map(float, (*range(2, 33), *range(34, 64, 3))),
    *map(float, (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024)),
)
_LARGEST_FRACTIONAL = 6.0
_GAUSSIAN_ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 50)),
    *INTEGER_ORDERS,
    *np.geomspace(1100, 1e8, 60),
)


@functools.lru_cache(maxsize=512)
def _step(sample_rate: float, noise_multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    """RDP of one step at each order; infinite where the series does not converge in floating point."""
    values = []
    for order in orders:
        try:
            value = analysis.compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=float(order))
        except (ValueError, OverflowError):  # Opacus' log-space sums refuse some fractional orders
            value = math.inf
        values.append(value if value >= 0 else math.inf)
    return np.array(values)


class RunningRdp:
    """Rényi moments of a composition that grows: adding a mechanism costs the same however many there are.

    The upper bound is that of :class:`RdpAccountant` over integer orders: valid, and loose. For displays that refresh.
    """

    def __init__(self) -> None:
        self._total = np.zeros(len(INTEGER_ORDERS))

    def add(self, mechanisms: Sequence[Mechanism]) -> None:
        """Compose further mechanisms with those that are in already."""
        for item in mechanisms:
            if item.sample_rate == 1.0:
                self._total += item.steps * np.array(INTEGER_ORDERS) / (2 * item.noise_multiplier**2)
            else:
                self._total += item.steps * _step(item.sample_rate, item.noise_multiplier, INTEGER_ORDERS)

    def epsilon(self, *, delta: float, adjacency: Adjacency) -> Interval:
        """Upper bound of everything added so far; 0 for nothing, infinite losses are refused.

        Raises:
            Refused: no order has a finite moment.
        """
        if not self._total.any():
            return Interval(lower=0.0, estimate=0.0, upper=0.0, accountant="rdp")

        def upper(share: float) -> float:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return float(
                    analysis.get_privacy_spent(orders=list(INTEGER_ORDERS), rdp=list(self._total), delta=share)[0]
                )

        value = upper(delta) if adjacency == "add_remove" else via_add_remove(upper, delta=delta)
        if not math.isfinite(value):
            raise Refused("Opacus' analysis is finite at no order for so little noise")
        return Interval(lower=0.0, estimate=max(value, 1e-9), upper=max(value, 1e-9), accountant="rdp")


class RdpAccountant:
    """Upper bound only: ``lower`` is 0, ``estimate`` equals ``upper``.

    The bound is a minimum over orders, and valid over any set of them. Integer orders are cheap; Opacus' series for
    fractional ones are not, so tenths are tried only around the best integer, and only below 6, where they matter.

    Attributes:
        fractional: whether fractional orders are tried; without them the bound is a little looser.
    """

    name = "rdp"

    def __init__(self, *, fractional: bool = True) -> None:
        self.fractional = fractional

    def epsilon(self, mechanisms: Sequence[Mechanism], *, delta: float, adjacency: Adjacency) -> Interval:
        merged = merge(mechanisms)
        gaussian = all(item.sample_rate == 1.0 for item in merged)
        if adjacency == "replace_one" and not gaussian:
            upper = via_add_remove(lambda share: self._upper(merged, delta=share, scale=1.0), delta=delta)
        else:
            # replace_one on all data is the Gaussian mechanism with twice the sensitivity.
            upper = self._upper(merged, delta=delta, scale=4.0 if adjacency == "replace_one" else 1.0)
        if not math.isfinite(upper):
            raise Refused("Opacus' analysis is finite at no order for so little noise")
        upper = max(upper, 1e-9)
        return Interval(lower=0.0, estimate=upper, upper=upper, accountant="rdp")

    def _upper(self, merged: Sequence[Mechanism], *, delta: float, scale: float) -> float:
        if all(item.sample_rate == 1.0 for item in merged):
            return self._best(merged, _GAUSSIAN_ORDERS, delta=delta, scale=scale)[0]
        value, order = self._best(merged, INTEGER_ORDERS, delta=delta, scale=scale)
        if self.fractional and order <= _LARGEST_FRACTIONAL:
            tenths = range(math.floor(10 * (order - 1)) + 1, math.ceil(10 * (order + 1)))
            near = tuple(tenth / 10 for tenth in tenths if tenth > 10 and tenth % 10)
            value = min(value, self._best(merged, near, delta=delta, scale=scale)[0])
        return value

    @staticmethod
    def _best(
        merged: Sequence[Mechanism], orders: tuple[float, ...], *, delta: float, scale: float
    ) -> tuple[float, float]:
        """The least epsilon over the orders by Opacus' conversion, and the order that gives it."""
        total = np.zeros(len(orders))
        for item in merged:
            if item.sample_rate == 1.0:
                total += item.steps * np.array(orders) / (2 * item.noise_multiplier**2)
            else:
                total += item.steps * _step(item.sample_rate, item.noise_multiplier, orders)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Optimal order is the largest alpha": the bound is valid all the same
            value, order = analysis.get_privacy_spent(orders=list(orders), rdp=list(total * scale), delta=delta)
        return float(value), float(order)
