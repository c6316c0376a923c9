"""Distances between two sets of vectors, such as encoded images."""

from __future__ import annotations

import torch
from torch import Tensor

from raydp.errors import InvalidValue


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Fréchet distance between Gaussians fitted to two sets: |m₁ − m₂|² + tr(S₁ + S₂ − 2(S₁S₂)^½).

    The statistic of the FID (Heusel et al. 2017), on whatever vectors are given; it is an FID only where they come from
    the Inception network. It is biased by the number of vectors: compare it at equal numbers only.

    The trace of (S₁S₂)^½ is the sum of the singular values of A Bᵀ/√((n−1)(m−1)), A and B the centred sets as rows,
    since S₁S₂ and (A Bᵀ)(A Bᵀ)ᵀ have the same non-zero eigenvalues. So covariances of any rank are exact, and no matrix
    of the vectors' width is built.

    Args:
        first: (n, d), n >= 2. second: (m, d), m >= 2.

    Raises:
        InvalidValue: too few vectors, or of different widths.

    >>> import torch
    >>> from raydp.tasks.distances import frechet_distance
    >>> points = torch.randn(100, 5)
    >>> round(frechet_distance(points, points + 2.0), 6)  # the means differ by 2 in each of 5 directions
    20.0
    """
    first, second = _checked(first, second)
    difference = first.mean(dim=0) - second.mean(dim=0)
    centred = [part - part.mean(dim=0) for part in (first, second)]
    n, m = len(first) - 1, len(second) - 1
    traces = centred[0].square().sum() / n + centred[1].square().sum() / m
    product = torch.linalg.svdvals(centred[0] @ centred[1].T).sum() / (n * m) ** 0.5
    return float(difference.square().sum() + traces - 2 * product)


def kernel_distance(first: Tensor, second: Tensor) -> float:
    """Unbiased estimate of the squared maximum mean discrepancy with the kernel (xᵀy/d + 1)³; it may be negative.

    The statistic of the KID (Bińkowski et al. 2018, arXiv 1801.01401), on whatever vectors are given.

    Args, raises: as for :func:`frechet_distance`.

    >>> import torch
    >>> from raydp.tasks.distances import kernel_distance
    >>> generator = torch.Generator().manual_seed(0)
    >>> near, far = torch.randn(200, 5, generator=generator), torch.randn(200, 5, generator=generator) + 2.0
    >>> kernel_distance(near[:100], near[100:]) < 0.1 < kernel_distance(near, far)
    True
    """
    first, second = _checked(first, second)

    def kernel(left: Tensor, right: Tensor) -> Tensor:
        return (left @ right.T / left.shape[1] + 1) ** 3

    def within(part: Tensor) -> Tensor:
        values = kernel(part, part)
        return (values.sum() - values.diagonal().sum()) / (len(part) * (len(part) - 1))

    return float(within(first) + within(second) - 2 * kernel(first, second).mean())


def _checked(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    for name, part in (("first", first), ("second", second)):
        if part.dim() != 2 or len(part) < 2:
            raise InvalidValue(name, tuple(part.shape), "must be two or more vectors (n, d)", "Give more examples.")
    if first.shape[1] != second.shape[1]:
        raise InvalidValue(
            "second", second.shape[1], f"must have the width {first.shape[1]} of first", "Use one encoder for both."
        )
    return first.double(), second.double()
