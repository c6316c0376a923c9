"""TP-TopK and its control TP-Rand (arXiv 2606.04375, Algorithm 1): a dense private warm-up, then a support.

Phase ``warmup`` is dense DP-SGD whose released gradients score the coordinates. Phase ``sparse`` trains only the
support, from where the warm-up stopped; frozen coordinates keep the warm-up's value. The two methods differ in the
ranking alone: scores (``tp_topk``) or a random permutation (``tp_rand``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.geometry import Geometry, Identity, Support, support_size, top_k
from raydp.methods import scores
from raydp.methods.base import GradientHyperparameters, Method, Policy, Scalar, Setting, option
from raydp.privacy.mechanism import PhaseSpec


@dataclass(frozen=True, kw_only=True)
class TwoPhaseHyperparameters(GradientHyperparameters):
    """The shared hyperparameters and the two splits."""

    warmup_fraction: float = option(0.3, "E1/E, the warm-up's share of the logical steps, in (0, 1)")
    warmup_share: float = option(0.3, "epsilon1/epsilon, the warm-up's nominal share of the budget, in (0, 1)")
    active_ratio: float = option(0.4, "rho = k/d, the share of coordinates trained after the warm-up, in (0, 1]")
    ratio_schedule: str = option("constant", "constant, or linear_cooling from dense to rho over the sparse epochs")
    sparse_clip_norm: float | None = option(None, "C2, the clip norm of the sparse phase; none takes clip_norm")
    sparse_learning_rate: float | None = option(None, "learning rate of the sparse phase; none takes learning_rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.between("warmup_fraction", self.warmup_fraction, 0, 1, low_open=True, high_open=True)
        _validate.between("warmup_share", self.warmup_share, 0, 1, low_open=True, high_open=True)
        _validate.between("active_ratio", self.active_ratio, 0, 1, low_open=True)
        _validate.one_of("ratio_schedule", self.ratio_schedule, scores.RATIO_SCHEDULES)
        for name in ("sparse_clip_norm", "sparse_learning_rate"):
            if getattr(self, name) is not None:
                _validate.positive(name, getattr(self, name))

    def split_steps(self, population: int) -> tuple[int, int]:
        """(T1, T2): T1 = round(E1/E · T), kept inside [1, T − 1]."""
        total = self.total_steps(population)
        if total < 2:
            raise InvalidValue(
                "epochs",
                self.epochs,
                f"gives {total} logical step, but two phases need at least 2",
                "Raise epochs or lower batch_size.",
            )
        warmup = min(max(round(self.warmup_fraction * total), 1), total - 1)
        return warmup, total - warmup


class TwoPhasePolicy(Policy):
    """Scores during the warm-up; one ranking, hence nested supports, afterwards."""

    def __init__(self, hyperparameters: TwoPhaseHyperparameters, setting: Setting, *, ranking: str) -> None:
        self._sizes, self._names, self._seed = setting.sizes, setting.names, setting.seed
        self._ranking = ranking
        warmup, sparse = setting.plan.phase("warmup"), setting.plan.phase("sparse")
        self._noise_variance = (warmup.noise_std / warmup.batch_size) ** 2  # nu1², per coordinate of the average
        self._steps_per_epoch = hyperparameters.steps_per_epoch(warmup.spec.population)
        self._ratio = scores.ActiveRatio(
            target=hyperparameters.active_ratio,
            schedule=hyperparameters.ratio_schedule,
            epochs=max(1, round(sparse.steps / self._steps_per_epoch)),
        )
        self._identity = Identity(sizes=self._sizes)
        self._squares = torch.zeros(sum(self._sizes), dtype=torch.float64)
        self._warmup_steps = 0
        self._support: Support | None = None
        self._support_epoch = -1

    def geometry(self, phase: str, step: int) -> Geometry:
        if phase == "warmup":
            return self._identity
        epoch = step // self._steps_per_epoch
        if self._support is None or (epoch != self._support_epoch and self._ratio.schedule != "constant"):
            k = support_size(self._ratio.at(epoch), sum(self._sizes))
            self._support = top_k(self._ranking_scores(), k, self._sizes)
            self._support_epoch = epoch
        return self._support

    def observe(self, phase: str, step: int, released: Sequence[Tensor]) -> None:
        if phase == "warmup":
            self._squares += torch.cat(list(released)).double().square()
            self._warmup_steps += 1

    @property
    def scores(self) -> Tensor:
        """a_p = (1/T1) Σ_t g̃²_{t,p} − nu1²; E[a_p] = G_p² under the model of Lemma 5.2. Float64 (d,)."""
        return self._squares / max(1, self._warmup_steps) - self._noise_variance

    def _ranking_scores(self) -> Tensor:
        if self._ranking == "scores":
            return self.scores
        return scores.random_ranking(sum(self._sizes), seed=self._seed)

    def diagnostics(self) -> dict[str, float]:
        if self._support is None:
            return {}
        found = {
            "active_ratio_realised": scores.realised_ratio(self._support, self._sizes),
            **scores.active_fractions(self._support, self._sizes, self._names),
        }
        if self._ranking == "scores":
            found["proxy_concentration"] = scores.concentration(self.scores, self._support, self._sizes)
            found["proxy_concentration_null"] = scores.null_concentration(
                steps=self._warmup_steps, coordinates=sum(self._sizes), k=sum(self._support.sizes)
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"squares": self._squares, "warmup_steps": self._warmup_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._squares, self._warmup_steps = state["squares"], int(state["warmup_steps"])


class TwoPhase(Method):
    """The two-phase family; ``ranking`` is all that its members differ in."""

    hyperparameters = TwoPhaseHyperparameters

    def __init__(self, *, name: str, summary: str, ranking: str) -> None:
        self.name, self.summary, self.ranking = name, summary, ranking  # type: ignore[misc]

    def phases(self, hyperparameters: TwoPhaseHyperparameters, *, population: int) -> tuple[PhaseSpec, ...]:
        warmup_steps, sparse_steps = hyperparameters.split_steps(population)
        clip_norm = hyperparameters.clip_norm
        return (
            PhaseSpec(
                name="warmup",
                steps=warmup_steps,
                batch_size=hyperparameters.batch_size,
                population=population,
                clip_norm=clip_norm,
                share=hyperparameters.warmup_share,
            ),
            PhaseSpec(
                name="sparse",
                steps=sparse_steps,
                batch_size=hyperparameters.batch_size,
                population=population,
                clip_norm=clip_norm if hyperparameters.sparse_clip_norm is None else hyperparameters.sparse_clip_norm,
            ),
        )

    def policy(self, hyperparameters: TwoPhaseHyperparameters, setting: Setting) -> TwoPhasePolicy:
        return TwoPhasePolicy(hyperparameters, setting, ranking=self.ranking)

    def learning_rate(self, hyperparameters: TwoPhaseHyperparameters, phase: str) -> float:
        if phase == "sparse" and hyperparameters.sparse_learning_rate is not None:
            return hyperparameters.sparse_learning_rate
        return hyperparameters.learning_rate

    def lineage(self, hyperparameters: TwoPhaseHyperparameters, phase: str) -> dict[str, Scalar]:
        """The warm-up is the same computation whatever the ranking, the ratio or the sparse phase will be."""
        if phase != "warmup":
            return super().lineage(hyperparameters, phase)
        later = ("active_ratio", "ratio_schedule", "sparse_clip_norm", "sparse_learning_rate")
        return {name: value for name, value in asdict(hyperparameters).items() if name not in later}
