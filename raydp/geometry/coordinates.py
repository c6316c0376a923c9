"""Coordinates of one block of the curvature at one floor: s(Λ̃) ∘ (Q_Gᵀ W Q_A), in the eigenbasis, s(Λ̃) = Λ̃^{-power}.

They are F̃^{-power} g up to an orthogonal matrix, which changes neither norms nor the law of isotropic noise, and
leaving it out halves the rotations. Only a step's *sum* is brought to coordinates; the lengths of the single examples'
are found without them (:mod:`raydp.geometry.lengths`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from raydp.geometry.curvature import BlockCurvature
from raydp.geometry.rank_one import ExampleGradients


class Coordinates:
    """A linear map from the gradients of a block's parameters to coordinates, one flat tensor.

    Attributes:
        size: number of coordinates.
    """

    def __init__(self, part: BlockCurvature, *, floor: float, power: float) -> None:
        self.part = part
        self.scale = part.eigenvalues.clamp(min=floor).pow(-power)
        self.size: int = part.block.size

    def project(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        """Coordinates (n, size) from the gradients (n, *shape) of all parameters."""
        return self.part.rotate(gradients) * self.scale

    def transpose(self, released: Tensor, into: list[Tensor | None]) -> None:
        """The transposed map: puts gradients (n, entries) of the block's parameters for coordinates (n, size)."""
        self.part.unrotate(released * self.scale, into)

    def turn_back(self, released: Tensor, into: list[Tensor | None]) -> None:
        """The orthogonal part alone: coordinates that were scaled once are not scaled again."""
        self.part.unrotate(released, into)
