"""Lengths without coordinates: equal to those of the coordinates, and never too short for the clipping."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raydp.geometry import PostConditioning, PreConditioning, Whitening
from raydp.geometry.base import MeasuredGeometry
from raydp.geometry.blocks import LayerBlock
from raydp.geometry.coordinates import Coordinates
from raydp.geometry.curvature import Curvature, LayerCurvature
from raydp.geometry.lengths import BuiltLengths, LayerLengths, _bands, _columns_first, _rows_first, lengths_of
from raydp.geometry.whitening import FlooredGeometry
from raydp.privacy.mechanism import grid_spacing
from raydp.training.gradients import PerExampleGradients
from raydp.training.step import ClippedSum, _GradientGrid, clip
from tests.geometry.nets import curvature_of, examples, small_net


def layer(
    rows: int, inputs: int, *, bias: bool, decay: float = 4.0, dtype: torch.dtype = torch.float64
) -> LayerCurvature:
    """A layer whose eigenvalues fall over 2 * ``decay`` powers of ten."""
    generator = torch.Generator().manual_seed(rows + inputs)
    block = LayerBlock(name="x", weight=0, bias=1 if bias else None, groups=1, rows=rows, inputs=inputs)

    def basis(size: int) -> Tensor:
        return torch.linalg.qr(torch.randn(1, size, size, generator=generator, dtype=torch.float64)).Q.to(dtype)

    def values(size: int) -> Tensor:  # ascending, as eigh gives them
        return torch.logspace(-decay, 0, size, dtype=torch.float64)[None].to(dtype)

    return LayerCurvature(
        block=block,
        output_basis=basis(rows),
        output_values=values(rows),
        input_basis=basis(block.columns),
        input_values=values(block.columns),
    )


def exact(part: LayerCurvature, gradients: list[Tensor], *, floor: float, power: float) -> Tensor:
    """Squared lengths in float64, of the map that the float32 eigenvectors define."""
    doubled = LayerCurvature(
        block=part.block,
        output_basis=part.output_basis.double(),
        output_values=part.output_values.double(),
        input_basis=part.input_basis.double(),
        input_values=part.input_values.double(),
    )
    coordinates = Coordinates(doubled, floor=floor, power=power).project([g.double() for g in gradients])
    return coordinates.square().sum(dim=1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("arm", [Whitening, PreConditioning, PostConditioning])
def test_lengths_are_those_of_the_coordinates(
    arm: type[FlooredGeometry], share: float, bias: bool, groups: int
) -> None:
    model = small_net(groups=groups, bias=bias)
    curvature = curvature_of(model)
    geometry = arm(curvature=curvature, floor=float(curvature.eigenvalues.quantile(share)))
    assert isinstance(geometry, MeasuredGeometry)
    gradients = PerExampleGradients(model)(*examples(6))
    wanted = torch.cat(geometry.project(gradients), dim=1).norm(dim=1)
    # Some eigenvalues are zero up to rounding; a floor among them leaves the allowance something to cover.
    torch.testing.assert_close(geometry.lengths(gradients), wanted, rtol=1e-9 if share >= 0.5 else 1e-5, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 60),
    bias=st.booleans(),
    power=st.sampled_from([0.5, 1.0]),
    share=st.floats(0, 1),
    along=st.sampled_from(["anything", "the largest", "the smallest"]),
    double=st.booleans(),
)
def test_lengths_of_a_layer_are_right_and_not_too_short_however_much_is_clamped(
    rows: int, inputs: int, bias: bool, power: float, share: float, along: str, double: bool
) -> None:
    """Also for gradients along the stiffest directions, where the difference cancels most."""
    dtype = torch.float64 if double else torch.float32
    part = layer(rows, inputs, bias=bias, decay=2.0, dtype=dtype)
    floor = float(part.eigenvalues.quantile(share))
    t = torch.randn(3, rows, part.block.columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if along != "anything":
        at = -1 if along == "the largest" else 0
        t, whole = torch.zeros_like(t), t
        t[:, at, at] = whole[:, at, at]
    matrix = (part.output_basis[0].double() @ t @ part.input_basis[0].double().T).to(dtype)
    gradients = [matrix[:, :, :inputs], matrix[:, :, inputs:].flatten(1)][: 1 + bias]
    found = LayerLengths(part, floor=floor, power=power).squares(gradients)
    ratio = found / exact(part, gradients, floor=floor, power=power)
    assert bool((ratio >= 1 - 1e-9 if double else ratio >= 1 - 1e-5).all())
    if along == "anything":
        assert bool((ratio <= 1 + (1e-6 if double else 0.02)).all())


def test_the_allowance_covers_the_rounding_on_large_layers() -> None:
    """576 inputs: where the difference is taken, what it returns is not below the exact value at all."""
    part = layer(64, 576, bias=False, decay=1.5, dtype=torch.float32)
    eigenvectors = torch.einsum("ij,kl->jlik", part.output_basis[0][:, -4:], part.input_basis[0][:, -4:]).flatten(0, 1)
    gradients = [torch.cat([eigenvectors, torch.randn(8, 64, 576)])]
    for share in (0.3, 0.6, 0.9, 0.99):
        floor = float(part.eigenvalues.quantile(share))
        lengths = LayerLengths(part, floor=floor, power=0.5)
        assert lengths.base is not None
        ratio = lengths.squares(gradients) / exact(part, gradients, floor=floor, power=0.5)
        assert float(ratio.min()) >= 1
        assert float(ratio[16:].max()) < 1.02


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_stiff_example_does_not_leave_the_ball(share: float, clip_norm: float) -> None:
    """What one example adds to the sum is at most C long, and not much shorter."""
    part = layer(32, 144, bias=True, dtype=torch.float32)
    geometry = Whitening(curvature=Curvature(blocks=(part,)), floor=float(part.eigenvalues.quantile(share)))
    for row, column in ((-1, -1), (-1, 0), (0, -1), (-2, -3)):
        matrix = 100 * torch.outer(part.output_basis[0][:, row], part.input_basis[0][:, column])
        gradients = [matrix[None, :, :144], matrix[None, :, 144]]
        alone = ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm))
        alone.add(gradients)
        length = float(torch.cat(alone.coordinates()).norm())
        assert 0.9 * clip_norm < length <= clip_norm


def test_sums_of_neighbours_on_a_coarse_grid_are_within_c() -> None:
    """Both sums are rounded to the noise's grid, which moves them apart; what is given up of C covers that."""
    part = layer(32, 144, bias=True, decay=1.0, dtype=torch.float32)
    geometry = Whitening(curvature=Curvature(blocks=(part,)), floor=float(part.eigenvalues.quantile(0.5)))
    generator = torch.Generator().manual_seed(0)
    spacing = 2.0**-11  # in the units of C = 1: sqrt(4,640) of them are 0.033
    for _ in range(20):
        rows = 100 * torch.randn(3, 32, 145, generator=generator)
        found = []
        for count in (2, 3):
            total = ClippedSum(geometry=geometry, clip_norm=1.0, spacing=spacing)
            total.add([rows[:count, :, :144], rows[:count, :, 144]])
            assert total._grid is not None
            found.append(torch.cat(total.coordinates()))
        assert 0.9 < float((found[1] - found[0]).norm()) <= 1.0


