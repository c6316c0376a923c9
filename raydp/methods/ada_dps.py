"""AdaDPS (Li et al. 2022, arXiv 2202.05963): coordinates in units of their public root mean square, clipped and noised.

One-sided: the update is the noisy average of clip(g / A), not divided again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from raydp import _validate
from raydp.geometry.diagonal import Diagonal, root_mean_squares
from raydp.geometry.kfac import LABELS
from raydp.methods.base import Method, Setting, option
from raydp.methods.pretraining import PretrainableHyperparameters, Pretraining
from raydp.methods.public import FisherExamples, RefreshedPolicy, public_generator, require_public


@dataclass(frozen=True, kw_only=True)
class AdaDpsHyperparameters(PretrainableHyperparameters):
    """The shared hyperparameters, those of the pre-training, and the diagonal's."""

    clip_norm: float = option(2.0, "C, one L2 norm over all coordinates g/A of an example")
    damping: float = option(1e-3, "epsilon_0 > 0, added to each coordinate's root mean square")
    refresh_interval: int = option(8, "steps between two estimates of the root mean squares")
    fisher_labels: str = option("model", "labels of public gradients: model (drawn from its outputs), random or given")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.positive("damping", self.damping)
        _validate.integer("refresh_interval", self.refresh_interval, low=1)
        _validate.one_of("fisher_labels", self.fisher_labels, LABELS)


class AdaDpsPolicy(RefreshedPolicy):
    """Estimates A on the public examples every ``refresh_interval`` steps."""

    def __init__(self, hyperparameters: AdaDpsHyperparameters, setting: Setting) -> None:
        super().__init__(hyperparameters.refresh_interval, setting.workers)
        self._damping, self._setting = hyperparameters.damping, setting
        public = require_public(setting, purpose="on which ada_dps measures its coordinates")
        self._examples = FisherExamples.of(setting, public, hyperparameters.fisher_labels)
        self._pretraining = Pretraining(hyperparameters, setting)

    def prepare(self) -> None:
        self._pretraining.run()

    def estimate(self, step: int) -> Sequence[Tensor]:
        return root_mean_squares(
            self._setting.model,
            self._examples.images,
            damping=self._damping,
            generator=public_generator(self._setting.seed, step),
            fisher_labels=self._examples.fisher_labels,
            labels=self._examples.labels,
        )

    def build(self, tensors: Sequence[Tensor]) -> Diagonal:
        return Diagonal(scales=tuple(tensors))


class AdaDps(Method):
    """One phase, ``train``, with DP-SGD's noise multiplier."""

    name = "ada_dps"
    summary = "per-example gradients are divided by each coordinate's public root mean square, then clipped and noised"
    hyperparameters = AdaDpsHyperparameters
    tasks = ("classification",)  # labels are drawn from logits

    def uses_public(self, hyperparameters: AdaDpsHyperparameters) -> bool:
        return True

    def policy(self, hyperparameters: AdaDpsHyperparameters, setting: Setting) -> AdaDpsPolicy:
        return AdaDpsPolicy(hyperparameters, setting)
