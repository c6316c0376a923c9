"""The upper bound of epsilon as dp-accounting itself computes it: its distributions, composition and conversion.

This is the number that a plan's certificate states, so that nothing that raydp computes has to be believed. It is asked
for where the library is accurate and quick; where it is not, :class:`OutOfReach` says why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as distributions

from raydp.privacy.accountants._pmf import loss_range
from raydp.privacy.budget import Adjacency
from raydp.privacy.mechanism import Mechanism

# The library composes by a plain FFT, whose round-off is absolute (about 1e-13 in delta after its sums).
SMALLEST_DELTA = 1e-10
MAX_POINTS = 1_000_000
_LOG_TAIL = -50.0  # the library's own default
_RELATIONS = {"add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace_one": NeighboringRelation.REPLACE_ONE}


class OutOfReach(Exception):
    """The library cannot bound this composition well within bounded time and memory; the text says why."""


class TooManyPoints(OutOfReach):
    """A coarser grid would have fewer."""


def upper_bound(mechanisms: Sequence[Mechanism], *, delta: float, adjacency: Adjacency, width: float) -> float:
    """dp-accounting's pessimistic epsilon of the composition.

    Args:
        mechanisms: at least one.
        delta: in [1e-10, 1).
        adjacency: ``add_remove`` or ``replace_one``.
        width: ``value_discretization_interval``.

    Raises:
        OutOfReach: delta is below the library's round-off, or a distribution would have too many points.
    """
    if delta < SMALLEST_DELTA:
        raise OutOfReach(f"dp-accounting's FFT is not accurate at delta = {delta:g}, below {SMALLEST_DELTA:g}")
    total = distribution(mechanisms, adjacency=adjacency, width=width)
    with np.errstate(over="ignore"):  # its division by a vanishing mass ends in the comparison that it is meant for
        value = float(total.get_epsilon_for_delta(delta))
    if not math.isfinite(value):
        raise OutOfReach("dp-accounting's truncated tails outweigh delta")
    return value


def distribution(
    mechanisms: Sequence[Mechanism], *, adjacency: Adjacency, width: float
) -> distributions.PrivacyLossDistribution:
    """dp-accounting's pessimistic distribution of the composition; every bound that is read off it holds.

    Raises:
        TooManyPoints: on a grid of this width.
    """
    total = None
    for item in mechanisms:
        points = _points(item, adjacency, width)
        if points > MAX_POINTS:
            raise TooManyPoints(f"dp-accounting would need {points:.1e} grid points for one step")
        composed = _composed(item, adjacency, width)
        total = composed if total is None else total.compose(composed)
    assert total is not None
    return total


@functools.lru_cache(maxsize=4)  # while one phase's noise is solved, the others' distributions are the same
def _composed(item: Mechanism, adjacency: Adjacency, width: float) -> distributions.PrivacyLossDistribution:
    step = distributions.from_gaussian_mechanism(
        item.noise_multiplier,
        value_discretization_interval=width,
        log_mass_truncation_bound=_LOG_TAIL,
        sampling_prob=item.sample_rate,
        neighboring_relation=_RELATIONS[adjacency],
    )
    return step.self_compose(item.steps)


def _points(item: Mechanism, adjacency: Adjacency, width: float) -> float:
    """Grid points of one step's distribution, in the direction that has most."""
    names = ("replace",) if adjacency == "replace_one" else ("remove", "add")
    spans = [loss_range(item.noise_multiplier, item.sample_rate, name, _LOG_TAIL) for name in names]
    return max(high - low for low, high in spans) / width
