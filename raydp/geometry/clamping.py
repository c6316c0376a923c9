"""The floor λ_t on the eigenvalues of the curvature, as a schedule that can be searched (arXiv 2607.05866, Eq. 18)."""

from __future__ import annotations

from dataclasses import dataclass

from raydp import _validate
from raydp.errors import InvalidValue

CLAMPINGS = ("dynamic", "fixed", "none")


def safe_floor(
    *, learning_rate: float, clip_norm: float, reference_learning_rate: float, reference_clip_norm: float
) -> float:
    """λ_safe = (η C / (η_s C_s))²: the floor at which a whitened step is as long as the step of a trusted DP-SGD.

    With all eigenvalues at λ the expected squared length of a step is at most η²C²/λ·(1 + dσ²/B²), that of DP-SGD at
    most η_s²C_s²·(1 + dσ²/B²) (d, σ and B cancel where both methods use the same σ).

    >>> from raydp.geometry.clamping import safe_floor
    >>> safe_floor(learning_rate=0.5, clip_norm=1.0, reference_learning_rate=1.0, reference_clip_norm=1.0)
    0.25
    """
    return (learning_rate * clip_norm / (reference_learning_rate * reference_clip_norm)) ** 2


@dataclass(frozen=True, kw_only=True)
class ClampingSchedule:
    """λ_t over the steps t = 0 … T.

    ``dynamic``: down linearly from λ_safe to λ_base over T₁ steps, then up again to λ_safe at T as
    λ_base + (λ_safe − λ_base)·((t − T₁)/(T − T₁))^p. ``fixed``: λ_safe throughout. ``none``: 0, no floor.

    Attributes:
        kind: dynamic, fixed or none.
        lambda_safe: the value at both ends, > 0.
        lambda_base: the low plateau, in (0, λ_safe].
        steps: T >= 1.
        decay_steps: T₁, in [0, T]. At 0 the schedule starts on the plateau.
        exponent: p >= 1.

    >>> from raydp.geometry.clamping import ClampingSchedule
    >>> schedule = ClampingSchedule(lambda_safe=1.0, lambda_base=0.1, steps=100, decay_steps=50)
    >>> [round(schedule.floor(step), 3) for step in (0, 25, 50, 90, 100)]
    [1.0, 0.55, 0.1, 0.197, 1.0]
    """

    kind: str = "dynamic"
    lambda_safe: float
    lambda_base: float
    steps: int
    decay_steps: int
    exponent: float = 10.0

    def __post_init__(self) -> None:
        _validate.one_of("clamping", self.kind, CLAMPINGS)
        _validate.integer("steps", self.steps, low=1)
        _validate.integer("decay_steps", self.decay_steps, low=0, high=self.steps)
        _validate.positive("lambda_safe", self.lambda_safe)
        _validate.positive("lambda_base", self.lambda_base)
        if self.kind == "dynamic" and self.lambda_base > self.lambda_safe:
            raise InvalidValue(
                "lambda_base",
                self.lambda_base,
                f"must lie in (0, lambda_safe = {self.lambda_safe:g}]",
                "Lower it, or raise lambda_safe.",
            )
        if _validate.real("exponent", self.exponent) < 1:
            raise InvalidValue("exponent", self.exponent, "must be >= 1", "Choose 1 or more; the paper has 10.")

    def floor(self, step: int) -> float:
        """λ_t at step t = ``step``, in [0, T]."""
        step = _validate.integer("step", step, low=0, high=self.steps)
        if self.kind == "none":
            return 0.0
        if self.kind == "fixed":
            return self.lambda_safe
        gap = self.lambda_safe - self.lambda_base
        if step < self.decay_steps:
            return self.lambda_safe - gap * (step / self.decay_steps)
        if self.decay_steps == self.steps:  # never rises again; the step T itself is never trained
            return self.lambda_base
        if step == self.steps:  # exactly, not up to rounding
            return self.lambda_safe
        return self.lambda_base + gap * ((step - self.decay_steps) / (self.steps - self.decay_steps)) ** self.exponent
