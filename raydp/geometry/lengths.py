"""How long each example's coordinates are in the geometry of a curvature, without building them.

A whitened step needs the coordinates of the clipped *sum* only, since the map is linear and the same for all examples.
Of a single example it needs the squared length Σ_jk w_jk t_jk², with t = Q_Gᵀ W Q_A and w = Λ̃^{-2·power}. Where the
floor λ has clamped an eigenvalue, w_jk = w₀ = λ^{-2·power}, so

    ‖X‖² = w₀ ‖W‖² − Σ_{unclamped jk} (w₀ − w_jk) t_jk²,

and only the unclamped entries of t are computed. The eigenvalues are the products λ_G λ_A, so the unclamped ones form a
staircase: the larger λ_G of a row, the more columns it has above the floor. The rows are cut into a few bands, and each
band is multiplied by as many columns of Q_A as its longest row needs. The cost is about the unclamped share of a full
rotation.

Rounding. A length is never returned too short: an allowance for the rounding of the products is added to it. In the
difference above the allowance is relative to w₀‖W‖², so where that is many times the expected ‖X‖² (a low floor) all
of t is computed instead.

Where W is an outer product g aᵀ (a layer without positions), t is (Q_Gᵀ g)(Q_Aᵀ a)ᵀ, so ‖X‖² = (g'²)ᵀ w (a'²): two
vectors are turned instead of a matrix, and t is never there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raydp.geometry.blocks import LayerBlock
from raydp.geometry.clipping import example_norms
from raydp.geometry.coordinates import Coordinates
from raydp.geometry.curvature import BlockCurvature, LayerCurvature
from raydp.geometry.rank_one import ExampleGradients, RankOne, dense

# The difference is taken where its allowance is at most this share of the expected squared length: longer by 0.5 %.
_LARGEST_ALLOWANCE = 0.01
_CUTS = 16  # bands begin at multiples of a 16th of the rows
# What one more band costs in calls, in multiply-adds for each example: about 50 microseconds for 32 examples.
_BAND_COST = 75_000


class Lengths(Protocol):
    """Squared lengths of the coordinates of one block."""

    def squares(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        """(n,), float64, not below the exact ones, from the gradients of all parameters."""
        ...


def lengths_of(part: BlockCurvature, coordinates: Coordinates, *, floor: float, power: float) -> Lengths:
    """The form for this block; ``coordinates`` are the block's at the same floor and power."""
    if isinstance(part, LayerCurvature) and part.block.groups == 1:
        return LayerLengths(part, floor=floor, power=power)
    return BuiltLengths(coordinates)


