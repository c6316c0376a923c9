"""Outer products are measured and summed as if they were multiplied out, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raydp.geometry import Diagonal, Identity, Support, Whitening
from raydp.geometry.base import Geometry, frozen_parameters
from raydp.geometry.blocks import DiagonalBlock, blocks_of
from raydp.geometry.curvature import Curvature, DiagonalCurvature, LayerCurvature
from raydp.geometry.preconditioning import PostConditioning, PreConditioning
from raydp.geometry.rank_one import (
    PRODUCT_BITS,
    RankOne,
    add_clipped_products,
    dense,
    joint_lengths,
    product_unit,
)
from raydp.privacy.mechanism import grid_spacing
from raydp.training.gradients import PerExampleGradients
from raydp.training.step import ClippedSum, clip


def factors(count: int, rows: int, columns: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> RankOne:
    generator = torch.Generator().manual_seed(seed)
    return RankOne(
        rows=torch.randn(count, rows, generator=generator, dtype=dtype),
        columns=torch.randn(count, columns, generator=generator, dtype=dtype),
    )


def clipped_products(gradient: RankOne, scales: torch.Tensor, unit: float) -> torch.Tensor:
    total = torch.zeros(gradient.rows.shape[1] * gradient.columns.shape[1], dtype=torch.int64)
    add_clipped_products(total, gradient, scales, unit)
    return total


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 30))


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 6, 6, generator=generator) * 3, torch.randint(0, 30, (count,), generator=generator)


def curvature(model: nn.Module) -> Curvature:
    """Of no data: any orthogonal bases, and eigenvalues over five decades."""
    generator = torch.Generator().manual_seed(2)
    parts: list[LayerCurvature | DiagonalCurvature] = []
    for block in blocks_of(model):
        if isinstance(block, DiagonalBlock):
            parts.append(DiagonalCurvature(block=block, eigenvalues=torch.rand(block.size, generator=generator)))
            continue
        sides: list[torch.Tensor] = []
        for size in (block.rows, block.columns):
            basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0].float()
            values = (10 ** (-2.5 * torch.rand(size, generator=generator))).sort().values
            sides += [basis[None], values[None]]
        parts.append(
            LayerCurvature(
                block=block,
                output_basis=sides[0],
                output_values=sides[1],
                input_basis=sides[2],
                input_values=sides[3],
            )
        )
    return Curvature(blocks=tuple(parts))


def geometries(model: nn.Module) -> dict[str, Geometry]:
    sizes = tuple(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(3)
    scattered = tuple(
        (torch.rand(size, generator=generator) < 0.3).nonzero().flatten()
        if index
        else torch.arange(0)  # a layer that is frozen
        for index, size in enumerate(sizes)
    )
    frozen = tuple(torch.arange(size if index in (3, 5) else 0) for index, size in enumerate(sizes))
    one_matrix = tuple(torch.arange(size if index == 2 else 0) for index, size in enumerate(sizes))
    found = curvature(model)
    return {
        "identity": Identity(sizes=sizes),
        "scattered support": Support(indices=scattered),
        "support without matrices": Support(indices=frozen),
        "support of one whole matrix": Support(indices=one_matrix),
        "whitening, mostly clamped": Whitening(curvature=found, floor=0.3),
        "whitening, hardly clamped": Whitening(curvature=found, floor=1e-4),
        "preconditioning": PreConditioning(curvature=found, floor=0.01),
        "postconditioning": PostConditioning(curvature=found, floor=0.1),
    }


NAMES = list(geometries(net()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 50.0])
def test_the_sum_is_that_of_the_gradients_multiplied_out(name: str, clip_norm: float) -> None:
    model = net()
    engine = PerExampleGradients(model, example=examples(1)[0])
    geometry = geometries(model)[name]
    inputs, labels = examples(9)
    frozen = frozen_parameters(geometry)
    compact = engine.compact(inputs, labels, frozen=frozen)
    assert sorted(engine.shapes) == [2, 4]
    wanted = clip(geometry.project(engine(inputs, labels)), clip_norm)
    total = ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm), shapes=engine.shapes)
    total.add(compact)
    found = torch.cat(total.coordinates())
    exact = torch.cat([part.double().sum(dim=0) for part in wanted])
    allowed = 2e-3 if "hardly" in name else 2.5e-4  # what the grids give up of C, of nine examples
    assert float((found - exact).norm()) <= allowed * 9 * clip_norm
    # No example contributes more than C, and none was lost on the way.
    for row in range(9):
        alone = ClippedSum(
            geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm), shapes=engine.shapes
        )
        alone.add(engine.compact(inputs[row : row + 1], labels[row : row + 1], frozen=frozen))
        norm = float(torch.cat(alone.coordinates()).norm())
        assert norm <= clip_norm
        single = float(torch.cat([part[row].double() for part in wanted]).norm())
        assert norm == pytest.approx(single, rel=5e-3, abs=1e-6 * clip_norm)


@pytest.mark.parametrize("name", NAMES)
def test_neither_order_nor_micro_batches_change_a_bit(name: str) -> None:
    model = net()
    engine = PerExampleGradients(model, example=examples(1)[0])
    geometry = geometries(model)[name]
    compact = engine.compact(*examples(700))  # more than one product's worth

    def total(*pieces: torch.Tensor) -> list[torch.Tensor]:
        found = ClippedSum(geometry=geometry, clip_norm=0.5, spacing=grid_spacing(0.5), shapes=engine.shapes)
        for piece in pieces:
            found.add(
                [
                    RankOne(rows=part.rows[piece], columns=part.columns[piece])
                    if isinstance(part, RankOne)
                    else part[piece]
                    for part in compact
                ]
            )
        return found.units()

    everything = torch.arange(700)
    whole = total(everything)
    for pieces in ([torch.randperm(700)], [everything[:1], everything[1:600], everything[600:]]):
        for left, right in zip(whole, total(*pieces), strict=True):
            if isinstance(geometry, Identity):
                assert torch.equal(left, right)
            else:  # lengths come out of matrix products, whose last bits depend on how many rows they have
                torch.testing.assert_close(left.double(), right.double(), rtol=1e-5, atol=2.0**6)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_that_is_not_finite_contributes_zero(name: str) -> None:
    model = net()
    engine = PerExampleGradients(model, example=examples(1)[0])
    geometry = geometries(model)[name]
    inputs, labels = examples(3)
    inputs[1, 0, 2, 2] = math.nan
    sums = []
    for chosen in ([0, 1, 2], [0, 2]):
        total = ClippedSum(geometry=geometry, clip_norm=0.5, spacing=grid_spacing(0.5), shapes=engine.shapes)
        total.add(engine.compact(inputs[chosen], labels[chosen]))
        sums.append(total.coordinates())
    for left, right in zip(*sums, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)  # its companions' passes round differently
        assert bool(torch.isfinite(left).all())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    row_magnitude=st.floats(1e-30, 1e30),
    column_magnitude=st.floats(1e-30, 1e30),
    clip_norm=st.floats(1e-3, 1e3),
)
def test_no_example_is_longer_than_c_whatever_the_magnitudes(
    seed: int, row_magnitude: float, column_magnitude: float, clip_norm: float
) -> None:
    part = factors(3, 7, 11, seed=seed)
    part = RankOne(rows=part.rows * row_magnitude, columns=part.columns * column_magnitude).rounded()
    norms = part.squares().sqrt()
    scales = (clip_norm * (1 - 5e-6) / norms.clamp(min=1e-300)).clamp(max=1.0)
    unit = product_unit(clip_norm)
    for row in range(3):
        one = RankOne(rows=part.rows[row : row + 1], columns=part.columns[row : row + 1])
        found = clipped_products(one, scales[row : row + 1], unit).double() * unit
        assert float(found.norm()) <= clip_norm
        exact = torch.outer(one.rows[0].double() * scales[row], one.columns[0].double()).flatten()
        assert float((found - exact).norm()) <= math.sqrt(7) * 2**22 * unit


@pytest.mark.parametrize("seed", range(6))
def test_the_sum_of_products_is_one_of_integers(seed: int) -> None:
    """Against Python's integers, at the largest numbers there can be: their sum is beyond what float64 counts."""
    generator = torch.Generator().manual_seed(seed)
    part = RankOne(
        rows=torch.rand(2500, 1, generator=generator) + 0.5, columns=torch.rand(2500, 1, generator=generator) + 0.5
    ).rounded()
    scales = 1 / part.squares().sqrt() * (1 - 1e-9)
    unit = product_unit(1.0)
    steps, wanted = part._column_units(), 0
    for row, column, scale, step in zip(
        part.rows[:, 0].tolist(), part.columns[:, 0].tolist(), scales.tolist(), steps.tolist(), strict=True
    ):
        wanted += math.trunc(row * (scale * (step / unit))) * int(column / step)
    assert clipped_products(part, scales, unit).item() == wanted > 2**54


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), magnitude=st.floats(1e-25, 1e25))
def test_lengths_are_never_too_short(seed: int, magnitude: float) -> None:
    part = factors(4, 6, 9, seed=seed)
    part = RankOne(rows=part.rows * magnitude, columns=part.columns / magnitude)
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(6, 9, generator=generator) < 0.4).float()
    exact = (part.rows.double().unsqueeze(2) * part.columns.double().unsqueeze(1)).square()
    for weights in (None, mask, mask * torch.rand(6, 9, generator=generator)):
        wanted = (exact if weights is None else exact * weights.double()).sum(dim=(1, 2))
        found = part.squares(weights)
        assert bool((found >= wanted * (1 - 1e-12)).all())
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def test_rounding_moves_a_column_by_less_than_its_grid() -> None:
    part = factors(50, 3, 200)
    part.columns[7] = 0.0
    rounded = part.rounded()
    errors = (rounded.columns - part.columns).double().norm(dim=1)
    assert bool((errors <= 200**0.5 * 2.0**-22 * part.columns.double().norm(dim=1) * 2).all())
    again = rounded.rounded()
    assert torch.equal(again.columns, rounded.columns)


