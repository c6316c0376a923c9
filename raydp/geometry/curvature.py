"""Curvature in its eigenbasis: a Fisher matrix of Kronecker and diagonal blocks that is never formed.

A layer's block is F = A ⊗ G with A = Q_A Λ_A Q_Aᵀ and G = Q_G Λ_G Q_Gᵀ, so the eigenvalues of F, laid out like the
weight matrix, are the products λ_G λ_Aᵀ, and Q_Gᵀ W Q_A are the coordinates of W in its eigenbasis. A floor on
eigenvalues
is applied to the *products*, elementwise: max(λ_G λ_Aᵀ, λ) is no Kronecker product, and clamping the factors instead
gives another matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from raydp.geometry.blocks import Block, DiagonalBlock, LayerBlock
from raydp.geometry.rank_one import ExampleGradients, dense


@dataclass(frozen=True, kw_only=True)
class LayerCurvature:
    """A layer's block, eigendecomposed.

    Attributes:
        block: which parameters, and their layout.
        output_basis, output_values: Q_G (groups, rows, rows) and λ_G >= 0 (groups, rows).
        input_basis, input_values: Q_A (groups, columns, columns) and λ_A >= 0 (groups, columns); the number of
            positions |U| of a convolution is in here.
    """

    block: LayerBlock
    output_basis: Tensor
    output_values: Tensor
    input_basis: Tensor
    input_values: Tensor

    @cached_property
    def eigenvalues(self) -> Tensor:
        """λ_G λ_Aᵀ, flat (size,)."""
        return (self.output_values.unsqueeze(2) * self.input_values.unsqueeze(1)).flatten()

    def rotate(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        """Q_Gᵀ W Q_A of each example: (n, size), in the gradients' precision, from those (n, …) of all parameters."""
        block = self.block
        weight = dense(gradients[block.weight])
        n = len(weight)
        matrix = weight.reshape(n, block.groups, block.rows, block.inputs)
        if block.bias is not None:
            bias = dense(gradients[block.bias]).reshape(n, block.groups, block.rows, 1)
            matrix = torch.cat([matrix, bias], dim=3)
        output_basis, input_basis = (basis.to(matrix.dtype) for basis in (self.output_basis, self.input_basis))
        if block.groups == 1:  # one large product instead of n small ones
            turned = matrix.reshape(n, block.rows, block.columns) @ input_basis[0]
            return (output_basis[0].T @ turned).flatten(1)
        return (output_basis.mT @ (matrix @ input_basis)).flatten(1)

    def unrotate(self, coordinates: Tensor, into: list[Tensor | None]) -> None:
        """Inverse of :meth:`rotate`: puts (n, size) back as gradients (n, …), flat, of the block's parameters."""
        block = self.block
        n = len(coordinates)
        matrix = coordinates.reshape(n, block.groups, block.rows, block.columns)
        matrix = self.output_basis @ matrix @ self.input_basis.mT
        into[block.weight] = matrix[..., : block.inputs].reshape(n, -1)
        if block.bias is not None:
            into[block.bias] = matrix[..., block.inputs].reshape(n, -1)

    def tensors(self) -> list[Tensor]:
        return [self.output_basis, self.output_values, self.input_basis, self.input_values]


@dataclass(frozen=True, kw_only=True)
class DiagonalCurvature:
    """A diagonal block: E[g²] of one parameter, flat (size,)."""

    block: DiagonalBlock
    eigenvalues: Tensor

    def rotate(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        return dense(gradients[self.block.parameter]).flatten(1)

    def unrotate(self, coordinates: Tensor, into: list[Tensor | None]) -> None:
        into[self.block.parameter] = coordinates

    def tensors(self) -> list[Tensor]:
        return [self.eigenvalues]


BlockCurvature = LayerCurvature | DiagonalCurvature


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """The Fisher matrix F of a model at some weights, block by block; immutable.

    Attributes:
        blocks: together they hold every trainable parameter once.
    """

    blocks: tuple[BlockCurvature, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of coordinates of each block."""
        return tuple(part.block.size for part in self.blocks)

    @property
    def parameters(self) -> int:
        """Number of trainable parameter tensors."""
        return len(self.parameter_sizes)

    @cached_property
    def parameter_sizes(self) -> tuple[int, ...]:
        """Number of entries of each trainable parameter."""
        found: dict[int, int] = {}
        for part in self.blocks:
            block = part.block
            if isinstance(block, DiagonalBlock):
                found[block.parameter] = block.size
                continue
            found[block.weight] = block.groups * block.rows * block.inputs
            if block.bias is not None:
                found[block.bias] = block.groups * block.rows
        return tuple(found[index] for index in range(len(found)))

    @cached_property
    def eigenvalues(self) -> Tensor:
        """All eigenvalues of F, unsorted, (d,)."""
        return torch.cat([part.eigenvalues for part in self.blocks])

    def rotate(self, gradients: Sequence[ExampleGradients]) -> list[Tensor]:
        """Gradients (n, …), one a parameter, in the eigenbasis of F: (n, size), one a block. Keeps all norms."""
        return [part.rotate(gradients) for part in self.blocks]

    def unrotate(self, coordinates: Sequence[Tensor]) -> list[Tensor]:
        """Inverse of :meth:`rotate`: (n, size), one a block, to (n, entries), one a parameter."""
        found: list[Tensor | None] = [None] * self.parameters
        for part, coordinate in zip(self.blocks, coordinates, strict=True):
            part.unrotate(coordinate, found)
        return [entries for entries in found if entries is not None]

    def clamped_fraction(self, floor: float) -> float:
        """Share of the eigenvalues that lie below the floor."""
        return float((self.eigenvalues < floor).double().mean())

    def effective_dimension(self, floor: float) -> float:
        """d_eff = Σ λ/λ̃ = E‖F̃^{-1/2}g‖²: how long a whitened gradient is, squared, on the data that define F."""
        values = self.eigenvalues.double()
        return float((values / values.clamp(min=floor)).nan_to_num(nan=0.0).sum())

    def mean_inverse(self, floor: float, power: int = 1) -> float:
        """Mean of λ̃^-power, that is tr(F̃^-power)/d. Infinite where an eigenvalue is zero and nothing clamps it."""
        return float(self.eigenvalues.double().clamp(min=floor).pow(-power).mean())

    def state(self) -> list[list[Tensor]]:
        """The tensors of each block, for a checkpoint."""
        return [part.tensors() for part in self.blocks]

    @classmethod
    def from_state(cls, blocks: Sequence[Block], state: Sequence[Sequence[Tensor]]) -> Curvature:
        """Inverse of :meth:`state`, for the same blocks."""
        parts: list[BlockCurvature] = []
        for block, tensors in zip(blocks, state, strict=True):
            if isinstance(block, DiagonalBlock):
                parts.append(DiagonalCurvature(block=block, eigenvalues=tensors[0]))
            else:
                output_basis, output_values, input_basis, input_values = tensors
                parts.append(
                    LayerCurvature(
                        block=block,
                        output_basis=output_basis,
                        output_values=output_values,
                        input_basis=input_basis,
                        input_values=input_values,
                    )
                )
        return cls(blocks=tuple(parts))
