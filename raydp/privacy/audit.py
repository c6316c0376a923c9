"""Auditing: a lower bound on epsilon from what a mechanism was seen to do. A sanity check, never a certificate.

Run a mechanism many times on two neighbouring data sets, reduce every output to a score that is large when the extra
example (the canary) takes part, and ask how well a threshold tells the two apart. A mechanism that is
(epsilon, delta)-DP bounds this in both directions, for every threshold (Kairouz et al., ICML 2015, arXiv 1311.0776):

    TPR <= e^epsilon · FPR + delta,   TNR <= e^epsilon · FNR + delta,

so rates that break the bound refute the claim. Rates are replaced by their Clopper-Pearson limits, and the threshold
is chosen on one half of the scores and evaluated on the other, so the confidence is what it says
(Jagielski et al., NeurIPS 2020, arXiv 2006.07709; Nasr et al., USENIX Security 2021, arXiv 2101.04535).

One run can tell as well (Steinke, Nasr & Jagielski, NeurIPS 2023, arXiv 2305.08846): many canaries, each of which takes
part by its own fair coin, and guesses of the coins from the output. By their Theorem 5.2, if the mechanism is
(epsilon, delta)-DP for one canary that takes part or not, then r guesses about m canaries, the rest abstained from, are
right v times or more with probability at most

    P[W >= v] + m·delta·max_{1<=i<=m} (2/i)·P[v - i <= W < v],   W ~ Binomial(r, e^epsilon/(1 + e^epsilon)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import beta, binom

from raydp import _validate
from raydp.errors import InvalidValue

_MOST_THRESHOLDS = 2000


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the scores prove.

    Attributes:
        epsilon_lower: with the stated confidence, a mechanism that is (epsilon, delta)-DP has epsilon >= this.
        threshold: scores at or above it count as "the canary took part".
        inverted: the bound came from the second inequality (true and false negatives).
        true_rate, false_rate: the rates on the evaluation half (of negatives when inverted).
        confidence: 1 - beta.
    """

    epsilon_lower: float
    threshold: float
    inverted: bool
    true_rate: float
    false_rate: float
    confidence: float


