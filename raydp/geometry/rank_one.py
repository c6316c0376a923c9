"""Per-example gradients that are outer products, and are never multiplied out.

The gradient of one example with respect to the weight of a Linear layer without positions is g aᵀ: output gradient
times input. Its length in any geometry that weighs entries in some eigenbases is closed, ‖X‖² = (g'²)ᵀ w (a'²), and the
clipped *sum* over a batch is one matrix product (Goodfellow, arXiv 1510.01799; Lee & Kifer, PoPETs 2021, "ghost" norms;
Bu et al., ICML 2023, book-keeping). So neither time nor memory of a step contains examples times entries.

What these leave open is the sum, which floating point rounds by an amount that depends on the *other* examples. Here it
is exact: each example's factors are cut to integers, alone, and a float64 product of integers below 2^53 is an integer
product, in whatever order it is taken (:func:`add_clipped_products`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raydp.geometry.clipping import example_norms

#: An example's columns are integers of norm at most 2^22, its rows of at most 2^22 as well, so their product's is at
#: most 2^44, and the sums of 512 products stay below 2^53.
FACTOR_BITS = 22
PRODUCT_BITS = 2 * FACTOR_BITS
_EXAMPLES_AT_ONCE = 2 ** (53 - PRODUCT_BITS)
_ENTRIES = 2**16  # so many at a time stay in the processor's caches


@dataclass(frozen=True, kw_only=True)
class RankOne:
    """Gradients of n examples with respect to one matrix: example i's is ``rows[i] ⊗ columns[i]``.

    Attributes:
        rows: (n, rows), the gradients with respect to the layer's outputs.
        columns: (n, columns), the layer's inputs.

    >>> import torch
    >>> from raydp.geometry.rank_one import RankOne
    >>> gradient = RankOne(rows=torch.tensor([[3.0, 4.0]]), columns=torch.tensor([[1.0, 0.0, 2.0]]))
    >>> gradient.dense()
    tensor([[[3., 0., 6.],
             [4., 0., 8.]]])
    >>> gradient.squares()
    tensor([125.], dtype=torch.float64)
    """

    rows: Tensor
    columns: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def dense(self) -> Tensor:
        """(n, rows, columns)."""
        return self.rows.unsqueeze(2) * self.columns.unsqueeze(1)

    def rounded(self) -> RankOne:
        """The same with each example's columns rounded to 2^-22 of the power of two above their norm.

        It is what :func:`add_clipped_products` adds up, so lengths are taken of it. An entry moves by at most 2^-22 of
        the norm, and is as exact in float32 as before.
        """
        unit = self._column_units().to(self.columns.dtype).unsqueeze(1)
        return RankOne(rows=self.rows, columns=(self.columns / unit).round() * unit)

    def squares(self, weights: Tensor | None = None) -> Tensor:
        """Σ_jk w_jk rows_j² columns_k², float64 (n,), never too short.

        Args:
            weights: w >= 0, (rows, columns), of the factors' precision; None for ones everywhere.
        """
        if weights is None:
            return self.rows.double().square().sum(dim=1) * self.columns.double().square().sum(dim=1)
        (rows, row_scale), (columns, column_scale) = _normalized(self.rows), _normalized(self.columns)
        found = ((rows.square() @ weights) * columns.square()).double().sum(dim=1)
        # Sums of so many terms that are not negative, in any order (Higham, Accuracy and Stability, 2nd ed., §3.1).
        terms = sum(weights.shape) + 8
        return found * (1 + terms * torch.finfo(weights.dtype).eps) * (row_scale * column_scale).square()

    def _column_units(self) -> Tensor:
        """Powers of two, float64 (n,), 2^-22 of the first one above each example's column norm."""
        return _power_above(self.columns) * 2.0**-FACTOR_BITS


#: What an engine hands over for one parameter: all entries (n, *shape), or the factors of them.
ExampleGradients = Tensor | RankOne


def dense(gradient: ExampleGradients) -> Tensor:
    """All entries, (n, *shape)."""
    return gradient.dense() if isinstance(gradient, RankOne) else gradient


def joint_lengths(gradients: Sequence[ExampleGradients]) -> Tensor:
    """Norms (n,), float64, of the gradients of all parameters together."""
    squares = [g.squares() if isinstance(g, RankOne) else example_norms(g.flatten(1)).square() for g in gradients]
    return torch.stack(squares).sum(dim=0).sqrt()


def product_unit(largest: float) -> float:
    """A power of two of which vectors of norm at most ``largest`` are at most 2^44 long.

    >>> from raydp.geometry.rank_one import product_unit
    >>> product_unit(1.0) * 2**44
    1.0
    """
    mantissa, exponent = math.frexp(largest)
    return math.ldexp(1.0, exponent - (mantissa == 0.5) - PRODUCT_BITS)


def add_clipped_products(total: Tensor, gradient: RankOne, factors: Tensor, unit: float) -> None:
    """Add the exact sum of the examples' scaled gradients on the grid of multiples of ``unit``.

    An example's rows are scaled and cut off towards zero to a grid of its own, such that the product with its columns,
    which are on theirs, lies on this one. That can only shorten the product, and moves it by at most
    √rows · 2^22 units. All numbers of the matrix product are integers below 2^53, so it is exact.

    Args:
        total: int64 (rows·columns,), in units of ``unit``; changed.
        gradient: :meth:`~RankOne.rounded`.
        factors: (n,), float64; example i's gradient times factors[i] is at most 2^44 units long.
        unit: a power of two.
    """
    steps = gradient._column_units()
    columns = gradient.columns.double() / steps.unsqueeze(1)
    rows = (gradient.rows.double() * (factors * (steps / unit)).unsqueeze(1)).trunc_()
    for left, right in zip(rows.split(_EXAMPLES_AT_ONCE), columns.split(_EXAMPLES_AT_ONCE), strict=True):
        product = (left.T @ right).flatten()
        for into, part in zip(total.split(_ENTRIES), product.split(_ENTRIES), strict=True):
            into += part.to(torch.int64)


def _normalized(part: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of norm in [1/2, 1), and the powers of two, float64 (n,), by which they were divided: squares neither
    underflow nor overflow."""
    scale = _power_above(part)
    return (part.double() / scale.unsqueeze(1)).to(part.dtype), scale


def _power_above(part: Tensor) -> Tensor:
    """The first power of two above each row's norm, float64 (n,); 1 for a row of zeros."""
    norms = part.double().square().sum(dim=1).sqrt()
    return torch.ldexp(torch.ones_like(norms), torch.frexp(norms).exponent)
