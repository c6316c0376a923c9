"""DP-NGD's geometry: clip and noise per-example gradients in the space whitened by a public curvature.

The paper's Algorithm 1 (arXiv 2607.05866) whitens by F̃^{-1/2}, clips, adds isotropic noise, and maps back by F̃^{-1/2}.
Here each block's coordinates are M g with MᵀM = F̃^{-1}, and Mᵀ maps back. Any such M differs from F̃^{-1/2} by an
orthogonal matrix, which changes neither norms nor the law of isotropic noise, so the coordinates stay in the eigenbasis
(:mod:`raydp.geometry.coordinates`). The released update is F̃^{-1} times the clipped average, its noise has covariance
(σC/B)² F̃^{-1}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from raydp.geometry.coordinates import Coordinates
from raydp.geometry.curvature import Curvature
from raydp.geometry.lengths import Lengths, lengths_of
from raydp.geometry.rank_one import ExampleGradients


@dataclass(frozen=True, kw_only=True)
class FlooredGeometry(ABC):
    """What the geometries of one curvature share.

    Attributes:
        curvature: F in its eigenbasis, from public data and released weights only.
        floor: λ_t >= 0, below which eigenvalues are clamped. At 0 a flat direction has an infinite inverse.
    """

    power: ClassVar[float]  # coordinates are those of F̃^{-power} g

    curvature: Curvature
    floor: float

    @property
    def support(self) -> None:
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.curvature.sizes

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Per-example gradients (n, *shape) of each parameter to coordinates (n, size)."""
        return [block.project(gradients) for block in self.coordinates]

    @property
    def parameter_sizes(self) -> tuple[int, ...]:
        return self.curvature.parameter_sizes

    @cached_property
    def stretches(self) -> tuple[float, float]:
        """λ̃^-power at the largest eigenvalue and at the smallest; the second is infinite if that is 0."""
        scales = [block.scale.double() for block in self.coordinates if block.size]
        return min(float(scale.min()) for scale in scales), max(float(scale.max()) for scale in scales)

    def lengths(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        """Lengths (n,), float64, of the coordinates of per-example gradients; never too short."""
        return torch.stack([block.squares(gradients) for block in self._lengths]).sum(dim=0).sqrt()

    @abstractmethod
    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        """Released averages (size,) to the update of each parameter, flat."""

    def with_floor(self, floor: float) -> Self:
        """The same geometry at another floor; the eigendecomposition is shared."""
        return replace(self, floor=floor)

    @cached_property
    def coordinates(self) -> list[Coordinates]:
        """The map of each block."""
        return [Coordinates(part, floor=self.floor, power=self.power) for part in self.curvature.blocks]

    @cached_property
    def _lengths(self) -> list[Lengths]:
        return [
            lengths_of(part, coordinates, floor=self.floor, power=self.power)
            for part, coordinates in zip(self.curvature.blocks, self.coordinates, strict=True)
        ]

    def _lift(self, released: Sequence[Tensor], *, scale: bool) -> list[Tensor]:
        updates: list[Tensor | None] = [None] * self.curvature.parameters
        for block, part in zip(self.coordinates, released, strict=True):
            (block.transpose if scale else block.turn_back)(part[None], updates)
        return [update[0] for update in updates if update is not None]


@dataclass(frozen=True, kw_only=True)
class Whitening(FlooredGeometry):
    """Coordinates M g with MᵀM = F̃^{-1}; the way back is Mᵀ.

    At a floor above every eigenvalue the whitening is a scaling by λ^-1/2:

    >>> import torch
    >>> from raydp.geometry import Whitening
    >>> from raydp.geometry.kfac import estimate_curvature
    >>> model = torch.nn.Linear(3, 2)
    >>> curvature = estimate_curvature(model, torch.randn(20, 3), generator=torch.Generator().manual_seed(0))
    >>> whitening = Whitening(curvature=curvature, floor=1e4)
    >>> gradients = [torch.randn(5, *parameter.shape) for parameter in model.parameters()]
    >>> lengths = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).norm(dim=1)
    >>> bool(torch.allclose(whitening.lengths(gradients).float(), lengths / 100, rtol=1e-3))
    True
    """

    power = 0.5

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        return self._lift(released, scale=True)
