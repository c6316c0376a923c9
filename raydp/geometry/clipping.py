"""Clipping: each example's vector is scaled into a ball, alone, so that no example can move a sum by more than C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Squares are summed in float32 over so many entries and in float64 beyond. A float32 sum over millions of entries loses
# the small ones: norms came out up to 1e-3 too short and clipped vectors too long. (All float64 is 30 times slower.)
_BLOCK = 128
# Stay below C by the rounding of a block's norm (at most 128 · 2^-24 / 2), of the factor and of the product.
_INSIDE = 1 - 5e-6


def example_norms(part: Tensor) -> Tensor:
    """Euclidean norms (n,), float64, of the rows of ``part`` (n, size), to a relative 4e-6 whatever the size is.

    Squares of entries below 1e-19 underflow in float32. What a block may lose by that is added to it, so that a norm is
    never too short; it counts where norms are near 1e-18.
    """
    dtype = torch.promote_types(part.dtype, torch.float32)
    whole = part.shape[1] // _BLOCK * _BLOCK
    pieces = [part[:, whole:].unsqueeze(1)]
    if whole:
        pieces.append(part[:, :whole].unflatten(1, (-1, _BLOCK)))
    squares = [torch.linalg.vector_norm(piece, dim=2, dtype=dtype).double().square().sum(dim=1) for piece in pieces]
    blocks = -(-part.shape[1] // _BLOCK)
    return (torch.stack(squares).sum(dim=0) + blocks * _BLOCK * torch.finfo(dtype).tiny).sqrt()


def joint_norms(coordinates: Sequence[Tensor]) -> Tensor:
    """Norms (n,), float64, of vectors that tensors (n, size) hold together."""
    return torch.linalg.vector_norm(torch.stack([example_norms(part) for part in coordinates]), dim=0)


def scale_factors(norms: Tensor, clip_norm: float, dtype: torch.dtype, *, unit: float = 1.0) -> tuple[Tensor, Tensor]:
    """min(1, C/norm)/unit, rounded down so that no rounding leaves the ball, and whether the norm is finite, both (n,).

    Where the norm is not finite the factor is zero. ``unit`` is a power of two.
    """
    finite = torch.isfinite(norms)
    factors = (clip_norm / unit * _INSIDE / norms.clamp(min=torch.finfo(dtype).tiny)).clamp(max=1 / unit).to(dtype)
    return factors.where(finite, 0.0), finite


def clip_factors(coordinates: Sequence[Tensor], clip_norm: float, *, unit: float = 1.0) -> tuple[Tensor, Tensor]:
    """:func:`scale_factors` of coordinates (n, size), by norms that are taken on exactly these tensors."""
    dtype = torch.promote_types(coordinates[0].dtype, torch.float32)
    return scale_factors(joint_norms(coordinates), clip_norm, dtype, unit=unit)


def clip(coordinates: Sequence[Tensor], clip_norm: float) -> list[Tensor]:
    """Scale each example's coordinates to one joint L2 norm of at most ``clip_norm``.

    An example whose norm is not finite contributes zero: any fixed vector inside the ball keeps the sensitivity, and a
    NaN would otherwise reach the sum. How many there were is a private count, so it is not reported.

    Args:
        coordinates: tensors (n, size) that together hold one vector an example.
        clip_norm: C > 0.

    Returns:
        Tensors of the same shapes.

    >>> import torch
    >>> from raydp.geometry.clipping import clip
    >>> (clipped,) = clip([torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 0.0]])], 1.0)
    >>> clipped.norm(dim=1).round(decimals=4)
    tensor([1.0000, 0.5000, 0.0000])
    """
    # In float64: a factor below 1e-38 would have few digits left in float32.
    factors, finite = scale_factors(joint_norms(coordinates), clip_norm, torch.float64)
    clipped = [(part * factors.unsqueeze(1)).to(part.dtype) for part in coordinates]
    return clipped if bool(finite.all()) else [part.where(finite.unsqueeze(1), 0.0) for part in clipped]
