"""Privacy profiles: certified upper bounds of delta at any epsilon, of a composition, by dp-accounting.

The accountants answer with epsilon at one delta. The cost of a selection needs delta at several epsilons, among them
small ones with a large delta, and all of them from one distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from raydp.privacy import gaussian
from raydp.privacy.accountants import library, pld
from raydp.privacy.budget import Adjacency
from raydp.privacy.mechanism import Mechanism

_EXACT = 1e-12
_COARSEN = 12


def profile(
    mechanisms: Sequence[Mechanism], *, adjacency: Adjacency, epsilon: float, delta: float
) -> Callable[[float], float]:
    """epsilon -> an upper bound of delta, the larger of both directions; not increasing, at most 1.

    One-shot Gaussians compose exactly. Otherwise dp-accounting composes pessimistic distributions, on a grid that is
    accurate near ``(epsilon, delta)``; a distribution that would be too large gets a coarser grid, which widens the
    bound and keeps it valid.

    Args:
        mechanisms: at least one.
        adjacency: ``add_remove`` or ``replace_one``.
        epsilon, delta: about where the answer matters most.

    Raises:
        OutOfReach: delta below 1e-10, the round-off of the library, or too little noise.
    """
    return _profile(pld.merge(mechanisms), adjacency, epsilon, delta)


@functools.lru_cache(maxsize=32)
def _profile(
    merged: tuple[Mechanism, ...], adjacency: Adjacency, epsilon: float, delta: float
) -> Callable[[float], float]:
    if all(item.sample_rate == 1.0 for item in merged):
        mu = (2.0 if adjacency == "replace_one" else 1.0) / merged[0].noise_multiplier
        return lambda at: min(gaussian.delta(at, mu) * (1 + _EXACT), 1.0)
    if delta < library.SMALLEST_DELTA:
        raise library.OutOfReach(f"dp-accounting's FFT is not accurate at delta = {delta:g}")
    width = pld.Grid(epsilon=epsilon, delta=delta, steps=sum(item.steps for item in merged)).width
    for _ in range(_COARSEN):
        try:
            composed = library.distribution(merged, adjacency=adjacency, width=width)
        except library.TooManyPoints:
            width *= 2
            continue
        with np.errstate(over="ignore"):
            return lambda at: min(float(composed.get_delta_for_epsilon(at)), 1.0)
    raise library.OutOfReach("so little noise that no profile can be certified; raise sigma")


__all__ = ["profile"]
