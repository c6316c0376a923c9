"""Factors from private examples: per-example moments whose mean is K-FAC's, released under one clip norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raydp.errors import Diverged
from raydp.geometry import private_factors
from raydp.geometry.blocks import blocks_of
from raydp.geometry.private_factors import (
    ClippedMoments,
    FactorEngine,
    curvature_of_moments,
    moment_radii,
    moment_sizes,
)
from tests.geometry.nets import curvature_of, dense, examples, small_net


@pytest.mark.parametrize("form", ["expand", "reduce"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_unclipped_means_give_the_curvature_of_the_public_estimate(form: str, groups: int, bias: bool) -> None:
    """The same examples and labels: the same Fisher matrix, in the same per-example units, to 1e-8 in float64."""
    model = small_net(groups=groups, bias=bias)
    images, _ = examples(30, seed=1)
    _, labels = examples(30, seed=2)
    blocks = blocks_of(model)
    geometry = ClippedMoments(sizes=moment_sizes(blocks), radii=moment_radii(blocks, input_clip=1e3, output_clip=1e3))
    projected = geometry.project(FactorEngine(model, form=form)(images, labels))
    found = curvature_of_moments(blocks, geometry.lift([part.mean(dim=0) for part in projected]))
    wanted = curvature_of(model, fisher_labels="given", labels=labels, form=form)
    sizes = [parameter.numel() for parameter in model.parameters()]
    left, right = dense(found, sizes), dense(wanted, sizes)
    assert float((left - right).abs().max()) < 1e-8 * float(right.abs().max())


def test_an_examples_moments_do_not_depend_on_the_others_in_its_batch() -> None:
    model = small_net()
    images, labels = examples(5)
    engine = FactorEngine(model)
    together = engine(images, labels)
    for index in range(5):
        alone = engine(images[index : index + 1], labels[index : index + 1])
        for left, right in zip(together, alone, strict=True):
            torch.testing.assert_close(left[index], right[0])


def test_an_empty_batch_has_the_sizes_of_any_other() -> None:
    engine = FactorEngine(small_net())
    found = engine(*examples(0))
    assert [tuple(part.shape) for part in found] == [(0, size) for size in moment_sizes(engine.blocks)]


def test_layers_without_a_formula_and_layers_not_used_are_covered() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.used = nn.Linear(2, 3)
            self.idle = nn.Linear(2, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.used(images.flatten(1) * self.scale)

    model = Scaled()
    engine = FactorEngine(model)
    found = engine(torch.randn(4, 1, 1, 2), torch.tensor([0, 1, 2, 0]))
    assert tuple(part.shape[1] for part in found) == moment_sizes(engine.blocks)
    by_name = dict(zip(["used.a", "used.g", "idle.a", "idle.g", "scale"], found, strict=True))
    assert not bool(by_name["idle.a"].any()) and not bool(by_name["idle.g"].any())
    assert bool(by_name["used.a"].any()) and bool((by_name["scale"] >= 0).all()) and bool(by_name["scale"].any())


def test_triangles_keep_norms_and_fold_back() -> None:
    matrices = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    matrices = matrices + matrices.mT
    triangles = private_factors._triangle(matrices)
    assert triangles.shape == (3, 2 * 10)
    torch.testing.assert_close(triangles.norm(dim=1), matrices.flatten(1).norm(dim=1))
    torch.testing.assert_close(private_factors._square(triangles[1], 2, 4), matrices[1])


def test_folded_noise_has_the_law_of_a_symmetrised_matrix() -> None:
    torch.manual_seed(0)
    folded = torch.stack([private_factors._square(torch.randn(10), 1, 4)[0] for _ in range(4000)])
    assert torch.equal(folded, folded.mT)
    variances = folded.var(dim=0)
    off = ~torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(variances.diagonal(), torch.ones(4), atol=0.12, rtol=0)
    torch.testing.assert_close(variances[off], torch.full((12,), 0.5), atol=0.06, rtol=0)


def test_radii_are_public_and_parts_share_the_norm_equally() -> None:
    model = small_net()
    blocks = blocks_of(model)
    radii = moment_radii(blocks, input_clip=2.0, output_clip=0.5)
    assert len(radii) == len(moment_sizes(blocks)) == 8  # two for each of three layers, two affine parameters
    first = blocks[0]
    assert radii[0] == 4.0 * first.groups * first.columns and radii[1] == 0.25  # type: ignore[union-attr]
    geometry = ClippedMoments(sizes=(2, 2), radii=(1.0, 10.0))
    small, large = geometry.project([torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]])])
    torch.testing.assert_close(small, torch.tensor([[0.6, 0.8]]) / math.sqrt(2), rtol=1e-5, atol=0)
    torch.testing.assert_close(large, torch.tensor([[0.3, 0.4]]) / math.sqrt(2), rtol=1e-5, atol=0)
    assert geometry.support is None


def test_negative_eigenvalues_are_cut_and_infinite_moments_end_the_run() -> None:
    model = small_net()
    blocks = blocks_of(model)
    torch.manual_seed(0)
    noise = [torch.randn(size, dtype=torch.float64) for size in moment_sizes(blocks)]
    curvature = curvature_of_moments(blocks, noise)
    assert float(curvature.eigenvalues.min()) == 0.0 < float(curvature.eigenvalues.max())
    with pytest.raises(Diverged, match="not finite"):
        curvature_of_moments(blocks, [part * float("inf") for part in noise])
