"""DP-NGD's geometry: clip and noise per-example gradients in the whitened eigenbasis of a public curvature.

The paper's Algorithm 1 (arXiv 2607.05866) whitens by F̃^{-1/2}, clips, adds isotropic noise, and maps back by F̃^{-1/2}.
Here the coordinates are M g with M = Λ̃^{-1/2} Qᵀ, and M ᵀ maps back: M differs from F̃^{-1/2} by the orthogonal Q, which
changes neither norms nor the law of isotropic noise, and half of the rotations disappear.
The released update is F̃^{-1} times the clipped average, its noise has covariance (σC/B)² F̃^{-1}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from torch import Tensor

from raydp.geometry.curvature import Curvature


@dataclass(frozen=True, kw_only=True)
class FlooredGeometry(ABC):
    """What the geometries of one curvature share.

    Attributes:
        curvature: F in its eigenbasis, from public data and released weights only.
        floor: λ_t >= 0, below which eigenvalues are clamped. At 0 a flat direction has an infinite inverse.
    """

    curvature: Curvature
    floor: float

    @property
    def support(self) -> None:
        return None

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]: ...

    @abstractmethod
    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Per-example gradients (n, *shape) of each parameter to coordinates (n, size)."""

    @abstractmethod
    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        """Released averages (size,) to the update of each parameter, flat."""

    def with_floor(self, floor: float) -> Self:
        """The same geometry at another floor; the eigendecomposition is shared."""
        return replace(self, floor=floor)

    @cached_property
    def clamped(self) -> list[Tensor]:
        """Λ̃ of each block, flat."""
        return self.curvature.clamped(self.floor)


@dataclass(frozen=True, kw_only=True)
class Whitening(FlooredGeometry):
    """Coordinates X = (Q_Gᵀ W Q_A) / sqrt(Λ̃), one flat tensor a block; the way back is Q_G (X / sqrt(Λ̃)) Q_Aᵀ."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.curvature.sizes

    @cached_property
    def _inverse_roots(self) -> list[Tensor]:
        return [values.rsqrt() for values in self.clamped]

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        rotated = self.curvature.rotate(gradients)
        return [part * scale for part, scale in zip(rotated, self._inverse_roots, strict=True)]

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        scaled = [(part * scale)[None] for part, scale in zip(released, self._inverse_roots, strict=True)]
        return [update[0] for update in self.curvature.unrotate(scaled)]