def test_the_sum_is_the_sum_of_the_clipped_coordinates() -> None:
    model = small_net()
    curvature = curvature_of(model)
    geometry = Whitening(curvature=curvature, floor=float(curvature.eigenvalues.quantile(0.7)))
    gradients = PerExampleGradients(model)(*examples(12))
    clip_norm = float(geometry.lengths(gradients).median())  # half of them are clipped
    total = ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm))
    total.add([part[:5] for part in gradients])
    total.add([part[5:] for part in gradients])
    for left, right in zip(total.coordinates(), clip(geometry.project(gradients), clip_norm), strict=True):
        # Clipped to a little less than C, and cut off to the gradients' grid.
        torch.testing.assert_close(left, right.sum(dim=0), rtol=1e-3, atol=1e-3 * clip_norm)
    together = ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm))
    together.add(gradients)
    assert all(torch.equal(a, b) for a, b in zip(total.units(), together.units(), strict=True))


def test_neighbouring_sums_differ_by_at_most_c_after_all_rounding() -> None:
    """As released, on the noise's grid: what one example changes in a sum of many is at most C long, exactly."""
    part = layer(32, 144, bias=True, dtype=torch.float32)
    geometry = Whitening(curvature=Curvature(blocks=(part,)), floor=float(part.eigenvalues.quantile(0.5)))
    clip_norm = 1.0
    assert _GradientGrid.of(geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm)) is not None
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        gradients = [100 * torch.randn(40, *shape, generator=generator) for shape in ((32, 144), (32,))]
        with_it, without = (
            ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm)) for _ in range(2)
        )
        with_it.add(gradients)
        without.add([part[1:] for part in gradients])
        moved = [a - b for a, b in zip(with_it.units(), without.units(), strict=True)]
        length = with_it.spacing * float(torch.cat(moved).double().norm())
        assert 0.99 * clip_norm < length <= clip_norm


