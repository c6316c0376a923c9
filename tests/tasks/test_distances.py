"""Fréchet and kernel distances between sets of vectors."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from raydp.errors import InvalidValue
from raydp.tasks.distances import frechet_distance, kernel_distance


def _vectors(n: int, d: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift


def test_frechet_equals_the_matrix_square_root() -> None:
    first, second = _vectors(60, 5, 0), 2 * _vectors(40, 5, 1, shift=1.0)
    a, b = first.double().numpy(), second.double().numpy()
    s1, s2 = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(s1 @ s2).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(s1 + s2 - 2 * root)
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-8)


def test_frechet_of_covariances_without_full_rank() -> None:
    """More numbers than vectors: still symmetric, zero between equals, and that of the span's Gaussians."""
    first, second = _vectors(6, 50, 0), _vectors(9, 50, 1)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first))
    basis = torch.linalg.qr(torch.randn(60, 50))[0].T
    assert frechet_distance(first @ basis, second @ basis) == pytest.approx(frechet_distance(first, second), rel=1e-5)


def test_frechet_of_shifted_sets_is_the_shift() -> None:
    vectors = _vectors(30, 4, 0)
    assert frechet_distance(vectors, vectors + 3) == pytest.approx(4 * 9, rel=1e-5)


def test_kernel_distance_equals_its_definition() -> None:
    first, second = _vectors(7, 3, 0), _vectors(5, 3, 1)

    def k(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x @ y / 3 + 1) ** 3)

    expected = np.mean([k(x, y) for i, x in enumerate(first) for j, y in enumerate(first) if i != j])
    expected += np.mean([k(x, y) for i, x in enumerate(second) for j, y in enumerate(second) if i != j])
    expected -= 2 * np.mean([k(x, y) for x in first for y in second])
    assert kernel_distance(first, second) == pytest.approx(expected, rel=1e-4)


def test_kernel_distance_is_unbiased() -> None:
    """Its mean over draws of one distribution is zero; between two, positive."""
    same = [kernel_distance(_vectors(20, 3, 2 * i), _vectors(20, 3, 2 * i + 1)) for i in range(200)]
    assert abs(np.mean(same)) < 4 * np.std(same) / 200**0.5
    assert kernel_distance(_vectors(50, 3, 0), _vectors(50, 3, 1, shift=1.0)) > 0


@pytest.mark.parametrize("distance", [frechet_distance, kernel_distance])
def test_too_few_vectors_and_other_widths_are_refused(distance: object) -> None:
    with pytest.raises(InvalidValue, match="two or more"):
        distance(_vectors(1, 3, 0), _vectors(5, 3, 0))  # type: ignore[operator]
    with pytest.raises(InvalidValue, match="width"):
        distance(_vectors(4, 3, 0), _vectors(5, 4, 0))  # type: ignore[operator]
