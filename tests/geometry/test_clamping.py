"""The floor's schedule: its ends, its plateau, its shape, and what it refuses (METHODS section 4, row 8)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydp.errors import InvalidValue, UnknownName
from raydp.geometry.clamping import ClampingSchedule, safe_floor


def schedule(**changes: Any) -> ClampingSchedule:
    values: dict[str, Any] = {"lambda_safe": 2.0, "lambda_base": 0.02, "steps": 100, "decay_steps": 10}
    return ClampingSchedule(**{**values, **changes})


@given(
    safe=st.floats(1e-6, 1e6),
    share=st.floats(1e-6, 1.0),
    steps=st.integers(2, 300),
    fraction=st.floats(0, 1),
    exponent=st.floats(1, 20),
)
def test_it_falls_to_the_base_and_rises_to_safe_monotonically(
    safe: float, share: float, steps: int, fraction: float, exponent: float
) -> None:
    decay = min(round(fraction * steps), steps - 1)
    base = safe * share
    found = schedule(lambda_safe=safe, lambda_base=base, steps=steps, decay_steps=decay, exponent=exponent)
    floors = [found.floor(step) for step in range(steps + 1)]
    assert floors[0] == (safe if decay else base)
    assert floors[decay] == base
    assert floors[steps] == safe
    slack = 1e-12 * safe
    assert all(a >= b - slack for a, b in pairwise(floors[: decay + 1]))
    assert all(a <= b + slack for a, b in pairwise(floors[decay:]))
    assert all(base - slack <= floor <= safe + slack for floor in floors)


def test_the_decay_is_linear_and_the_rise_has_the_published_shape() -> None:
    found = schedule(lambda_safe=1.0, lambda_base=0.01, steps=1000, decay_steps=100)
    assert found.floor(50) == pytest.approx(1.0 - 0.99 / 2)
    for share, rise in ((0.5, 0.001), (0.7, 0.028), (0.8, 0.107), (0.9, 0.349)):  # at p = 10
        step = 100 + round(share * 900)
        assert (found.floor(step) - 0.01) / 0.99 == pytest.approx(rise, abs=5e-4)


def test_it_is_continuous_where_the_pieces_meet() -> None:
    found = schedule(steps=100_000, decay_steps=10_000)
    assert found.floor(9_999) - found.floor(10_000) < 2e-4
    assert found.floor(10_001) - found.floor(10_000) < 2e-4


def test_no_decay_starts_on_the_plateau_and_all_decay_ends_on_it() -> None:
    assert schedule(decay_steps=0).floor(0) == 0.02
    assert schedule(decay_steps=100).floor(100) == 0.02


def test_fixed_and_none() -> None:
    assert {schedule(kind="fixed").floor(step) for step in (0, 50, 100)} == {2.0}
    assert {schedule(kind="none").floor(step) for step in (0, 50, 100)} == {0.0}


def test_the_safe_floor_makes_the_steps_of_both_methods_equally_long() -> None:
    found = safe_floor(learning_rate=0.5, clip_norm=10.0, reference_learning_rate=2.0, reference_clip_norm=1.0)
    assert found == 6.25
    assert 0.5 * 10.0 / found**0.5 == 2.0 * 1.0  # η C' / sqrt(λ) = η_s C_s


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lambda_base": 0.0}, "lambda_base"),
        ({"lambda_base": -1.0}, "lambda_base"),
        ({"lambda_base": 3.0}, "lambda_base"),
        ({"lambda_safe": 0.0}, "lambda_safe"),
        ({"lambda_safe": float("nan")}, "lambda_safe"),
        ({"exponent": 0.5}, "exponent"),
        ({"decay_steps": 101}, "decay_steps"),
        ({"decay_steps": -1}, "decay_steps"),
        ({"steps": 0}, "steps"),
    ],
)
def test_what_breaks_the_rules_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        schedule(**changes)
    assert refused.value.field == field


def test_an_unknown_kind_and_a_step_beyond_the_end_are_refused() -> None:
    with pytest.raises(UnknownName, match="dynamic"):
        schedule(kind="dynamical")
    with pytest.raises(InvalidValue, match="step"):
        schedule().floor(101)
