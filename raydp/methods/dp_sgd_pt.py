"""DP-SGD-PT: ordinary training on public data, then DP-SGD from those weights (after De et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from raydp import _validate
from raydp.methods.base import Setting, option
from raydp.methods.dp_sgd import DensePolicy, DpSgd
from raydp.methods.pretraining import PretrainableHyperparameters, Pretraining


@dataclass(frozen=True, kw_only=True)
class DpSgdPtHyperparameters(PretrainableHyperparameters):
    """Those of DP-SGD and of the pre-training, which there always is."""

    pretrain_epochs: int = option(20, "passes over the public examples before the first private step")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("pretrain_epochs", self.pretrain_epochs, low=1)


class PretrainedDensePolicy(DensePolicy):
    """All coordinates, from pre-trained weights."""

    def __init__(self, hyperparameters: DpSgdPtHyperparameters, setting: Setting) -> None:
        super().__init__(setting.sizes)
        self._pretraining = Pretraining(hyperparameters, setting)

    def prepare(self) -> None:
        self._pretraining.run()


class DpSgdPt(DpSgd):
    """DP-SGD's one phase ``train``; the pre-training sees public examples only."""

    name = "dp_sgd_pt"
    summary = "dense DP-SGD from weights that were trained on public examples first"
    hyperparameters = DpSgdPtHyperparameters

    def uses_public(self, hyperparameters: DpSgdPtHyperparameters) -> bool:
        return True

    def policy(self, hyperparameters: DpSgdPtHyperparameters, setting: Setting) -> PretrainedDensePolicy:  # type: ignore[override]
        return PretrainedDensePolicy(hyperparameters, setting)