class BuiltLengths:
    """The coordinates are built: for diagonal blocks and grouped convolutions, which are small."""

    def __init__(self, coordinates: Coordinates) -> None:
        self.coordinates = coordinates

    def squares(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        return example_norms(self.coordinates.project(gradients)).square()


@dataclass(frozen=True, kw_only=True)
class _Band:
    """Consecutive rows of t, and the columns that are computed of them.

    Attributes:
        rows: which.
        inputs: Q_A of the columns, (inputs, k), without the bias's row.
        last: the bias's row of Q_A, (k,); of no entries without a bias.
        scale: (rows, k), by which t is multiplied before it is squared.
        rows_first: whether Q_Gᵀ is multiplied before Q_A, which is cheaper where k is large.
    """

    rows: slice
    inputs: Tensor
    last: Tensor
    scale: Tensor
    rows_first: bool


class LayerLengths:
    """For a layer of one group.

    Attributes:
        base: w₀, if the difference is taken; None if all of t is computed.
    """

    def __init__(self, part: LayerCurvature, *, floor: float, power: float) -> None:
        self.block = block = part.block
        values = part.eigenvalues.view(block.rows, block.columns)
        weights = values.clamp(min=floor).pow(-2 * power)
        # Of a squared length, relative to w₀‖W‖². A product of k terms rounds each entry of t by some √k·2^-24 of the
        # row's length (Higham & Mary 2019, SIAM J. Sci. Comput. 41(5), A2815; here over ten times what is measured),
        # and the norms of blocks of 128 entries by at most 2^-18.
        self.rounding = (64 + 4 * math.sqrt(block.columns)) * torch.finfo(values.dtype).eps
        self.base: float | None = None
        self.longest, self.weights, self.input_basis = float(weights.max()), weights, part.input_basis[0]
        if floor > 0:
            base = floor ** (-2 * power)
            expected = float((values * weights).sum())  # E‖X‖² on the data that define F
            if self.rounding * base * float(values.sum()) <= _LARGEST_ALLOWANCE * expected:
                self.base = base
        self.turns = part.output_basis[0].T.contiguous()
        if self.base is None:
            self.bands = [self._band(part, range(block.rows), block.columns, weights.sqrt())]
        else:
            # eigh sorts upwards, so a row's unclamped columns are its last, and lower rows have no fewer.
            unclamped = (values > floor).sum(dim=1).tolist()
            excess = (self.base - weights).clamp(min=0).sqrt()
            self.bands = [self._band(part, rows, columns, excess) for rows, columns in _bands(unclamped, block)]

        # The rows that are turned before all else; in one product, which is faster than one for each band.
        self.turned_from = min((band.rows.start for band in self.bands if band.rows_first), default=block.rows)

    def _band(self, part: LayerCurvature, rows: range, columns: int, scale: Tensor) -> _Band:
        chosen, first = slice(rows.start, rows.stop), self.block.columns - columns
        basis = part.input_basis[0][:, first:]
        return _Band(
            rows=chosen,
            inputs=basis[: self.block.inputs].contiguous(),
            last=basis[self.block.inputs :].flatten(),
            scale=scale[chosen, first:].contiguous(),
            rows_first=_rows_first(len(rows), columns, self.block) <= _columns_first(len(rows), columns, self.block),
        )

    def squares(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        block = self.block
        weight = gradients[block.weight]
        if isinstance(weight, RankOne):
            return self._rank_one_squares(weight)
        n = len(weight)
        weight = weight.reshape(n, block.rows, block.inputs)
        bias = None if block.bias is None else dense(gradients[block.bias]).reshape(n, block.rows)
        raw = example_norms(weight.flatten(1)).square()
        if bias is not None:
            raw = raw + example_norms(bias).square()
        rows = self.turns[self.turned_from :] @ weight
        computed = torch.zeros_like(raw)
        for band in self.bands:
            if band.rows_first:
                chosen = rows[:, band.rows.start - self.turned_from : band.rows.stop - self.turned_from]
                turned = (chosen.reshape(-1, block.inputs) @ band.inputs).view(n, *band.scale.shape)
            else:
                columns = weight.view(n * block.rows, block.inputs) @ band.inputs
                turned = self.turns[band.rows] @ columns.view(n, block.rows, -1)
            if bias is not None:
                turned += (bias @ self.turns[band.rows].T).unsqueeze(2) * band.last
            turned *= band.scale
            computed += example_norms(turned.flatten(1)).square()
        if self.base is not None:
            return (self.base * raw - computed).clamp(min=0) + self.rounding * self.base * raw
        return (computed.sqrt() + self.rounding * (self.longest * raw).sqrt()).square()

    def _rank_one_squares(self, weight: RankOne) -> Tensor:
        """Of outer products, whose rows are the bias's gradients: a sum of squares of the two turned factors."""
        columns = weight.columns
        if self.block.bias is not None:
            columns = torch.cat([columns, columns.new_ones(len(columns), 1)], dim=1)
        turned = RankOne(rows=weight.rows @ self.turns.T, columns=columns @ self.input_basis)
        raw = RankOne(rows=weight.rows, columns=columns).squares()
        return (turned.squares(self.weights).sqrt() + self.rounding * (self.longest * raw).sqrt()).square()


def _rows_first(rows: int, columns: int, block: LayerBlock) -> int:
    """Multiply-adds of an example's t in a band of so many rows and columns."""
    return rows * block.columns * (block.rows + columns)


def _columns_first(rows: int, columns: int, block: LayerBlock) -> int:
    return block.rows * columns * (block.columns + rows)


def _bands(unclamped: Sequence[int], block: LayerBlock) -> list[tuple[range, int]]:
    """The cheapest cut of the staircase: consecutive rows, and how many of the last columns are computed of them.

    Args:
        unclamped: entries above the floor in each row, which never fall from row to row. Rows without any are left
            out.
    """
    rows = block.rows
    first = next((row for row, count in enumerate(unclamped) if count), rows)
    if first == rows:
        return []
    cuts = sorted({first, *range(first, rows, max(1, rows // _CUTS)), rows})
    best: list[tuple[int, list[tuple[range, int]]]] = [(0, [])]  # the cheapest way to cover the rows up to each cut
    for index in range(1, len(cuts)):
        stop = cuts[index]
        needed = unclamped[stop - 1]
        ways = []
        for start, (cost, bands) in zip(cuts[:index], best, strict=True):
            size = stop - start
            cost += _BAND_COST + min(_rows_first(size, needed, block), _columns_first(size, needed, block))
            ways.append((cost, [*bands, (range(start, stop), needed)]))
        best.append(min(ways, key=lambda way: way[0]))
    return best[-1][1]
