"""The two one-sided arms of DP-NGD's ablation: F̃^{-1} applied after the noise, or before the clipping.

Both release the natural gradient when nothing is clipped and there is no noise. They differ from
:class:`~raydp.geometry.whitening.Whitening` in where the curvature meets the noise (arXiv 2607.05866, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from raydp.geometry.blocks import DiagonalBlock
from raydp.geometry.whitening import FlooredGeometry


@dataclass(frozen=True, kw_only=True)
class PreConditioning(FlooredGeometry):
    """Clip and noise the raw gradient, then multiply what was released by F̃^{-1}, noise and all.

    The noise of the update has covariance (σC/B)² F̃^{-2}.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        found: dict[int, int] = {}
        for part in self.curvature.blocks:
            block = part.block
            if isinstance(block, DiagonalBlock):
                found[block.parameter] = block.size
                continue
            found[block.weight] = block.groups * block.rows * block.inputs
            if block.bias is not None:
                found[block.bias] = block.groups * block.rows
        return tuple(found[index] for index in range(len(found)))

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [gradient.flatten(1) for gradient in gradients]

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        rotated = self.curvature.rotate([part[None] for part in released])
        scaled = [part / values for part, values in zip(rotated, self.clamped, strict=True)]
        return [update[0] for update in self.curvature.unrotate(scaled)]


@dataclass(frozen=True, kw_only=True)
class PostConditioning(FlooredGeometry):
    """Multiply each example's gradient by F̃^{-1}, clip and noise that, and step along it.

    Coordinates are taken in the eigenbasis, Λ̃^{-1} Qᵀ g, and turned back by Q: the same norms and, the noise being
    isotropic, the same law as in the parameters' own basis, for half of the rotations. The noise of the update has
    covariance (σC/B)² I.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.curvature.sizes

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        rotated = self.curvature.rotate(gradients)
        return [part / values for part, values in zip(rotated, self.clamped, strict=True)]

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        return [update[0] for update in self.curvature.unrotate([part[None] for part in released])]
