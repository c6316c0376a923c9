"""ON-TopK and ON-Rand: one phase, a support that is refreshed each epoch (arXiv 2606.04375, Table 1).

``on_rand`` draws a fresh random support each epoch (Zhu & Blaschko 2023). ``on_topk`` ranks by scores gathered
online from
released gradients. A frozen coordinate releases nothing, so its score is stale: the mean is kept over the steps in
which
the coordinate was active, the first epoch is dense, and a share of each support is explored at random. How the paper's
authors do it is not stated; these rules are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydp import _validate
from raydp.geometry import Geometry, Identity, Support, support_size, top_k
from raydp.methods import scores
from raydp.methods.base import GradientHyperparameters, Method, Policy, Setting, option


@dataclass(frozen=True, kw_only=True)
class OnlineHyperparameters(GradientHyperparameters):
    """The shared hyperparameters and the support's."""

    active_ratio: float = option(0.4, "rho = k/d, the share of coordinates trained in an epoch, in (0, 1]")
    ratio_schedule: str = option("constant", "constant, or linear_cooling from dense to rho over the epochs")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.between("active_ratio", self.active_ratio, 0, 1, low_open=True)
        _validate.one_of("ratio_schedule", self.ratio_schedule, scores.RATIO_SCHEDULES)


@dataclass(frozen=True, kw_only=True)
class OnlineTopKHyperparameters(OnlineHyperparameters):
    """ON-TopK also explores."""

    explore: float = option(0.1, "share of the support drawn at random from outside the top, in [0, 1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.between("explore", self.explore, 0, 1, high_open=True)


class OnlinePolicy(Policy):
    """Refreshes the support at every epoch's first step."""

    def __init__(self, hyperparameters: OnlineHyperparameters, setting: Setting, *, explore: float | None) -> None:
        phase = setting.plan.phase("train")
        self._sizes, self._names, self._seed = setting.sizes, setting.names, setting.seed
        self._explore = explore  # None: random supports, no scores
        self._noise_variance = (phase.noise_std / phase.batch_size) ** 2
        self._steps_per_epoch = hyperparameters.steps_per_epoch(phase.spec.population)
        self._ratio = scores.ActiveRatio(
            target=hyperparameters.active_ratio,
            schedule=hyperparameters.ratio_schedule,
            epochs=hyperparameters.total_epochs(phase.spec.population),
        )
        coordinates = sum(self._sizes)
        self._sums = torch.zeros(coordinates, dtype=torch.float64)
        self._counts = torch.zeros(coordinates, dtype=torch.float64)
        self._geometry: Geometry = Identity(sizes=self._sizes)
        self._epoch = 0 if explore is not None else -1

    def geometry(self, phase: str, step: int) -> Geometry:
        epoch = step // self._steps_per_epoch
        if epoch != self._epoch:
            self._geometry = self._refresh(epoch)
            self._epoch = epoch
        return self._geometry

    def observe(self, phase: str, step: int, released: Sequence[Tensor]) -> None:
        if self._explore is None:
            return
        squares = torch.cat(list(released)).double().square() - self._noise_variance
        if self._geometry.support is None:
            self._sums += squares
            self._counts += 1
        else:
            active = self._flat_indices()
            self._sums[active] += squares
            self._counts[active] += 1

    def _flat_indices(self) -> Tensor:
        assert self._geometry.support is not None
        starts = torch.tensor([0, *self._sizes]).cumsum(0)[:-1].tolist()
        return torch.cat([index + start for index, start in zip(self._geometry.support, starts, strict=True)])

    def _refresh(self, epoch: int) -> Support:
        coordinates = sum(self._sizes)
        k = support_size(self._ratio.at(epoch), coordinates)
        shuffle = scores.random_ranking(coordinates, seed=self._seed, draw=epoch)
        if self._explore is None:
            return top_k(shuffle, k, self._sizes)
        ranking = self._sums / self._counts.clamp(min=1)
        explored = min(int(self._explore * k), coordinates - k)
        if explored == 0:
            return top_k(ranking, k, self._sizes)
        best = torch.argsort(ranking, descending=True, stable=True)[: k - explored]
        ranked = shuffle.double()
        ranked[best] = float("inf")  # the top stays; the rest of the support is filled in random order
        return top_k(ranked, k, self._sizes)

    def diagnostics(self) -> dict[str, float]:
        if not isinstance(self._geometry, Support):
            return {}
        return {
            "active_ratio_realised": scores.realised_ratio(self._geometry, self._sizes),
            **scores.active_fractions(self._geometry, self._sizes, self._names),
        }

    def state_dict(self) -> dict[str, Any]:
        support = self._geometry.support
        return {
            "sums": self._sums,
            "counts": self._counts,
            "epoch": self._epoch,
            "support": None if support is None else list(support),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._counts, self._epoch = state["sums"], state["counts"], int(state["epoch"])
        if state["support"] is not None:
            self._geometry = Support(indices=tuple(state["support"]))


class Online(Method):
    """The online family: ``on_topk`` explores around its scores, ``on_rand`` has none."""

    def __init__(self, *, name: str, summary: str, hyperparameters: type[OnlineHyperparameters]) -> None:
        self.name, self.summary, self.hyperparameters = name, summary, hyperparameters  # type: ignore[misc]

    def policy(self, hyperparameters: OnlineHyperparameters, setting: Setting) -> OnlinePolicy:
        explore = hyperparameters.explore if isinstance(hyperparameters, OnlineTopKHyperparameters) else None
        return OnlinePolicy(hyperparameters, setting, explore=explore)
