"""The two one-sided arms of DP-NGD's ablation: F̃^{-1} applied after the noise, or before the clipping.

Both release the natural gradient when nothing is clipped and there is no noise. They differ from
:class:`~raydp.geometry.whitening.Whitening` in where the curvature meets the noise (arXiv 2607.05866, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from raydp.geometry.rank_one import ExampleGradients, joint_lengths
from raydp.geometry.whitening import FlooredGeometry


@dataclass(frozen=True, kw_only=True)
class PreConditioning(FlooredGeometry):
    """Clip and noise the raw gradient, then multiply what was released by F̃^{-1}, noise and all.

    The noise of the update has covariance (σC/B)² F̃^{-2}.
    """

    power = 1.0

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.curvature.parameter_sizes

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [gradient.flatten(1) for gradient in gradients]

    @property
    def stretches(self) -> tuple[float, float]:  # type: ignore[override]
        return 1.0, 1.0

    def lengths(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        return joint_lengths(gradients)

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        rows = [part[None] for part in released]
        coordinates = [block.project(rows)[0] for block in self.coordinates]
        return self._lift(coordinates, scale=False)


@dataclass(frozen=True, kw_only=True)
class PostConditioning(FlooredGeometry):
    """Multiply each example's gradient by F̃^{-1}, clip and noise that, and step along it.

    Coordinates may be turned by an orthogonal matrix, which is undone on the way back: the same norms and, the noise
    being isotropic, the same law. The noise of the update has covariance (σC/B)² I.
    """

    power = 1.0

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        return self._lift(released, scale=False)
