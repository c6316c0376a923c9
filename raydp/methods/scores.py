"""Parts that the coordinate-sparse methods share: cooling of the active ratio, scores, and their null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raydp import _validate
from raydp.geometry import Support

RATIO_SCHEDULES = ("constant", "linear_cooling")


@dataclass(frozen=True, kw_only=True)
class ActiveRatio:
    """The share of coordinates that is trained, epoch by epoch; independent of the data.

    ``constant``: rho in every epoch (Algorithm 1). ``linear_cooling``: 1 − (1 − rho)·e/(E − 1) in epoch e of E, from
    dense
    to rho (Zhu & Blaschko 2023).
    """

    target: float
    schedule: str
    epochs: int

    def __post_init__(self) -> None:
        _validate.between("active_ratio", self.target, 0, 1, low_open=True)
        _validate.one_of("ratio_schedule", self.schedule, RATIO_SCHEDULES)

    def at(self, epoch: int) -> float:
        """rho in this epoch (0, 1, …); epochs past the last keep the last."""
        if self.schedule == "constant" or self.epochs == 1:
            return self.target
        return 1.0 - (1.0 - self.target) * min(epoch, self.epochs - 1) / (self.epochs - 1)


def random_ranking(coordinates: int, *, seed: int, draw: int = 0) -> Tensor:
    """Scores (d,) of a uniformly random permutation: public randomness, independent of the data."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + draw * 7919 + 104_729) % 2**63)
    return torch.randperm(coordinates, generator=generator).to(torch.float32)


def concentration(scores: Tensor, support: Support, sizes: Sequence[int]) -> float:
    """DP-visible proxy concentration kappa = Σ_{p∈A} a_p⁺ / Σ_p a_p⁺. Compare it with its null, not
    k/d.
    """
    positive = scores.clamp(min=0)
    parts = zip(positive.split(list(sizes)), support.indices, strict=True)
    active = sum(float(part[index].sum()) for part, index in parts)
    return active / max(float(positive.sum()), torch.finfo(positive.dtype).tiny)


def null_concentration(*, steps: int, coordinates: int, k: int, draws: int = 5, sample: int = 20_000) -> float:
    """kappa of TopK on pure noise: a_p = nu²(χ²_T/T − 1), simulated; what kappa would be with no signal at all.

    Args:
        steps: T1, the number of released gradients behind each score.
        coordinates, k: d and k; above ``sample`` coordinates a sample of that size at the same ratio is simulated.
        draws: simulations that are averaged.
    """
    size = min(coordinates, sample)
    active = max(1, round(k * size / coordinates))
    generator = np.random.default_rng(0)
    values = []
    for _ in range(draws):
        scores = np.sort(generator.chisquare(steps, size) / steps - 1)[::-1]
        positive = np.clip(scores, 0, None)
        values.append(positive[:active].sum() / positive.sum())
    return float(np.mean(values))


def active_fractions(support: Support, sizes: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    """Active share of each parameter tensor: a global TopK may empty whole layers."""
    return {
        f"active_fraction.{name.lower()}": index.numel() / size
        for name, size, index in zip(names, sizes, support.indices, strict=True)
    }


def realised_ratio(support: Support, sizes: Sequence[int]) -> float:
    """k/d of a support."""
    return sum(support.sizes) / sum(sizes)
