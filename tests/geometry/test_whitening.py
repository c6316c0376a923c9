"""The whitened step against dense linear algebra (METHODS section 4, rows 3, 5, 6, 7, 13)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raydp.geometry import Geometry, Identity, PostConditioning, PreConditioning, Whitening
from raydp.geometry.curvature import Curvature
from raydp.geometry.kfac import estimate_curvature
from raydp.geometry.whitening import FlooredGeometry
from raydp.privacy.mechanism import Phase, PhaseSpec, grid_spacing
from raydp.privacy.noise import NoiseKey
from raydp.training.gradients import PerExampleGradients, average_copies
from raydp.training.step import ClippedSum, clip, private_gradient
from tests.geometry.nets import curvature_of, dense, dense_clamped_inverse, examples, small_net

ARMS: tuple[type[FlooredGeometry], ...] = (Whitening, PreConditioning, PostConditioning)


@pytest.fixture
def double() -> Iterator[None]:
    """float64 everywhere, also in the step's accumulator."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def phase(*, sigma: float = 1.0, clip_norm: float = 1.0, batch_size: int = 16) -> Phase:
    spec = PhaseSpec(name="train", steps=10, batch_size=batch_size, population=100, clip_norm=clip_norm)
    return Phase(spec=spec, noise_multiplier=sigma)


def sizes_of(model: nn.Module) -> list[int]:
    return [parameter.numel() for parameter in model.parameters()]


def flat(gradients: list[Tensor]) -> Tensor:
    """(n, d)."""
    return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)


def middle(curvature: Curvature, share: float = 0.5) -> float:
    """A floor that clamps this share of the eigenvalues."""
    return float(curvature.eigenvalues.quantile(share))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("arm", ARMS)
def test_there_and_back_is_the_dense_inverse_fisher(
    arm: type[FlooredGeometry], share: float, bias: bool, groups: int
) -> None:
    """Row 5, to 1e-8 in float64, with a share of the products clamped: products, not factors."""
    model = small_net(groups=groups, bias=bias)
    curvature = curvature_of(model)
    geometry = arm(curvature=curvature, floor=middle(curvature, share))
    images, labels = examples(4)
    gradients = PerExampleGradients(model)(images, labels)
    inverse = dense_clamped_inverse(dense(curvature, sizes_of(model)), geometry.floor)
    projected = geometry.project(gradients)
    assert tuple(part.shape[1] for part in projected) == geometry.sizes
    for index in range(4):
        lifted = geometry.lift([part[index] for part in projected])
        assert [part.numel() for part in lifted] == sizes_of(model)
        wanted = inverse @ flat(gradients)[index]
        assert float((torch.cat(lifted) - wanted).abs().max()) < 1e-8 * float(wanted.abs().max())


def test_whitened_lengths_are_the_fisher_norm() -> None:
    """‖X_i‖² = gᵀ F̃^{-1} g, which is what the clip norm bounds (the KL trust region)."""
    model = small_net()
    curvature = curvature_of(model)
    geometry = Whitening(curvature=curvature, floor=middle(curvature))
    gradients = PerExampleGradients(model)(*examples(5))
    inverse = dense_clamped_inverse(dense(curvature, sizes_of(model)), geometry.floor)
    vectors = flat(gradients)
    torch.testing.assert_close(
        flat(geometry.project(gradients)).square().sum(dim=1), torch.einsum("ni,ij,nj->n", vectors, inverse, vectors)
    )


def test_another_floor_shares_the_curvature() -> None:
    geometry = Whitening(curvature=curvature_of(small_net()), floor=1.0)
    other = geometry.with_floor(2.0)
    assert type(other) is Whitening and other.curvature is geometry.curvature and other.floor == 2.0


