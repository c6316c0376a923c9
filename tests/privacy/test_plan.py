import math

import pytest

from raydp.errors import InvalidValue, UnknownName
from raydp.privacy import Budget, Interval, Phase, PhaseSpec, Plan


def interval(upper: float) -> Interval:
    return Interval(lower=0.0, estimate=upper, upper=upper, accountant="pld")


def phase(name: str = "train") -> Phase:
    spec = PhaseSpec(name=name, steps=10, batch_size=10, population=100, clip_norm=1.0)
    return Phase(spec=spec, noise_multiplier=1.0)


def plan(upper: float = 1.0, phases: tuple[Phase, ...] | None = None) -> Plan:
    return Plan(budget=Budget(epsilon=1, delta=1e-5), phases=phases or (phase(),), certificate={"pld": interval(upper)})


@pytest.mark.parametrize("bounds", [(0, 2, 1), (-1, 0, 1), (0, math.nan, 1), (0, 0, math.inf), (2, 2, 1)])
def test_interval_refuses(bounds: tuple[float, float, float]) -> None:
    lower, estimate, upper = bounds
    with pytest.raises(InvalidValue):
        Interval(lower=lower, estimate=estimate, upper=upper, accountant="pld")


def test_plan_above_its_budget_is_refused() -> None:
    with pytest.raises(InvalidValue, match="budget"):
        plan(1.0 + 1e-9)


def test_two_phases_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidValue, match="different names"):
        plan(phases=(phase(), phase()))


def test_json_round_trip_and_digest() -> None:
    one = plan()
    assert Plan.from_json(one.to_json()) == one
    assert Plan.from_json(one.to_json()).digest == one.digest
    assert plan(phases=(phase("other"),)).digest != one.digest
    with pytest.raises(UnknownName, match="train"):
        one.phase("trian")
