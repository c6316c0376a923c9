"""The private step keeps its bound, its noise and its divisor, however the batch is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.errors import InvalidValue
from raydp.geometry import Identity, Support, top_k
from raydp.privacy.mechanism import GRID_CELLS, Phase, PhaseSpec, grid_spacing
from raydp.privacy.noise import NoiseKey
from raydp.privacy.stream import LARGEST_FAST_SCALE
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
    found = clipped_sum([part.flatten(1) for part in parts], 1.0, 2.0**-22)
    others = clipped_sum([part.flatten(1)[[0, 2]] for part in parts], 1.0, 2.0**-22)
    for left, right in zip(found, others, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_micro_batches_give_the_update_of_one_batch_with_noise_once(name: str) -> None:
    key, everything = NoiseKey.insecure(3), gradients(7)
    whole = private_gradient([everything], geometry=GEOMETRIES[name], phase=phase(), step=2, key=key)
    for cuts in ([3, 4], [1] * 7, [0, 7, 0]):
        chunks = [[part[sum(cuts[:i]) : sum(cuts[: i + 1])] for part in everything] for i in range(len(cuts))]
        cut = private_gradient(chunks, geometry=GEOMETRIES[name], phase=phase(), step=2, key=key)
        for left, right in zip(whole, cut, strict=True):
            assert torch.equal(left, right)


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
    torch.testing.assert_close(released[0], torch.full((6,), 0.1 / 50), rtol=0, atol=silent.spacing / 50)


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


class TestTheGrid:
    """What protects from floating-point attacks: sum and noise are integers, and their addition is exact."""

    @settings(max_examples=40, deadline=None)
    @given(count=st.integers(1, 600), seed=st.integers(0, 10**6), clip_norm=st.floats(1e-3, 1e3))
    def test_the_sum_is_exact_so_order_and_cuts_do_not_change_it(self, count: int, seed: int, clip_norm: float) -> None:
        spacing = grid_spacing(clip_norm)
        coordinates = [part.flatten(1) for part in gradients(count, seed=seed)]
        whole = clipped_sum(coordinates, clip_norm, spacing)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        shuffled = clipped_sum([part[order] for part in coordinates], clip_norm, spacing)
        alone = [clipped_sum([part[i : i + 1] for part in coordinates], clip_norm, spacing) for i in range(count)]
        added = [torch.stack(parts).sum(dim=0) for parts in zip(*alone, strict=True)]
        for a, b, c in zip(whole, shuffled, added, strict=True):
            assert a.dtype == torch.int64
            assert torch.equal(a, b) and torch.equal(a, c)

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 10**6), clip_norm=st.floats(1e-30, 1e30), exponent=st.integers(-30, 30))
    def test_the_grid_never_lengthens_a_vector(self, seed: int, clip_norm: float, exponent: int) -> None:
        """The norm on the grid, in exact integers, is at most C, and no entry moved by a spacing or more."""
        spacing = grid_spacing(clip_norm)
        (part,) = [torch.randn(1, 300, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent]
        (units,) = clipped_sum([part], clip_norm, spacing)
        squares = sum(int(unit) ** 2 for unit in units)
        assert squares <= int((clip_norm / spacing) ** 2)
        (clipped,) = clip([part], clip_norm)
        # Less than one cell, and float32's rounding of up to 2^23 cells on either side.
        assert float((units * spacing - clipped[0].double()).abs().max()) < 2 * spacing

    @pytest.mark.parametrize("sigma", [1e-3, 1.0, 127.9, 128.0, 1e6, 1e12])
    @pytest.mark.parametrize("clip_norm", [1e-30, 0.1, 1.0, 1.5, 1e30])
    def test_the_spacing_is_a_power_of_two_that_both_sum_and_noise_fit(self, sigma: float, clip_norm: float) -> None:
        spacing = phase(sigma=sigma, clip_norm=clip_norm).spacing
        assert math.frexp(spacing)[0] == 0.5
        assert clip_norm / spacing < GRID_CELLS
        assert min(sigma, 64.0) * 2.0**22 <= sigma * clip_norm / spacing < LARGEST_FAST_SCALE

    def test_what_can_be_released_does_not_depend_on_the_sum(self) -> None:
        """The attack's distinguisher finds nothing: neighbouring sums reach the same numbers, all of the grid.

        With floats, an output often has no noise value that leads to it from one sum and one from the other
        (Mironov 2012). Here the outputs minus the sum are the noise's integers, whatever the sum is.
        """
        chosen, key = phase(sigma=1.3, clip_norm=0.7, batch_size=3), NoiseKey.insecure(0)
        geometry = Identity(sizes=(2000,))
        example = torch.full((1, 2000), 0.7 / math.sqrt(2000) / 3)
        first = private_gradient([], geometry=geometry, phase=chosen, step=0, key=key)[0]
        scale = chosen.spacing / 3
        integers = [
            torch.round(released.double() / scale)
            for released in (first, private_gradient([[example]], geometry=geometry, phase=chosen, step=0, key=key)[0])
        ]
        noise = key.rounded_normals(
            2000, math.nextafter(chosen.noise_std, math.inf) / chosen.spacing, "noise", "train", 0, 0
        )
        assert np.array_equal((noise * scale).astype(np.float32), first.numpy())
        (shift,) = clipped_sum([example], 0.7, chosen.spacing)
        assert int(shift[0]) != 0
        moved = torch.from_numpy((noise + shift.numpy()) * scale).float()
        assert torch.equal(torch.round(moved.double() / scale), integers[1])

    def test_float32_sums_are_what_the_grid_is_for(self) -> None:
        """How far an example moves a sum of floats depends on the others (Casacuberta et al. 2022)."""
        many = torch.full((2**12, 1), 1.0)
        tiny = torch.full((1, 1), 2.0**-12)
        assert float(torch.cat([many, tiny]).sum(dim=0)) == float(many.sum(dim=0))
        spacing = 2.0**-13
        with_tiny = clipped_sum([torch.cat([many, tiny])], 1.0, spacing)[0]
        without = clipped_sum([many], 1.0, spacing)[0]
        assert int(with_tiny - without) == 2

    def test_a_clip_norm_beyond_float32_is_refused_before_anything_is_planned(self) -> None:
        with pytest.raises(InvalidValue, match=r"train\.clip_norm"):
            phase(clip_norm=1e31)