@settings(max_examples=25, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3]),
    channels=st.integers(1, 2),
    outputs=st.integers(1, 3),
    kernel=st.integers(1, 3),
    hidden=st.integers(1, 6),
    bias=st.booleans(),
    norm=st.booleans(),
    count=st.integers(1, 5),
    arm=st.sampled_from(ARMS),
    clip_norm=st.floats(1e-2, 1e2),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    share=st.floats(0.1, 1.0),
)
def test_turning_keeps_lengths_and_no_example_moves_the_sum_by_more_than_c(
    groups: int,
    channels: int,
    outputs: int,
    kernel: int,
    hidden: int,
    bias: bool,
    norm: bool,
    count: int,
    arm: type[FlooredGeometry],
    clip_norm: float,
    scale: float,
    share: float,
) -> None:
    """Row 3, over random layer shapes, in float32."""
    torch.manual_seed(0)
    inputs, features = groups * channels, groups * outputs
    layers: list[nn.Module] = [nn.Conv2d(inputs, features, kernel, groups=groups, bias=bias)]
    layers += [nn.GroupNorm(groups, features)] if norm else []
    layers += [nn.Tanh(), nn.Flatten(), nn.Linear(features * (5 - kernel) ** 2, hidden), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(hidden, 3, bias=bias))
    images = scale * torch.randn(20, inputs, 4, 4)
    curvature = estimate_curvature(model, images, generator=torch.Generator().manual_seed(0))
    gradients = PerExampleGradients(model)(images[:count], torch.randint(3, (count,)))
    turned = curvature.rotate(gradients)
    torch.testing.assert_close(flat(turned).norm(dim=1), flat(gradients).norm(dim=1), rtol=1e-4, atol=1e-5)
    for back, gradient in zip(curvature.unrotate(turned), gradients, strict=True):
        atol = 1e-4 * float(flat(gradients).norm())
        torch.testing.assert_close(back, gradient.flatten(1), rtol=1e-4, atol=atol)
    geometry = arm(curvature=curvature, floor=max(middle(curvature, share), 1e-20))
    coordinates = geometry.project(gradients)
    assert sum(geometry.sizes) == sum(sizes_of(model))
    assert bool((flat(clip(coordinates, clip_norm)).double().norm(dim=1) <= clip_norm * (1 + 1e-5)).all())
    for index in range(count):
        alone = ClippedSum(geometry=geometry, clip_norm=clip_norm, spacing=grid_spacing(clip_norm))
        alone.add([gradient[index : index + 1] for gradient in gradients])
        assert float(torch.cat(alone.coordinates()).double().norm()) <= clip_norm


def test_an_augmented_example_is_one_vector_of_length_c() -> None:
    model = small_net()
    curvature = curvature_of(model)
    geometry = Whitening(curvature=curvature, floor=middle(curvature))
    averaged = average_copies(PerExampleGradients(model)(*examples(12)), 4)
    assert bool((flat(clip(geometry.project(averaged), 0.1)).norm(dim=1) <= 0.1 * (1 + 1e-5)).all())


