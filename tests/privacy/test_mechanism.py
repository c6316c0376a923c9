import math
from typing import Any

import pytest

from raydp.errors import InvalidValue
from raydp.privacy import Mechanism, Phase, PhaseSpec

SPEC: dict[str, Any] = {"name": "train", "steps": 93, "batch_size": 10, "population": 930, "clip_norm": 1.0}


@pytest.mark.parametrize("sigma", [0, -1, math.nan, math.inf])
def test_noise_multiplier_must_be_positive_and_finite(sigma: float) -> None:
    with pytest.raises(InvalidValue, match="noise_multiplier"):
        Mechanism(noise_multiplier=sigma, sample_rate=0.1, steps=1)
    with pytest.raises(InvalidValue, match="noise_multiplier"):
        Phase(spec=PhaseSpec(**SPEC), noise_multiplier=sigma)


@pytest.mark.parametrize("q", [0, -0.1, 1.1, math.nan])
def test_peers_b20_sample_rate_zero_is_refused(q: float) -> None:
    with pytest.raises(InvalidValue, match="sample_rate"):
        Mechanism(noise_multiplier=1.0, sample_rate=q, steps=1)


@pytest.mark.parametrize("steps", [0, -1, 1.5, 92.0, math.nan, True])
def test_peers_b28_steps_are_integers(steps: object) -> None:
    with pytest.raises(InvalidValue, match="steps"):
        PhaseSpec(**{**SPEC, "steps": steps})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 931),
        ("batch_size", 0),
        ("population", 0),
        ("clip_norm", math.nan),
        ("share", 1.0),
        ("share", math.nan),
    ],
)
def test_spec_refuses(field: str, value: object) -> None:
    with pytest.raises(InvalidValue, match=field):
        PhaseSpec(**{**SPEC, field: value})


def test_rate_is_derived_from_sizes() -> None:
    phase = Phase(spec=PhaseSpec(**SPEC), noise_multiplier=2.0)
    assert phase.sample_rate == 10 / 930
    assert phase.mechanism == Mechanism(noise_multiplier=2.0, sample_rate=10 / 930, steps=93)
    assert Phase.from_json(phase.to_json()) == phase
