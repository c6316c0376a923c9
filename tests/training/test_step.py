"""The private step keeps its bound, its noise and its divisor, however the batch is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.geometry import Identity, Support, top_k
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey
from raydp.training.step import clip, clipped_sum, private_gradient

SIZES = (6, 4)


def phase(*, sigma: float = 1.0, clip_norm: float = 1.0, batch_size: int = 4) -> Phase:
    spec = PhaseSpec(name="train", steps=10, batch_size=batch_size, population=100, clip_norm=clip_norm)
    return Phase(spec=spec, noise_multiplier=sigma)


def gradients(count: int, *, seed: int = 0, scale: float = 3.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 2, 3, generator=generator) * scale, torch.randn(count, 4, generator=generator) * scale]


GEOMETRIES = {
    "identity": Identity(sizes=SIZES),
    "support": Support(indices=(torch.tensor([0, 3, 5]), torch.tensor([1]))),
    "empty layer": Support(indices=(torch.tensor([], dtype=torch.long), torch.tensor([0, 2]))),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@settings(max_examples=30, deadline=None)
@given(
    magnitude=st.floats(1e-30, 1e30),
    clip_norm=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10**6),
    count=st.integers(1, 6),
)
def test_no_example_moves_the_noiseless_sum_by_more_than_c(
    name: str, magnitude: float, clip_norm: float, seed: int, count: int
) -> None:
    geometry = GEOMETRIES[name]
    parts = [part * magnitude for part in gradients(count, seed=seed)]
    clipped = clip(geometry.project(parts), clip_norm)
    norms = torch.cat(clipped, dim=1).double().norm(dim=1)
    assert bool((norms <= clip_norm * (1 + 1e-5)).all())


def test_example_inside_the_ball_is_not_scaled() -> None:
    parts = [torch.full((1, 6), 0.1), torch.zeros(1, 4)]
    torch.testing.assert_close(clip(parts, 1.0)[0], parts[0], rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_example_that_is_not_finite_contributes_zero(bad: float) -> None:
    parts = gradients(3)
    parts[0][1, 0, 0] = bad
    found = clipped_sum([part.flatten(1) for part in parts], 1.0)
    others = clipped_sum([part.flatten(1)[[0, 2]] for part in parts], 1.0)
    for left, right in zip(found, others, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_micro_batches_give_the_update_of_one_batch_with_noise_once(name: str) -> None:
    key, everything = NoiseKey.insecure(3), gradients(7)
    whole = private_gradient([everything], geometry=GEOMETRIES[name], phase=phase(), step=2, key=key)
    for cuts in ([3, 4], [1] * 7, [0, 7, 0]):
        chunks = [[part[sum(cuts[:i]) : sum(cuts[: i + 1])] for part in everything] for i in range(len(cuts))]
        cut = private_gradient(chunks, geometry=GEOMETRIES[name], phase=phase(), step=2, key=key)
        for left, right in zip(whole, cut, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_an_empty_batch_still_gets_the_full_noise_and_the_expected_divisor() -> None:
    released = private_gradient(
        [],
        geometry=Identity(sizes=(50_000,)),
        phase=phase(sigma=2.0, clip_norm=3.0, batch_size=4),
        step=0,
        key=NoiseKey.insecure(1),
    )
    assert float(released[0].std()) == pytest.approx(2.0 * 3.0 / 4, rel=0.02)


def test_the_divisor_is_the_expected_batch_size_whatever_the_realised_one() -> None:
    one = [torch.full((1, 6), 0.1).reshape(1, 2, 3), torch.zeros(1, 4)]
    silent = phase(sigma=1e-12, batch_size=50)
    released = private_gradient([one], geometry=Identity(sizes=SIZES), phase=silent, step=0, key=NoiseKey.insecure(1))
    torch.testing.assert_close(released[0], torch.full((6,), 0.1 / 50))


def test_noise_belongs_to_phase_step_and_tensor() -> None:
    def draw(step: int, name: str = "train") -> torch.Tensor:
        spec = PhaseSpec(name=name, steps=10, batch_size=4, population=100, clip_norm=1.0)
        return torch.cat(
            private_gradient(
                [],
                geometry=Identity(sizes=(64, 64)),
                phase=Phase(spec=spec, noise_multiplier=1.0),
                step=step,
                key=NoiseKey.insecure(5),
            )
        )

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    assert not torch.equal(draw(3), draw(3, "warmup"))
    assert not torch.equal(draw(3)[:64], draw(3)[64:])


def test_top_k_is_global_and_breaks_ties_by_position() -> None:
    scores = torch.tensor([0.0, 5.0, 5.0, 1.0, 5.0, 9.0])
    support = top_k(scores, 3, (3, 3))
    assert [index.tolist() for index in support.indices] == [[1, 2], [2]]
    assert top_k(torch.zeros(6), 2, (3, 3)).indices[0].tolist() == [0, 1]


def test_support_draws_noise_on_active_coordinates_only() -> None:
    released = private_gradient([], geometry=GEOMETRIES["support"], phase=phase(), step=0, key=NoiseKey.insecure(1))
    assert [part.shape[0] for part in released] == [3, 1]
    assert np.isfinite(torch.cat(released).numpy()).all()


def test_released_values_do_not_show_the_grid_of_the_noise() -> None:
    """Coordinates on which nothing was summed release the noise rounded once, and not the product of two roundings."""
    key, chosen = NoiseKey.insecure(0), phase(sigma=1.3, batch_size=3)
    (released, _) = private_gradient([], geometry=Identity(sizes=(1000, 1)), phase=chosen, step=0, key=key)
    exact = chosen.noise_std * key.gaussian(1000, "noise", "train", 0, 0) / 3
    assert exact.dtype == np.float64 and released.dtype == torch.float32
    assert np.array_equal(released.numpy(), exact.astype(np.float32))
    assert not np.array_equal(exact, exact.astype(np.float32).astype(np.float64))
