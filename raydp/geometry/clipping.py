"""Clipping: each example's vector is scaled into a ball, alone, so that no example can move a sum by more than C."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_factors(coordinates: Sequence[Tensor], clip_norm: float) -> tuple[Tensor, Tensor]:
    """min(1, C/‖v_i‖) and whether ‖v_i‖ is finite, both (n,); norms are taken on exactly the tensors that are
    summed.
    """
    dtype = torch.promote_types(coordinates[0].dtype, torch.float32)
    lengths = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in coordinates])
    norms = torch.linalg.vector_norm(lengths, dim=0)
    finite = torch.isfinite(norms)
    # The factor is rounded down by 1e-6 so that float32 rounding of norm and product stays inside the ball.
    factors = (clip_norm * (1 - 1e-6) / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    return factors.where(finite, 0.0), finite


def clip(coordinates: Sequence[Tensor], clip_norm: float) -> list[Tensor]:
    """Scale each example's coordinates to one joint L2 norm of at most ``clip_norm``.

    An example whose norm is not finite contributes zero: any fixed vector inside the ball keeps the sensitivity, and a
    NaN would otherwise reach the sum. How many there were is a private count, so it is not reported.

    Args:
        coordinates: tensors (n, size) that together hold one vector an example.
        clip_norm: C > 0.

    Returns:
        Tensors of the same shapes.
    """
    factors, finite = clip_factors(coordinates, clip_norm)
    clipped = [part * factors.unsqueeze(1) for part in coordinates]
    return clipped if bool(finite.all()) else [part.where(finite.unsqueeze(1), 0.0) for part in clipped]