@pytest.mark.parametrize("largest", [1.0, 1.0000001, 0.9999, 3.7e5, 1e-12])
def test_the_unit_leaves_room_for_what_is_largest(largest: float) -> None:
    assert 2 ** (PRODUCT_BITS - 1) < largest / product_unit(largest) <= 2**PRODUCT_BITS


def test_a_geometry_that_needs_all_entries_gets_them_a_few_examples_at_a_time() -> None:
    model = net()
    engine = PerExampleGradients(model, example=examples(1)[0])
    everything = engine(*examples(70))
    geometry = Diagonal(scales=tuple(torch.rand(part[0].numel()) + 0.5 for part in everything))
    sums = []
    for gradients in (everything, engine.compact(*examples(70))):
        sums.append(ClippedSum(geometry=geometry, clip_norm=0.5, spacing=grid_spacing(0.5), shapes=engine.shapes))
        sums[-1].add(gradients)
    for left, right in zip(sums[0].units(), sums[1].units(), strict=True):
        assert torch.equal(left, right)


def test_layers_that_are_called_twice_or_at_many_positions_stay_dense() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.positions, self.once = nn.Linear(64, 64), nn.Linear(8, 200), nn.Linear(64, 50)
            self.tied = nn.Linear(50, 64)
            self.tied.weight = nn.Parameter(torch.randn(64, 50) * 0.1)
            self.small = nn.Linear(64, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.twice(torch.tanh(self.twice(inputs))))
            across = self.positions(inputs.view(-1, 8, 8)).mean(dim=(1, 2))
            return self.once(hidden) + across.unsqueeze(1) + self.small(hidden).sum(dim=1, keepdim=True)

    engine = PerExampleGradients(Odd(), example=torch.zeros(1, 64))
    assert [engine.names[index] for index in engine.shapes] == ["once.weight"]
    inputs, labels = torch.randn(5, 64), torch.randint(0, 50, (5,))
    for left, right in zip(engine.compact(inputs, labels), engine(inputs, labels), strict=True):
        torch.testing.assert_close(dense(left), right)


def test_joint_lengths_are_those_of_all_entries() -> None:
    part, other = factors(5, 3, 4), torch.randn(5, 2, 2)
    wanted = torch.cat([part.dense().flatten(1), other.flatten(1)], dim=1).double().norm(dim=1)
    torch.testing.assert_close(joint_lengths([part, other]), wanted, rtol=1e-6, atol=0)
