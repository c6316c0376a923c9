"""DP-SGD (Abadi et al. 2016), with the large-batch recipe of De et al. 2022 as options: the dense baseline."""

from __future__ import annotations

from collections.abc import Sequence

from raydp.geometry import Identity
from raydp.methods.base import GradientHyperparameters, Method, Policy, Setting


class DensePolicy(Policy):
    """All coordinates, always."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._identity = Identity(sizes=tuple(sizes))

    def geometry(self, phase: str, step: int) -> Identity:
        return self._identity


class DpSgd(Method):
    """One phase, ``train``: every coordinate, one noise multiplier."""

    name = "dp_sgd"
    summary = "dense DP-SGD: every coordinate is clipped, noised and trained"
    hyperparameters = GradientHyperparameters

    def policy(self, hyperparameters: GradientHyperparameters, setting: Setting) -> DensePolicy:
        return DensePolicy(setting.sizes)
