"""What a search costs that tunes on a secret Poisson subsample and then trains once more: upper bounds of epsilon.

Each example is in the subsample with probability q, independently of all others; who is in it is not released. Let x be
the example in which two data sets differ, and fix the membership of all others (divergences are jointly convex, so what
holds for each membership holds for their mixture). Let a and c be the distributions of what tuning releases with x in
the subsample and with x outside of it, or absent.

* **By parts.** If x is in the subsample, the data sets differ in what tuning saw (``final="rest"``) or in what tuning
  and the final run saw (``"all"``); otherwise in what the final run saw. So at every e, in both directions, delta(e) <=
  q delta_1(e) + (1 - q) delta_final(e), with delta_1 the profile of tuning or of both. (Koskela & Kulkarni 2023, arXiv
  2301.11989, state this for Renyi moments, from which it cannot be smaller: a minimum of sums is at least the sum of
  the minima.)
* **Amplified.** What tuning releases has the distribution q a + (1 - q) c, which is (log(1 + q (e^e1 - 1)), q
  delta_tuning(e1))-close to c for every e1 (Balle, Barthe & Gaboardi 2018, arXiv 1807.01647, Theorem 8). Given that,
  the final run's distribution is a mixture of those with and without x, hence as close to the one without x as they
  are. So tuning and final run compose adaptively: an epsilon and a delta of each are added up.

Under ``replace_one`` the same holds with x and its replacement: a profile that covers every replacement also covers one
whose vector is zero, which is the example's absence. The smaller bound is taken, and named. (The Renyi moments of the
paper's second variant are valid too; in no setting that was tried are they smaller than both.)

An earlier search on all examples, from which this one goes on, is composed with both sides of the first bound and with
the final run in the second: whether it comes before or after, the privacy losses of what dominates it add up in any
order, and tuning is as close for each of its outcomes.

Nothing depends on how many examples are in the subsample: sample rates and divisors are those of its expected size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from raydp.privacy.accountants import epsilon, profiles
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.selection import Subsample
from raydp.privacy.selection_bounds import Bound, best, least

_Profile = Callable[[float], float]
#: Shares of delta that are tried for tuning where an epsilon of tuning and one of the final run are added up.
_SHARES = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97)
#: Below it, dp-accounting's profile is not accurate.
_SMALLEST_DELTA = 1e-10

BY_PARTS = "joint convexity over who is in the subsample (Koskela & Kulkarni 2023), by privacy profiles"
AMPLIFIED = "amplification by subsampling (Balle, Barthe & Gaboardi 2018) of tuning, added to the final run"


def subsample_bound(
    tuning: Sequence[Mechanism],
    final: Sequence[Mechanism],
    rule: Subsample,
    budget: Budget,
    *,
    before: Sequence[Mechanism] = (),
) -> Bound:
    """Epsilon of everything that a search with a subsample releases, at the budget's delta and adjacency.

    Args:
        tuning: everything that ran on the subsample.
        final: everything that ran on the rest, or on all; empty before the final run.
        rule: the fraction, and which of the two.
        budget: its ``delta`` and ``adjacency`` count.
        before: everything that ran earlier on all examples.

    Returns:
        The smallest valid bound, with the numbers that it is made of; zero where nothing ran.

    Raises:
        OutOfReach: no profile can be certified at this delta.
    """
    if not tuning and not final and not before:
        return Bound(epsilon=0.0, theorem=BY_PARTS, parts={})
    q = rule.fraction
    tuned = _profile(tuning, budget, budget.delta / q)
    last = _profile((*before, *final), budget, budget.delta)
    seen = (*before, *tuning) if rule.final == "rest" else (*before, *tuning, *final)
    inside = tuned if seen == tuple(tuning) else _profile(seen, budget, budget.delta / q)
    return best([_by_parts(inside, last, q, budget.delta), *_amplified(tuned, last, q, budget.delta)])


def _profile(mechanisms: Sequence[Mechanism], budget: Budget, near: float) -> _Profile:
    """epsilon -> delta, certified and accurate about the delta ``near``; zero for nothing."""
    if not mechanisms:
        return lambda at: 0.0
    near = min(near, 0.5)
    about = epsilon(mechanisms, delta=near, adjacency=budget.adjacency, accountant="pld").upper
    return profiles.profile(mechanisms, adjacency=budget.adjacency, epsilon=max(about, 1e-3), delta=near)


def _by_parts(inside: _Profile, outside: _Profile, q: float, delta: float) -> Bound:
    found = least(lambda at: q * inside(at) + (1 - q) * outside(at) - delta)
    parts = {"fraction": q, "delta_inside": inside(found), "delta_outside": outside(found)}
    return Bound(epsilon=found, theorem=BY_PARTS, parts=parts)


def _amplified(tuned: _Profile, last: _Profile, q: float, delta: float) -> list[Bound]:
    """(e1, q delta_tuning) and (e2, delta_final) with q delta_tuning + delta_final = delta, over a few splits of it."""
    found = []
    for share in _SHARES:
        first, second = share * delta, (1 - share) * delta
        if min(first / q, second) < _SMALLEST_DELTA:
            continue
        inner = least(lambda at, first=first: q * tuned(at) - first)  # type: ignore[misc]
        outer = least(lambda at, second=second: last(at) - second)  # type: ignore[misc]
        tuning = math.log1p(q * math.expm1(inner)) if inner < 700 else inner
        parts = {"fraction": q, "e_tuning": inner, "e_tuning_amplified": tuning, "e_final": outer, "share": share}
        found.append(Bound(epsilon=tuning + outer, theorem=AMPLIFIED, parts=parts))
    return found


__all__ = ["AMPLIFIED", "BY_PARTS", "subsample_bound"]
