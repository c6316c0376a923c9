"""Coordinates of one block of the curvature at one floor: F̃^{-power} g, up to an orthogonal matrix.

Two forms of the same map; which one is cheaper depends on how many eigenvalues lie above the floor.

* :class:`EigenCoordinates`: s(Λ̃) ∘ (Q_Gᵀ W Q_A), in the eigenbasis. The orthogonal matrix that is left out changes
  neither norms nor the law of isotropic noise (METHODS 1.5). Costs 2rc(r + c) operations for an r × c matrix.
* :class:`FlooredCoordinates`: in the parameters' own basis. Only the m × k leading products can exceed the floor, all
  others equal it, so F̃^{-power} W = s₀ W + Q_m [(s(Λ̃) − s₀) ∘ (Q_mᵀ W Q_k)] Q_kᵀ with s₀ = floor^{-power}. The more is
  clamped, the less it costs; with everything clamped it is a multiplication by s₀.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raydp.geometry.curvature import BlockCurvature, LayerCurvature


class Coordinates(Protocol):
    """A linear map from the gradients of a block's parameters to coordinates.

    Attributes:
        sizes: number of coordinates of each tensor.
    """

    sizes: tuple[int, ...]

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Coordinates (n, size) from the gradients (n, *shape) of all parameters."""
        ...

    def transpose(self, released: Sequence[Tensor], into: list[Tensor | None]) -> None:
        """The transposed map: puts gradients (n, entries) of the block's parameters for coordinates (n, size)."""
        ...

    def turn_back(self, released: Sequence[Tensor], into: list[Tensor | None]) -> None:
        """The orthogonal part alone: coordinates that were scaled once are not scaled again."""
        ...


def coordinates_of(part: BlockCurvature, *, floor: float, power: float) -> Coordinates:
    """The cheaper form for this block: F̃^{-power}, eigenvalues clamped at ``floor``."""
    if not isinstance(part, LayerCurvature) or part.block.groups > 1 or floor <= 0:
        return EigenCoordinates(part, floor=floor, power=power)
    rows, columns = part.block.rows, part.block.columns
    m, k = _leading(part, floor)
    eigen = 2 * rows * columns * (rows + columns)
    if min(_by_rows(rows, columns, m, k), _by_columns(rows, columns, m, k)) > eigen:
        return EigenCoordinates(part, floor=floor, power=power)
    return FlooredCoordinates(part, floor=floor, power=power)


def _leading(part: LayerCurvature, floor: float) -> tuple[int, int]:
    """How many rows and columns of the eigenbasis hold a product above the floor."""
    outputs, inputs = part.output_values[0], part.input_values[0]
    return int((outputs * inputs.max() > floor).sum()), int((inputs * outputs.max() > floor).sum())


def _by_rows(rows: int, columns: int, m: int, k: int) -> int:
    return 4 * columns * m * (rows + k)


def _by_columns(rows: int, columns: int, m: int, k: int) -> int:
    return 4 * rows * k * (columns + m)


class EigenCoordinates:
    """s(Λ̃) ∘ (Q_Gᵀ W Q_A), one flat tensor."""

    def __init__(self, part: BlockCurvature, *, floor: float, power: float) -> None:
        self.part = part
        self.scale = part.eigenvalues.clamp(min=floor).pow(-power)
        self.sizes: tuple[int, ...] = (part.block.size,)

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [self.part.rotate(gradients) * self.scale]

    def transpose(self, released: Sequence[Tensor], into: list[Tensor | None]) -> None:
        self.part.unrotate(released[0] * self.scale, into)

    def turn_back(self, released: Sequence[Tensor], into: list[Tensor | None]) -> None:
        self.part.unrotate(released[0], into)


class FlooredCoordinates:
    """The symmetric F̃^{-power} of a layer; the weight's coordinates and the bias's, each flat."""

    def __init__(self, part: LayerCurvature, *, floor: float, power: float) -> None:
        self.block = block = part.block
        m, k = _leading(part, floor)
        self.base = floor**-power
        # eigh sorts upwards: the leading ones are the last.
        self.outputs = part.output_basis[0][:, block.rows - m :]
        self.inputs = part.input_basis[0][:, block.columns - k :]
        leading = part.output_values[0][block.rows - m :, None] * part.input_values[0][block.columns - k :]
        self.excess = leading.clamp(min=floor).pow(-power) - self.base
        self.rows_first = _by_rows(block.rows, block.columns, m, k) < _by_columns(block.rows, block.columns, m, k)
        weight = block.rows * block.inputs
        self.sizes: tuple[int, ...] = (weight,) if block.bias is None else (weight, block.rows)

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        block = self.block
        weight = gradients[block.weight]
        weight = weight.reshape(len(weight), block.rows, block.inputs)
        return self._apply(weight, None if block.bias is None else gradients[block.bias])

    def transpose(self, released: Sequence[Tensor], into: list[Tensor | None]) -> None:
        weight = released[0].reshape(len(released[0]), self.block.rows, self.block.inputs)
        self.turn_back(self._apply(weight, None if self.block.bias is None else released[1]), into)

    def turn_back(self, released: Sequence[Tensor], into: list[Tensor | None]) -> None:
        into[self.block.weight] = released[0]
        if self.block.bias is not None:
            into[self.block.bias] = released[1]

    def _apply(self, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """s₀ W + Q_m [excess ∘ (Q_mᵀ W Q_k)] Q_kᵀ, W = [weight, bias], the bias as its last column."""
        if self.excess.numel() == 0:  # everything is clamped
            return [(part * self.base).flatten(1) for part in (weight, bias) if part is not None]
        n, rows, columns = weight.shape
        inputs, last = self.inputs[:columns], self.inputs[columns:]
        if self.rows_first:
            turned = (self.outputs.T @ weight) @ inputs
            if bias is not None:
                turned += (bias @ self.outputs).unsqueeze(2) * last
            turned *= self.excess
            back = turned @ inputs.T
            outputs = self.outputs.expand(n, -1, -1)
            found = [torch.baddbmm(weight, outputs, back, beta=self.base).flatten(1)]
            if bias is not None:
                found.append(torch.addmm(bias, turned @ last[0], self.outputs.T, beta=self.base))
            return found
        turned = (weight.reshape(n * rows, columns) @ inputs).view(n, rows, -1)
        if bias is not None:
            turned += bias.unsqueeze(2) * last
        turned = self.outputs @ ((self.outputs.T @ turned) * self.excess)
        flat = weight.reshape(n * rows, columns)
        found = [torch.addmm(flat, turned.view(n * rows, -1), inputs.T, beta=self.base).view(n, -1)]
        if bias is not None:
            found.append(torch.add(turned @ last[0], bias, alpha=self.base))
        return found
