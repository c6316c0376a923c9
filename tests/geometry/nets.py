"""Small networks, and the dense matrices that their curvature stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raydp.geometry.blocks import LayerBlock
from raydp.geometry.curvature import Curvature, LayerCurvature
from raydp.geometry.kfac import estimate_curvature


def small_net(
    *, groups: int = 2, bias: bool = True, norm: bool = True, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """A grouped convolution, a normalisation, a strided and dilated convolution, and a linear head: 4 classes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 3, padding=1, groups=groups, bias=bias), nn.Tanh()]
    if norm:
        layers.append(nn.GroupNorm(2, 4))
    layers += [nn.Conv2d(4, 3, 2, stride=2, dilation=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4, bias=bias)]
    model = nn.Sequential(*layers).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # affine parts away from 1 and 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def examples(n: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Images (n, 2, 5, 5) and labels of 4 classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 2, 5, 5, generator=generator, dtype=dtype)
    return images, torch.randint(4, (n,), generator=generator)


def curvature_of(model: nn.Module, *, n: int = 30, **changes: Any) -> Curvature:
    images, _ = examples(n, seed=1, dtype=next(model.parameters()).dtype)
    return estimate_curvature(model, images, generator=torch.Generator().manual_seed(0), **changes)


def dense(curvature: Curvature, sizes: list[int]) -> Tensor:
    """F as a (d, d) matrix over the flattened parameters, from explicit Kronecker products of the factors."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    matrix = torch.zeros(sum(sizes), sum(sizes), dtype=curvature.eigenvalues.dtype)
    for part in curvature.blocks:
        if not isinstance(part, LayerCurvature):
            at = starts[part.block.parameter]
            rows = torch.arange(at, at + part.block.size)
            matrix[rows, rows] = part.eigenvalues
            continue
        for group in range(part.block.groups):
            factor_g = _matrix(part.output_basis[group], part.output_values[group])
            factor_a = _matrix(part.input_basis[group], part.input_values[group])
            entries = _entries(part.block, group, starts)
            matrix[entries[:, None], entries[None, :]] = torch.kron(factor_a, factor_g)
    return matrix


def _matrix(basis: Tensor, values: Tensor) -> Tensor:
    return basis @ values.diag() @ basis.T


def _entries(block: LayerBlock, group: int, starts: list[int]) -> Tensor:
    """Flat positions of the entries of one group's matrix, its columns stacked."""
    found = torch.empty(block.rows, block.columns, dtype=torch.long)
    for row in range(block.rows):
        output = group * block.rows + row
        found[row, : block.inputs] = starts[block.weight] + output * block.inputs + torch.arange(block.inputs)
        if block.bias is not None:
            found[row, block.inputs] = starts[block.bias] + output
    return found.T.flatten()


def dense_clamped_inverse(matrix: Tensor, floor: float) -> Tensor:
    """F̃^{-1} from an eigendecomposition of the dense matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (1 / values.clamp(min=floor)).diag() @ vectors.T
