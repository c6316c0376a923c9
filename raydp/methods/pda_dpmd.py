"""PDA-DPMD (Amid et al. 2022, arXiv 2112.00193): mirror descent whose map is the public loss, in its first-order form.

θ ← θ − η (α_t g̃ + (1 − α_t) ∇L_pub(θ)), g̃ the private gradient of DP-SGD. The public gradient is taken of a fresh
public batch at the weights of the step, which earlier private outputs decide: it is post-processing and costs no
budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.methods.base import Setting, option
from raydp.methods.dp_sgd import DensePolicy, DpSgd
from raydp.methods.pretraining import PretrainableHyperparameters, Pretraining
from raydp.methods.public import model_classes, public_generator, public_seed, require_public

MIXINGS = ("constant", "cosine")
_BATCH, _TASK = 2**31 + 4, 2**31 + 5  # addresses of public randomness


@dataclass(frozen=True, kw_only=True)
class PdaDpmdHyperparameters(PretrainableHyperparameters):
    """Those of DP-SGD, of a pre-training, and the mixture's."""

    alpha: float = option(0.5, "the private gradient's weight in [0, 1]; the public one has the rest")
    alpha_schedule: str = option("constant", "constant, or cosine: alpha·cos(πt/2T), from alpha to 0")
    public_batch_size: int = option(64, "public examples of a step, drawn afresh")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.between("alpha", self.alpha, 0, 1)
        _validate.one_of("alpha_schedule", self.alpha_schedule, MIXINGS)
        _validate.integer("public_batch_size", self.public_batch_size, low=1)

    def private_weight(self, step: int, steps: int) -> float:
        """α_t at step t = ``step`` of T = ``steps``."""
        return self.alpha * (math.cos(math.pi * step / (2 * steps)) if self.alpha_schedule == "cosine" else 1.0)


class PdaDpmdPolicy(DensePolicy):
    """All coordinates; each step's direction is mixed with the gradient of the public loss."""

    def __init__(self, hyperparameters: PdaDpmdHyperparameters, setting: Setting) -> None:
        super().__init__(setting.sizes)
        self._hyperparameters, self._setting = hyperparameters, setting
        self._public = require_public(setting, purpose="whose loss is the mirror map of pda_dpmd")
        self._steps = setting.plan.phase("train").steps
        if self._public.num_classes is not None:
            classes = model_classes(setting, self._public.inputs)
            if int(self._public.targets.max()) >= classes:
                raise InvalidValue(
                    "public",
                    f"{self._public.num_classes} classes",
                    f"must have labels in [0, {classes}), the classes of the model: its loss is taken on them",
                    "Choose public examples of the private classes.",
                )
        self._pretraining = Pretraining(hyperparameters, setting)

    def prepare(self) -> None:
        self._pretraining.run()

    def direction(self, phase: str, step: int, released: list[Tensor]) -> list[Tensor]:
        weight = self._hyperparameters.private_weight(step, self._steps)
        public = self._public_gradient(step)
        return [weight * private + (1 - weight) * own for private, own in zip(released, public, strict=True)]

    def _public_gradient(self, step: int) -> list[Tensor]:
        """Gradient of the mean loss of a public batch at the model's weights, flat, one tensor a parameter."""
        public, task, seed = self._public, self._setting.task, self._setting.seed
        size = self._hyperparameters.public_batch_size
        chosen = torch.randint(len(public.targets), (size,), generator=public_generator(seed, _BATCH, step))
        inputs, targets = public.inputs[chosen], public.targets[chosen]
        randomness = np.random.default_rng(public_seed(seed, _TASK, step))
        inputs, targets = task.examples(inputs, targets, task.draw(size, inputs.shape[1:], randomness))
        parameters = [parameter for parameter in self._setting.model.parameters() if parameter.requires_grad]
        loss = task.loss(self._setting.model(inputs), targets) / size
        return [gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]


class PdaDpmd(DpSgd):
    """DP-SGD's one phase ``train``; public gradients join in after the noise."""

    name = "pda_dpmd"
    summary = "DP-SGD whose noisy gradient is mixed with the gradient of the loss on public examples"
    hyperparameters = PdaDpmdHyperparameters

    def uses_public(self, hyperparameters: PdaDpmdHyperparameters) -> bool:
        return True

    def policy(self, hyperparameters: PdaDpmdHyperparameters, setting: Setting) -> PdaDpmdPolicy:  # type: ignore[override]
        return PdaDpmdPolicy(hyperparameters, setting)
