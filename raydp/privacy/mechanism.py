"""Mechanisms and phases as data. They describe; accountants interpret; training executes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raydp import _validate
from raydp.errors import InvalidValue

CALIBRATIONS = ("exact", "classical")

#: C/γ lies below this, so that float32 holds every entry of a clipped vector on the grid exactly.
GRID_CELLS = 2**23
_NOISY = 2.0**7  # sigma from which the grid widens with the noise


def grid_spacing(clip_norm: float, noise_multiplier: float = 1.0) -> float:
    """γ, a power of two: C·2^-23 < γ <= C·2^-22, and coarser in proportion where sigma exceeds 128.

    Clipped vectors are cut off towards zero on this grid, which shrinks an entry by less than γ and the norm never.
    Any spacing is private. This one is far below the noise: sigma·C is
    at least 2^22·min(sigma, 64) spacings, and less than 2^30.
    """
    _, exponent = math.frexp(clip_norm)  # C = m·2^exponent, m in [1/2, 1)
    _, wider = math.frexp(max(noise_multiplier / _NOISY, 0.5))
    return math.ldexp(1.0, exponent - 23 + wider)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One noisy query repeated: a Poisson-subsampled Gaussian, ``steps`` times.

    Attributes:
        noise_multiplier: sigma > 0. The noise on the *sum* of clipped vectors is N(0, (sigma·C)² I).
        sample_rate: q in (0, 1], the probability with which each example enters a step. q = 1 is the Gaussian
            mechanism on all data.
        steps: T >= 1, an integer. A one-shot Gaussian is q = 1, T = 1.

    >>> from raydp.privacy import Mechanism
    >>> Mechanism(noise_multiplier=1.1, sample_rate=256 / 4000, steps=125)
    Mechanism(noise_multiplier=1.1, sample_rate=0.064, steps=125)
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _validate.positive("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "sample_rate", _validate.between("sample_rate", self.sample_rate, 0, 1, low_open=True))
        object.__setattr__(self, "steps", _validate.integer("steps", self.steps, low=1))


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """What a method asks for: a phase whose noise multiplier is not solved yet.

    Attributes:
        name: ``warmup``, ``sparse``, ``curvature``, ``train``, ``embed``, …
        steps: T, logical steps (optimiser updates); an integer, never epochs divided by a rate.
        batch_size: the *expected* size B of a logical batch; the divisor of every update.
        population: N, the number of private examples.
        clip_norm: C > 0, one L2 norm over all coordinates of the phase's geometry.
        share: the phase's nominal share of epsilon in (0, 1); None for the last phase, which takes what the
            composition leaves.
        calibration: ``exact`` solves for the least noise; ``classical`` takes the classical formula of the Gaussian
            mechanism, for the only phase of a plan and on all data (q = 1). A classical plan spends what its
            certificate says, which is less than the budget; where it would be more, there is none.

    >>> from raydp.privacy import PhaseSpec
    >>> PhaseSpec(name="train", steps=125, batch_size=256, population=4000, clip_norm=1.0).sample_rate
    0.064
    """

    name: str
    steps: int
    batch_size: int
    population: int
    clip_norm: float
    share: float | None = None
    calibration: str = "exact"

    def __post_init__(self) -> None:
        _validate.name("phase name", self.name)
        object.__setattr__(self, "steps", _validate.integer(f"{self.name}.steps", self.steps, low=1))
        object.__setattr__(self, "population", _validate.integer(f"{self.name}.population", self.population, low=1))
        batch_size = _validate.integer(f"{self.name}.batch_size", self.batch_size, low=1)
        if batch_size > self.population:
            raise InvalidValue(
                f"{self.name}.batch_size",
                batch_size,
                f"must not exceed the number of private examples N = {self.population}",
                f"Choose batch_size <= {self.population}.",
            )
        object.__setattr__(self, "batch_size", batch_size)
        clip_norm = _validate.positive(f"{self.name}.clip_norm", self.clip_norm)
        # Beyond, float32 cannot scale a vector of that length to the grid.
        object.__setattr__(self, "clip_norm", _validate.between(f"{self.name}.clip_norm", clip_norm, 1e-30, 1e30))
        if self.share is not None:
            share = _validate.between(f"{self.name}.share", self.share, 0, 1, low_open=True, high_open=True)
            object.__setattr__(self, "share", share)
        _validate.one_of(f"{self.name}.calibration", self.calibration, CALIBRATIONS)
        if self.calibration == "classical" and self.sample_rate != 1.0:
            raise InvalidValue(
                f"{self.name}.calibration",
                self.calibration,
                "is a formula for queries on all data",
                "Choose batch_size = population, or calibration = 'exact'.",
            )

    @property
    def sample_rate(self) -> float:
        """q = B/N. The only place where q is derived; B and N are never derived from q."""
        return self.batch_size / self.population


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase with its noise multiplier solved: the unit that training executes and a ledger records."""

    spec: PhaseSpec
    noise_multiplier: float

    def __post_init__(self) -> None:
        sigma = _validate.positive(f"{self.spec.name}.noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def steps(self) -> int:
        return self.spec.steps

    @property
    def batch_size(self) -> int:
        return self.spec.batch_size

    @property
    def sample_rate(self) -> float:
        return self.spec.sample_rate

    @property
    def clip_norm(self) -> float:
        return self.spec.clip_norm

    @property
    def mechanism(self) -> Mechanism:
        """The phase as accountants see it."""
        return self.mechanism_of(self.steps)

    def mechanism_of(self, steps: int) -> Mechanism:
        """The mechanism of the first ``steps`` steps of this phase."""
        return Mechanism(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, steps=steps)

    @property
    def noise_std(self) -> float:
        """Standard deviation sigma·C of the noise on each coordinate of the sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def spacing(self) -> float:
        """γ, the spacing of the grid on which this phase's vectors are summed and noised; see :func:`grid_spacing`."""
        return grid_spacing(self.clip_norm, self.noise_multiplier)

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form; ``sample_rate`` is written for the reader."""
        return {
            "name": self.name,
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "clip_norm": self.clip_norm,
            "batch_size": self.batch_size,
            "population": self.spec.population,
            "share": self.spec.share,
            **({} if self.spec.calibration == "exact" else {"calibration": self.spec.calibration}),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Phase:
        """Inverse of :meth:`to_json`; ``sample_rate`` is derived again from the sizes."""
        fields = ("name", "steps", "batch_size", "population", "clip_norm", "share")
        spec = PhaseSpec(**{key: record[key] for key in fields}, calibration=record.get("calibration", "exact"))
        return cls(spec=spec, noise_multiplier=record["noise_multiplier"])
