import math

import pytest

from raydp.errors import InvalidValue, UnknownName
from raydp.privacy import Budget


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf, 1001, "3", True, None])
def test_epsilon_out_of_range_names_the_field(epsilon: object) -> None:
    with pytest.raises(InvalidValue, match="epsilon"):
        Budget(epsilon=epsilon, delta=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, math.inf, "1e-5"])
def test_delta_out_of_range_names_the_field(delta: object) -> None:
    with pytest.raises(InvalidValue, match="delta"):
        Budget(epsilon=1, delta=delta)  # type: ignore[arg-type]


def test_unknown_adjacency_suggests_the_near_one() -> None:
    with pytest.raises(UnknownName, match="replace_one"):
        Budget(epsilon=1, delta=1e-5, adjacency="replace-one")  # type: ignore[arg-type]


def test_large_delta_warns_with_one_over_n() -> None:
    with pytest.warns(UserWarning, match="1/N = 0.001"):
        Budget(epsilon=1, delta=1e-3).warn_if_delta_is_large(1000)


def test_json_round_trip() -> None:
    budget = Budget(epsilon=3, delta=1e-6, adjacency="replace_one")
    assert Budget.from_json(budget.to_json()) == budget


def test_a_number_beyond_all_floats_is_refused_like_infinity():
    for epsilon in (10**400, -(10**400)):
        with pytest.raises(InvalidValue, match="must be finite"):
            Budget(epsilon=epsilon, delta=1e-5)
