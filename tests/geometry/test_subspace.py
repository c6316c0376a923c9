"""GEP's basis spans the leading public gradients, and its two parts make up the gradient again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.errors import Diverged, InvalidValue
from raydp.geometry import Subspace
from raydp.geometry.subspace import SUBSPACE_CLIP_NORM, principal_bases, share_out
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey
from raydp.training.gradients import PerExampleGradients
from raydp.training.step import private_gradient
from tests.geometry.nets import examples, small_net


def bases(n: int = 40, *, total: int = 20, iterations: int = 30, seed: int = 0) -> tuple[torch.Tensor, ...]:
    images, labels = examples(n)
    return principal_bases(
        small_net(), images, subspace=total, iterations=iterations, seed=seed, fisher_labels="given", labels=labels
    )


def test_bases_are_the_leading_singular_vectors() -> None:
    gradients = PerExampleGradients(small_net())(*examples(40))
    for basis, gradient in zip(bases(), gradients, strict=True):
        matrix = gradient.flatten(1)
        assert basis.shape[0] == matrix.shape[1]
        torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype))
        captured = float((matrix @ basis).square().sum())
        best = float(torch.linalg.svdvals(matrix)[: basis.shape[1]].square().sum())
        assert captured >= 0.99 * best


def test_one_pass_already_finds_most_and_more_passes_no_less() -> None:
    gradients = PerExampleGradients(small_net())(*examples(40))

    def captured(iterations: int) -> float:
        found = bases(iterations=iterations)
        return sum(float((g.flatten(1) @ basis).square().sum()) for g, basis in zip(gradients, found, strict=True))

    one, two, many = captured(1), captured(2), captured(30)
    assert 0.7 * many < one < two <= many * (1 + 1e-9)


def test_a_basis_is_a_function_of_the_seed() -> None:
    assert all(torch.equal(a, b) for a, b in zip(bases(iterations=1), bases(iterations=1), strict=True))
    assert not torch.equal(bases(iterations=1)[0], bases(iterations=1, seed=1)[0])


def test_dependent_and_vanishing_gradients_still_give_orthonormal_columns() -> None:
    images, labels = examples(1)
    model = small_net()
    same = images.repeat(12, 1, 1, 1)
    found = principal_bases(
        model, same, subspace=20, iterations=2, seed=0, fisher_labels="given", labels=labels.repeat(12)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # no gradient reaches the first layers
    found += principal_bases(model, same, subspace=20, iterations=2, seed=0)
    for basis in found:
        torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype))


def test_parts_that_are_not_clipped_make_up_the_gradient() -> None:
    gradients = PerExampleGradients(small_net())(*examples(3))
    geometry = Subspace(bases=bases(), embedding_clip_norm=1e6, residual_clip_norm=1e6)
    projected = geometry.project(gradients)
    assert tuple(part.shape[1] for part in projected) == geometry.sizes
    for index in range(3):
        lifted = geometry.lift([part[index] for part in projected])
        for back, gradient in zip(lifted, gradients, strict=True):
            torch.testing.assert_close(back, gradient[index].flatten())


def test_parts_are_clipped_apart() -> None:
    basis = torch.eye(3)[:, :1]
    geometry = Subspace(bases=(basis,), embedding_clip_norm=2.0, residual_clip_norm=0.5)
    embedding, residual = geometry.project([torch.tensor([[6.0, 0.3, 0.4]])])
    torch.testing.assert_close(embedding, torch.tensor([[1.0]]), rtol=1e-5, atol=0)  # 6 clipped to 2, over 2
    torch.testing.assert_close(residual, torch.tensor([[0.0, 0.6, 0.8]]), rtol=1e-5, atol=0)  # 0.5 not clipped
    (back,) = geometry.lift([embedding[0], residual[0]])
    torch.testing.assert_close(back, torch.tensor([2.0, 0.3, 0.4]), rtol=1e-5, atol=0)


def test_the_noise_of_each_part_is_root_two_sigma_times_its_clip_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(400, 100, generator=generator)).Q
    geometry = Subspace(bases=(basis,), embedding_clip_norm=10.0, residual_clip_norm=0.1)
    spec = PhaseSpec(name="train", steps=1, batch_size=8, population=80, clip_norm=SUBSPACE_CLIP_NORM)
    phase = Phase(spec=spec, noise_multiplier=0.7)
    updates = [
        geometry.lift(private_gradient([], geometry=geometry, phase=phase, step=step, key=NoiseKey.insecure(1)))[0]
        for step in range(50)
    ]
    noise = torch.stack(updates)
    inside = noise @ basis
    outside = noise - inside @ basis.T
    scale = 0.7 * math.sqrt(2) / 8
    # Inside, the residual's noise is added to the embedding's.
    assert float(inside.std()) == pytest.approx(scale * math.hypot(10.0, 0.1), rel=0.03)
    assert float(outside.norm() / math.sqrt(50 * 300)) == pytest.approx(scale * 0.1, rel=0.03)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    limit=st.integers(1, 60),
    share=st.floats(0, 1),
)
def test_shares_fit_the_tensors_and_add_up(sizes: list[int], limit: int, share: float) -> None:
    room = sum(min(size, limit) for size in sizes)
    total = len(sizes) + int(share * (room - len(sizes)))
    counts = share_out(total, sizes, limit=limit)
    assert sum(counts) == total
    assert all(1 <= count <= min(size, limit) for count, size in zip(counts, sizes, strict=True))
    for refused in (len(sizes) - 1, room + 1):
        with pytest.raises(InvalidValue, match="subspace"):
            share_out(refused, sizes, limit=limit)


def test_shares_follow_the_root_of_the_sizes() -> None:
    assert share_out(40, [900, 100], limit=1000) == (30, 10)


def test_bad_values_are_refused_and_infinite_gradients_end_the_run() -> None:
    for field in ("embedding_clip_norm", "residual_clip_norm"):
        values = {"embedding_clip_norm": 1.0, "residual_clip_norm": 1.0, field: 0.0}
        with pytest.raises(InvalidValue, match=field):
            Subspace(bases=(torch.eye(2),), **values)
    images, _ = examples(30)
    with pytest.raises(InvalidValue, match="at least one"):
        principal_bases(small_net(), images[:0], subspace=20, iterations=1, seed=0)
    with pytest.raises(InvalidValue, match="power_iterations"):
        principal_bases(small_net(), images, subspace=20, iterations=0, seed=0)
    with pytest.raises(Diverged):
        principal_bases(small_net(), images * float("nan"), subspace=20, iterations=1, seed=0)