def test_stretches_that_differ_too_much_have_every_example_projected() -> None:
    part = layer(8, 20, bias=True, dtype=torch.float32)
    for floor, sums_gradients in ((float(part.eigenvalues.max()), True), (0.0, False), (1e-30, False)):
        zero = replace(part, output_values=part.output_values * (torch.arange(8) > 0))
        geometry = Whitening(curvature=Curvature(blocks=(zero,)), floor=floor)
        assert (_GradientGrid.of(geometry, clip_norm=1.0, spacing=grid_spacing(1.0)) is not None) == sums_gradients


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_adds_nothing(bad: float) -> None:
    model = small_net(dtype=torch.float32)
    curvature = curvature_of(model)
    geometry = Whitening(curvature=curvature, floor=float(curvature.eigenvalues.quantile(0.7)))
    gradients = PerExampleGradients(model)(*examples(3, dtype=torch.float32))
    gradients[0][1].view(-1)[0] = bad
    sums = []
    for kept in ([0, 1, 2], [0, 2]):
        sums.append(ClippedSum(geometry=geometry, clip_norm=0.1, spacing=grid_spacing(0.1)))
        sums[-1].add([part[kept] for part in gradients])
    for left, right in zip(sums[0].coordinates(), sums[1].coordinates(), strict=True):
        torch.testing.assert_close(left, right)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    inputs=st.integers(300, 600),
)
def test_bands_cover_the_staircase_and_cost_no_more_than_one_band(counts: list[int], inputs: int) -> None:
    unclamped = sorted(counts)
    rows = len(unclamped)
    block = LayerBlock(name="x", weight=0, bias=None, groups=1, rows=rows, inputs=inputs)
    bands = _bands(unclamped, block)
    covered = [row for band, _ in bands for row in band]
    assert covered == [row for row in range(rows) if unclamped[row]]
    assert all(unclamped[row] <= columns for band, columns in bands for row in band)

    def cost(cut: list[tuple[range, int]]) -> int:
        return sum(min(_rows_first(len(r), k, block), _columns_first(len(r), k, block)) for r, k in cut)

    if covered:
        assert cost(bands) <= cost([(range(covered[0], rows), unclamped[-1])])


def test_a_low_floor_is_measured_without_a_difference_and_small_blocks_by_their_coordinates() -> None:
    part = layer(8, 20, bias=True, dtype=torch.float32)
    assert LayerLengths(part, floor=0.5, power=0.5).base == 2.0
    for floor in (0.0, float(part.eigenvalues.min())):
        assert LayerLengths(part, floor=floor, power=0.5).base is None
    grouped = curvature_of(small_net(groups=2)).blocks[0]
    coordinates = Coordinates(grouped, floor=1.0, power=0.5)
    assert isinstance(lengths_of(grouped, coordinates, floor=1.0, power=0.5), BuiltLengths)