def clopper_pearson(successes: np.ndarray | int, trials: int, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """One-sided Clopper-Pearson limits of a probability: below the lower, or above the upper, with chance <= ``tail``.

    Args:
        successes: counts in [0, trials].
        trials: >= 1.
        tail: in (0, 1), for each side alone.

    Returns:
        (lower, upper), of the shape of ``successes``.
    """
    trials = _validate.integer("trials", trials, low=1)
    tail = _validate.between("tail", tail, 0, 1, low_open=True, high_open=True)
    counts = np.asarray(successes, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        lower = np.where(counts == 0, 0.0, beta.ppf(tail, counts, trials - counts + 1))
        upper = np.where(counts == trials, 1.0, beta.ppf(1 - tail, counts + 1, trials - counts))
    return lower, upper


def epsilon_lower_bound(
    with_canary: Sequence[float] | np.ndarray,
    without_canary: Sequence[float] | np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """A lower confidence bound on epsilon from independent scores.

    Args:
        with_canary: scores of runs on the data set with the canary; larger means "it took part".
        without_canary: scores of runs on the neighbouring data set.
        delta: in [0, 1).
        confidence: 1 - beta in (0, 1). The two limits that enter the bound each take beta/2.
        seed: which halves the scores are split into.

    Returns:
        The audit; ``epsilon_lower`` is 0 when nothing is proved.

    Raises:
        InvalidValue: fewer than two scores on a side, a score that is not finite, or a number out of range.
    """
    delta = _validate.between("delta", delta, 0, 1, high_open=True)
    confidence = _validate.between("confidence", confidence, 0, 1, low_open=True, high_open=True)
    generator = np.random.default_rng(seed)
    choose_in, judge_in = _halves("with_canary", with_canary, generator)
    choose_out, judge_out = _halves("without_canary", without_canary, generator)
    tail = (1 - confidence) / 2
    thresholds = _thresholds(choose_in, choose_out)
    bounds = _bounds(choose_in, choose_out, thresholds, delta, tail)
    direction, position = np.unravel_index(int(np.argmax(bounds)), bounds.shape)
    chosen = thresholds[position : position + 1]
    inverted = bool(direction == 1)
    positive_in, positive_out = _share(judge_in, chosen), _share(judge_out, chosen)
    return Audit(
        epsilon_lower=float(_bounds(judge_in, judge_out, chosen, delta, tail)[direction, 0]),
        threshold=float(chosen[0]),
        inverted=inverted,
        true_rate=1 - positive_out if inverted else positive_in,
        false_rate=1 - positive_in if inverted else positive_out,
        confidence=confidence,
    )


def _halves(
    field: str, scores: Sequence[float] | np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A random half to choose the threshold on, and the other half to judge it; both sorted."""
    values = np.asarray(scores, dtype=np.float64).ravel()
    if len(values) < 2 or not np.isfinite(values).all():
        raise InvalidValue(
            field, f"{len(values)} scores", "must be two or more finite numbers", "Run the mechanism more often."
        )
    values = generator.permutation(values)
    middle = len(values) // 2
    return np.sort(values[:middle]), np.sort(values[middle:])


def _thresholds(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Observed scores, all of them or evenly spaced in rank, and densely in both tails where the best ones lie."""
    values = np.unique(np.concatenate([inside, outside]))
    if len(values) <= _MOST_THRESHOLDS:
        return values
    tail = np.unique(np.geomspace(1, len(values) // 2, _MOST_THRESHOLDS // 2).astype(int))
    return values[np.unique(np.concatenate([tail - 1, len(values) - tail]))]


def _share(sorted_scores: np.ndarray, threshold: np.ndarray) -> float:
    return float(_at_least(sorted_scores, threshold)[0]) / len(sorted_scores)


def _at_least(sorted_scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """How many scores are >= each threshold."""
    return len(sorted_scores) - np.searchsorted(sorted_scores, thresholds, side="left")


def _bounds(inside: np.ndarray, outside: np.ndarray, thresholds: np.ndarray, delta: float, tail: float) -> np.ndarray:
    """Lower bounds on epsilon, (2, thresholds): by true and false positives, and by true and false negatives."""
    in_low, _ = clopper_pearson(_at_least(inside, thresholds), len(inside), tail)
    _, out_high = clopper_pearson(_at_least(outside, thresholds), len(outside), tail)
    true = np.stack([in_low, 1 - out_high]) - delta
    false = np.stack([out_high, 1 - in_low])
    ratio = true / np.maximum(false, math.ulp(0.0))
    return np.log(np.maximum(ratio, 1.0))


@dataclass(frozen=True, kw_only=True)
class OneRunAudit:
    """What the guesses about one run's canaries prove.

    Attributes:
        epsilon_lower: with the stated confidence, a mechanism that is (epsilon, delta)-DP has epsilon >= this.
        canaries: m, how many there were, in or out.
        guesses: r, how many were guessed about.
        correct: v, how many guesses were right.
        confidence: 1 - beta, over all numbers of guesses that were tried.
        reach: what ``epsilon_lower`` would be if all guesses were right: an audit cannot refute a claim above it.
    """

    epsilon_lower: float
    canaries: int
    guesses: int
    correct: int
    confidence: float
    reach: float


def one_run_p_value(correct: int, guesses: int, canaries: int, *, epsilon: float, delta: float) -> float:
    """The chance, at most, of so many right guesses under an (epsilon, delta)-DP mechanism (Theorem 5.2, see above)."""
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))  # P[v - i <= W < v], i = 1, ..., v
    slack = float(np.max(2 * below / np.arange(1, correct + 1)))
    return min(1.0, tail + canaries * delta * slack)


def one_run_epsilon(correct: int, guesses: int, canaries: int, *, delta: float, confidence: float) -> float:
    """The largest epsilon that so many right guesses refute at this confidence, to 1e-6 from below; 0 if none."""
    low, high = 0.0, 64.0
    if one_run_p_value(correct, guesses, canaries, epsilon=0.0, delta=delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = one_run_p_value(correct, guesses, canaries, epsilon=middle, delta=delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


def one_run_lower_bound(
    scores: Sequence[float] | np.ndarray,
    included: Sequence[bool] | np.ndarray,
    *,
    delta: float,
    confidence: float = 0.95,
    shares: Sequence[float] = (1.0, 0.5, 0.2),
) -> OneRunAudit:
    """A lower confidence bound on epsilon from one run with canaries.

    The canaries of the highest scores are guessed to have taken part and equally many of the lowest not to have; the
    rest is abstained from. Each share of canaries to guess about is tried, at a confidence that leaves the stated one
    for all of them together (a union bound), and the best counts.

    Args:
        scores: one a canary; larger means "it took part".
        included: whether it did, each by an independent fair coin.
        delta: in [0, 1).
        confidence: 1 - beta in (0, 1).
        shares: in (0, 1], fixed before the scores are seen.

    Raises:
        InvalidValue: fewer than two canaries, lengths that differ, a score that is not finite, a number out of range.
    """
    delta = _validate.between("delta", delta, 0, 1, high_open=True)
    confidence = _validate.between("confidence", confidence, 0, 1, low_open=True, high_open=True)
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    count = len(values)
    if count < 2 or values.shape != truth.shape or not np.isfinite(values).all():
        raise InvalidValue(
            "scores", f"{count} scores", "must be finite, two or more, and one a canary", "Run the audit with more."
        )
    each = 1 - (1 - confidence) / len(shares)
    order = np.argsort(values, kind="stable")
    found = []
    for share in shares:
        half = max(1, int(_validate.between("shares", share, 0, 1, low_open=True) * count / 2))
        correct = int((~truth[order[:half]]).sum() + truth[order[-half:]].sum())
        bound = one_run_epsilon(correct, 2 * half, count, delta=delta, confidence=each)
        found.append((bound, 2 * half, correct))
    best, guesses, correct = max(found)
    reach = max(one_run_epsilon(tried, tried, count, delta=delta, confidence=each) for _, tried, _ in found)
    return OneRunAudit(
        epsilon_lower=best, canaries=count, guesses=guesses, correct=correct, confidence=confidence, reach=reach
    )
