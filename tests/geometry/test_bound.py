"""No example moves the noiseless sum by more than C(1 + 1e-5), in any geometry (METHODS section 4, row 3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raydp.geometry import Diagonal, Geometry, Identity, Subspace, Support
from raydp.geometry.blocks import blocks_of
from raydp.geometry.private_factors import FACTOR_CLIP_NORM, ClippedMoments, FactorEngine, moment_radii, moment_sizes
from raydp.geometry.subspace import SUBSPACE_CLIP_NORM, unit_ball
from raydp.privacy.mechanism import Phase, PhaseSpec, grid_spacing
from raydp.privacy.noise import NoiseKey
from raydp.training.step import ClippedSum, clip, private_gradient
from tests.geometry.nets import examples, small_net

SHAPES = ((4, 3), (5,), (2, 2, 2))
SIZES = (12, 5, 8)


def identity() -> Geometry:
    return Identity(sizes=SIZES)


def support() -> Geometry:
    return Support(indices=(torch.tensor([0, 5, 11]), torch.tensor([], dtype=torch.long), torch.arange(8)))


def diagonal() -> Geometry:
    generator = torch.Generator().manual_seed(1)
    return Diagonal(scales=tuple(10 ** (-6 * torch.rand(size, generator=generator)) for size in SIZES))


def subspace() -> Geometry:
    generator = torch.Generator().manual_seed(2)
    shapes = zip(SIZES, (5, 1, 8), strict=True)
    bases = [torch.linalg.qr(torch.randn(*shape, generator=generator)).Q for shape in shapes]
    return Subspace(bases=tuple(bases), embedding_clip_norm=10.0, residual_clip_norm=0.3)


def tilted_subspace() -> Geometry:
    """A basis that is not orthonormal at all: the bound does not rest on it."""
    bases = [100 * torch.ones(size, 2) for size in SIZES]
    return Subspace(bases=tuple(bases), embedding_clip_norm=0.01, residual_clip_norm=1e3)


def moments() -> Geometry:
    return ClippedMoments(sizes=SIZES, radii=(0.1, 1.0, 1e4))


GEOMETRIES: dict[Callable[[], Geometry], float | None] = {
    identity: None,
    support: None,
    diagonal: None,
    subspace: SUBSPACE_CLIP_NORM,
    tilted_subspace: SUBSPACE_CLIP_NORM,
    moments: FACTOR_CLIP_NORM,
}


def gradients(count: int, scale: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = 10 ** (4 * torch.rand(count, generator=generator) - 2)  # examples of very different lengths
    return [
        scale * torch.randn(count, *shape, generator=generator) * lengths.reshape(-1, *[1] * len(shape))
        for shape in SHAPES
    ]


def norm(parts: list[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).double().norm())


def total(geometry: Geometry, batch: list[Tensor], clip_norm: float) -> list[Tensor]:
    found = ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm))
    found.add(batch)
    return found.coordinates()


@pytest.mark.parametrize("make", GEOMETRIES, ids=lambda make: make.__name__)
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 6),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30, float("inf"), float("nan")]),
    clip_norm=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**16),
)
def test_one_example_moves_the_sum_by_at_most_c(
    make: Callable[[], Geometry], count: int, scale: float, clip_norm: float, seed: int
) -> None:
    fixed = GEOMETRIES[make]
    bound = clip_norm if fixed is None else fixed
    geometry, batch = make(), gradients(count, scale, seed)
    for index in range(count):
        alone = total(geometry, [part[index : index + 1] for part in batch], bound)
        assert norm(alone) <= bound
    everything = total(geometry, batch, bound)
    without = total(geometry, [part[1:] for part in batch], bound)
    difference = [a - b for a, b in zip(everything, without, strict=True)]
    assert norm(difference) <= bound


@pytest.mark.parametrize("make", [subspace, tilted_subspace, moments], ids=lambda make: make.__name__)
@settings(max_examples=40, deadline=None)
@given(scale=st.sampled_from([1e-3, 1.0, 1e4, 1e30]), seed=st.integers(0, 2**16))
def test_geometries_that_clip_leave_nothing_to_the_phase(make: Callable[[], Geometry], scale: float, seed: int) -> None:
    """Their own bound is the phase's clip norm, so that what the phase clips is what they promise, and no less."""
    bound = GEOMETRIES[make]
    assert bound is not None
    coordinates = make().project(gradients(4, scale, seed))
    lengths = torch.cat(coordinates, dim=1).double().norm(dim=1)
    assert bool((lengths <= bound * (1 + 1e-6)).all())
    for before, after in zip(coordinates, clip(coordinates, bound), strict=True):
        torch.testing.assert_close(before, after, rtol=3e-6, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    norm_layer=st.booleans(),
    form=st.sampled_from(["expand", "reduce"]),
    scale=st.sampled_from([1e-3, 1.0, 1e4, 1e18]),
    input_clip=st.floats(1e-2, 10),
    output_clip=st.floats(1e-3, 10),
)
def test_no_example_moves_the_factor_sums_by_more_than_one(
    groups: int, bias: bool, norm_layer: bool, form: str, scale: float, input_clip: float, output_clip: float
) -> None:
    model = small_net(groups=groups, bias=bias, norm=norm_layer, dtype=torch.float32)
    images, labels = examples(4, dtype=torch.float32)
    blocks = blocks_of(model)
    geometry = ClippedMoments(
        sizes=moment_sizes(blocks), radii=moment_radii(blocks, input_clip=input_clip, output_clip=output_clip)
    )
    found = FactorEngine(model, form=form)(scale * images, labels)
    assert tuple(part.shape[1] for part in found) == geometry.sizes
    for index in range(4):
        alone = total(geometry, [part[index : index + 1] for part in found], FACTOR_CLIP_NORM)
        assert norm(alone) <= FACTOR_CLIP_NORM


