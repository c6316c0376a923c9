"""Replace-one bounds from an accountant that only knows add/remove."""

from __future__ import annotations

import math
from collections.abc import Callable


def via_add_remove(epsilon: Callable[[float], float], *, delta: float) -> float:
    """Upper bound of the replace-one epsilon at delta, by group privacy.

    Replacing an example is removing it and adding another. With (e, d) for each of the two, P <= e^e R + d and
    R <= e^e Q + d give P <= e^2e Q + (1 + e^e) d. So epsilon = 2 e(d) for any d with (1 + e^e(d)) d <= delta. It is
    valid and loose (about twice the add/remove value); the pld accountant bounds replacement directly.

    Args:
        epsilon: delta -> an upper bound of the add/remove epsilon.
        delta: the delta at which the replace-one bound is wanted.
    """
    share = delta / 4
    for _ in range(200):
        value = epsilon(share)
        if math.isinf(value) or (1 + math.exp(min(value, 700.0))) * share <= delta:
            return 2 * value
        # Epsilon grows as share shrinks, a little; aim slightly lower than the fixed point.
        share = min(0.9 * delta / (1 + math.exp(min(value, 700.0))), 0.5 * share)
        if share < 1e-300:
            return math.inf
    return math.inf