def unrounded(geometry: Geometry, gradients: list[Tensor], noise: list[Tensor], *, chosen: Phase) -> list[Tensor]:
    """The private step's arithmetic with a given noise, and without the grid that the step itself rounds to."""
    clipped = clip(geometry.project(gradients), chosen.clip_norm)
    return [(c.sum(dim=0) + chosen.noise_std * z) / chosen.batch_size for c, z in zip(clipped, noise, strict=True)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("excess", [1.0, 7.0])
def test_a_floor_above_all_eigenvalues_is_dp_sgd(excess: float) -> None:
    """Row 6: λ >= λ_max equals DP-SGD with (C√λ, η/λ) to 1e-8 in float64 under the same noise.

    The whitened noise may be drawn in the eigenbasis; DP-SGD is given the same draw, turned by the same orthogonal
    matrix, which is sqrt(λ) times the lift.
    Half of the examples are clipped.
    """
    model = small_net()
    curvature = curvature_of(model)
    floor = excess * float(curvature.eigenvalues.max())
    gradients = PerExampleGradients(model)(*examples(16))
    lengths = flat(gradients).norm(dim=1) / floor**0.5
    clip_norm, rate = float(lengths.median()), 0.7
    assert 0 < int((lengths > clip_norm).sum()) < 16
    whitening = Whitening(curvature=curvature, floor=floor)
    noise = [torch.randn(size) for size in whitening.sizes]
    released = unrounded(whitening, gradients, noise, chosen=phase(clip_norm=clip_norm))
    natural = rate * torch.cat(whitening.lift(released))
    plain = unrounded(
        Identity(sizes=tuple(sizes_of(model))),
        gradients,
        [floor**0.5 * part for part in whitening.lift(noise)],
        chosen=phase(clip_norm=clip_norm * floor**0.5),
    )
    assert float((natural - rate / floor * torch.cat(plain)).abs().max()) < 1e-8 * float(natural.abs().max())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("arm", "power"), [(Whitening, -1.0), (PreConditioning, -2.0), (PostConditioning, 0.0)], ids=str
)
def test_the_noise_of_an_update_has_the_covariance_of_the_theorem(arm: type[FlooredGeometry], power: float) -> None:
    """Row 7: an empty batch releases noise alone, of covariance (ησC/B)² F̃^{-1} (whitened; Theorem 3.1, part II)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    images = torch.randn(40, 1, 1, 2, dtype=torch.float64)
    curvature = estimate_curvature(model, images, generator=torch.Generator().manual_seed(0))
    geometry = arm(curvature=curvature, floor=middle(curvature))
    sigma, clip_norm, batch_size, rate, draws = 1.5, 2.0, 16, 0.5, 6000
    chosen, key = phase(sigma=sigma, clip_norm=clip_norm, batch_size=batch_size), NoiseKey.insecure(2)
    updates = torch.stack(
        [
            rate * torch.cat(geometry.lift(private_gradient([], geometry=geometry, phase=chosen, step=step, key=key)))
            for step in range(draws)
        ]
    ).double()
    values, vectors = torch.linalg.eigh(dense(curvature, sizes_of(model)))
    wanted_values = (rate * sigma * clip_norm / batch_size) ** 2 * values.clamp(min=geometry.floor).pow(power)
    # In the theorem's eigenbasis, each direction scaled to variance 1: the covariance must be the identity.
    scaled = updates @ vectors / wanted_values.sqrt()
    found = scaled.T @ scaled / draws
    spread = 5 * (2 / draws) ** 0.5  # five standard deviations of a variance's estimate
    torch.testing.assert_close(found, torch.eye(len(values), dtype=torch.float64), atol=spread, rtol=0)
    assert float(scaled.mean(dim=0).abs().max()) < 5 / draws**0.5


def test_micro_batches_make_the_same_update_with_noise_once() -> None:
    """Row 13."""
    model = small_net(dtype=torch.float32)
    curvature = curvature_of(model)
    geometry = Whitening(curvature=curvature, floor=middle(curvature))
    gradients = PerExampleGradients(model)(*examples(16, dtype=torch.float32))
    pieces = [[part[start : start + 5] for part in gradients] for start in range(0, 16, 5)]
    key = NoiseKey.insecure(3)
    whole, cut = (
        private_gradient(batches, geometry=geometry, phase=phase(clip_norm=0.5), step=0, key=key)
        for batches in ([gradients], pieces)
    )
    for left, right in zip(whole, cut, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_without_a_floor_a_flat_direction_neither_crashes_nor_stays_finite() -> None:
    model = small_net(dtype=torch.float32)
    images, _ = examples(1, dtype=torch.float32)
    curvature = estimate_curvature(model, images, generator=torch.Generator().manual_seed(0))  # rank one
    geometry = Whitening(curvature=curvature, floor=0.0)
    gradients = PerExampleGradients(model)(*examples(4, dtype=torch.float32))
    released = private_gradient([gradients], geometry=geometry, phase=phase(), step=0, key=NoiseKey.insecure(4))
    assert all(bool(torch.isfinite(part).all()) for part in released)  # examples of infinite length contribute zero
    assert not bool(torch.isfinite(torch.cat(geometry.lift(released))).all())
