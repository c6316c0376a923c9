"""GEP (Yu et al. 2021, arXiv 2102.12677): embeddings in a public gradient subspace and residuals, clipped apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.geometry.kfac import LABELS
from raydp.geometry.subspace import SUBSPACE_CLIP_NORM, Subspace, principal_bases, share_out
from raydp.methods.base import Method, Setting, option
from raydp.methods.pretraining import PretrainableHyperparameters, Pretraining
from raydp.methods.public import FisherExamples, RefreshedPolicy, public_seed, require_public


@dataclass(frozen=True, kw_only=True)
class GepHyperparameters(PretrainableHyperparameters):
    """The shared hyperparameters, those of the pre-training, and the subspace's."""

    clip_norm: float = option(
        SUBSPACE_CLIP_NORM, "always √2, of two parts scaled to norm 1; choose the two clip norms of the parts instead"
    )
    embedding_clip_norm: float = option(10.0, "C_w, one L2 norm over an example's coordinates in the subspace")
    residual_clip_norm: float = option(2.0, "C_r, one L2 norm over what the subspace leaves of an example's gradient")
    subspace: int = option(100, "basis vectors of all parameter tensors together, at least one each")
    power_iterations: int = option(2, "passes over the public gradients for a basis")
    refresh_interval: int = option(8, "steps between two bases")
    fisher_labels: str = option("model", "labels of public gradients: model (drawn from its outputs), random or given")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_norm != SUBSPACE_CLIP_NORM:
            raise InvalidValue(
                "clip_norm",
                self.clip_norm,
                "has no effect on gep, which clips the two parts of a gradient apart",
                "Set embedding_clip_norm and residual_clip_norm instead.",
            )
        _validate.positive("embedding_clip_norm", self.embedding_clip_norm)
        _validate.positive("residual_clip_norm", self.residual_clip_norm)
        _validate.integer("subspace", self.subspace, low=1)
        _validate.integer("power_iterations", self.power_iterations, low=1)
        _validate.integer("refresh_interval", self.refresh_interval, low=1)
        _validate.one_of("fisher_labels", self.fisher_labels, LABELS)


class GepPolicy(RefreshedPolicy):
    """Finds a basis of public gradients every ``refresh_interval`` steps."""

    def __init__(self, hyperparameters: GepHyperparameters, setting: Setting) -> None:
        super().__init__(hyperparameters.refresh_interval, setting.workers)
        self._hyperparameters, self._setting = hyperparameters, setting
        public = require_public(setting, purpose="whose gradients span the subspace of gep")
        self._examples = FisherExamples.of(setting, public, hyperparameters.fisher_labels)
        share_out(hyperparameters.subspace, setting.sizes, limit=len(public.targets))  # refused before any training
        self._pretraining = Pretraining(hyperparameters, setting)

    def prepare(self) -> None:
        self._pretraining.run()

    def estimate(self, step: int) -> Sequence[Tensor]:
        return principal_bases(
            self._setting.model,
            self._examples.images,
            subspace=self._hyperparameters.subspace,
            iterations=self._hyperparameters.power_iterations,
            seed=public_seed(self._setting.seed, step),
            fisher_labels=self._examples.fisher_labels,
            labels=self._examples.labels,
        )

    def build(self, tensors: Sequence[Tensor]) -> Subspace:
        return Subspace(
            bases=tuple(tensors),
            embedding_clip_norm=self._hyperparameters.embedding_clip_norm,
            residual_clip_norm=self._hyperparameters.residual_clip_norm,
        )


class Gep(Method):
    """One phase, ``train``: both noisy parts are one Gaussian mechanism of clip norm √2 on each sample."""

    name = "gep"
    summary = (
        "a public subspace takes most of the signal in few coordinates; it and the residual are clipped and noised"
    )
    hyperparameters = GepHyperparameters
    tasks = ("classification",)  # labels are drawn from logits

    def uses_public(self, hyperparameters: GepHyperparameters) -> bool:
        return True

    def policy(self, hyperparameters: GepHyperparameters, setting: Setting) -> GepPolicy:
        return GepPolicy(hyperparameters, setting)