@pytest.mark.parametrize("make", GEOMETRIES, ids=lambda make: make.__name__)
def test_micro_batches_make_the_same_update_and_noise_is_added_once_also_to_an_empty_batch(
    make: Callable[[], Geometry],
) -> None:
    """Rows 12 and 13."""
    geometry, batch = make(), gradients(16, 1.0, 3)
    clip_norm = GEOMETRIES[make] or 0.5
    spec = PhaseSpec(name="train", steps=10, batch_size=16, population=100, clip_norm=clip_norm)
    phase, key = Phase(spec=spec, noise_multiplier=1.5), NoiseKey.insecure(3)
    pieces = [[part[start : start + 5] for part in batch] for start in range(0, 16, 5)]
    whole, cut, empty = (
        private_gradient(batches, geometry=geometry, phase=phase, step=0, key=key) for batches in ([batch], pieces, [])
    )
    for left, right in zip(whole, cut, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    signal = [part / 16 for part in total(geometry, batch, clip_norm)]
    for released, noise, mean in zip(whole, empty, signal, strict=True):
        torch.testing.assert_close((released - noise).double(), mean, rtol=1e-4, atol=1e-6)
    assert all(bool((noise != 0).all()) for noise in empty)
    spread = float(torch.cat([part.flatten() for part in empty]).std())
    expected = 1.5 * clip_norm / 16
    assert abs(spread / expected - 1) < 5 / math.sqrt(2 * sum(geometry.sizes))


def test_the_unit_ball_drops_what_is_not_finite() -> None:
    parts = [torch.tensor([[3.0], [float("inf")], [float("nan")]]), torch.tensor([[4.0], [0.0], [0.0]])]
    found = torch.cat(unit_ball(parts, 10.0), dim=1)
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.4], [0.0, 0.0], [0.0, 0.0]]))
    found = torch.cat(unit_ball(parts, 1.0), dim=1)
    torch.testing.assert_close(found[0], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_a_linear_layer_is_one_vector_of_all_its_parameters() -> None:
    """The joint norm runs over weight and bias, whatever the number of tensors that hold them."""
    model = nn.Linear(2, 1)
    geometry = Diagonal(scales=(torch.ones(2), torch.ones(1)))
    coordinates = geometry.project([torch.full((1, *p.shape), 2.0) for p in model.parameters()])
    assert norm(clip(coordinates, 1.0)) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("size", [255, 257, 600_001])
def test_rounding_does_not_lengthen_clipped_vectors_of_many_entries(size: int) -> None:
    """A few large entries before very many small ones: a plain float32 sum of squares loses the small ones."""
    spiked = torch.full((size,), 1e-4)
    spiked[:64] = 1.0
    coordinates = [torch.stack([spiked, torch.randn(size, generator=torch.Generator().manual_seed(0))])]
    (clipped,) = clip(coordinates, 0.5)
    lengths = clipped.double().square().sum(dim=1).sqrt()
    assert bool((lengths <= 0.5).all()) and bool((lengths >= 0.5 * (1 - 3e-5)).all())
