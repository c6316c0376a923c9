"""The plan: a budget, phases with every noise multiplier solved, and the certificate that they fit."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Mechanism, Phase

SPLITS = ("composed", "naive")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Certified bounds of epsilon at a delta, by one accountant.

    Attributes:
        lower, estimate, upper: the true epsilon lies in [lower, upper]; 0 <= lower <= estimate <= upper.
        accountant: the back end that answered.
        fallback: None, or why another back end than the one asked for had to answer.

    >>> from raydp.privacy import Interval
    >>> Interval(lower=2.9, estimate=2.95, upper=3.0, accountant="prv").upper
    3.0
    """

    lower: float
    estimate: float
    upper: float
    accountant: str
    fallback: str | None = None

    def __post_init__(self) -> None:
        for key in ("lower", "estimate", "upper"):
            object.__setattr__(self, key, _validate.real(key, getattr(self, key)))
        if not 0 <= self.lower <= self.estimate <= self.upper:
            raise InvalidValue(
                "interval",
                (self.lower, self.estimate, self.upper),
                "must satisfy 0 <= lower <= estimate <= upper",
                "An accountant returned bounds in the wrong order; report it.",
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "lower": self.lower,
            "estimate": self.estimate,
            "upper": self.upper,
            "accountant": self.accountant,
            "fallback": self.fallback,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Interval:
        return cls(**record)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The only thing that training may run.

    Attributes:
        budget: what the trial may spend.
        phases: in the order in which they run; every noise multiplier solved.
        certificate: accountant name -> bounds of epsilon of the whole plan at ``budget.delta``.
        accountant: the key of ``certificate`` whose *upper* bound is held against the budget.
        split: ``composed`` (the last phase takes what the composition leaves) or ``naive`` (shares added up).
        further: certified upper bounds of delta at the epsilons of ``budget.further``, in their order.

    Raises:
        InvalidValue: no phase, two phases of one name, no certificate by the accountant, or an upper bound
            above the budget, at any of its points.

    >>> from raydp.privacy import Budget, PhaseSpec, calibrate
    >>> once = PhaseSpec(name="embed", steps=1, batch_size=500, population=500, clip_norm=1.0)
    >>> plan = calibrate(budget=Budget(epsilon=1.0, delta=1e-5), phases=[once])
    >>> round(plan.phase("embed").noise_multiplier, 3), plan.steps, plan.exhausts
    (3.731, 1, True)
    """

    budget: Budget
    phases: tuple[Phase, ...]
    certificate: Mapping[str, Interval] = field(hash=False)
    accountant: str = "pld"
    split: str = "composed"
    further: tuple[float, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        _validate.one_of("split", self.split, SPLITS)
        names = [phase.name for phase in self.phases]
        if not names or len(set(names)) != len(names):
            raise InvalidValue("phases", names, "must be one or more phases of different names", "Name each once.")
        if self.accountant not in self.certificate:
            raise InvalidValue(
                "certificate",
                sorted(self.certificate),
                f"must contain the plan's accountant {self.accountant!r}",
                "Make plans with raydp.privacy.calibrate, which certifies them.",
            )
        if self.epsilon.upper > self.budget.epsilon:
            raise InvalidValue(
                "certificate",
                self.epsilon.upper,
                f"upper bound must not exceed the budget's epsilon = {self.budget.epsilon:g}",
                "Make plans with raydp.privacy.calibrate, which solves for the noise.",
            )
        object.__setattr__(self, "further", tuple(_validate.real("further", delta) for delta in self.further))
        limits = [delta for _, delta in self.budget.further]
        if len(self.further) != len(limits) or any(d > limit for d, limit in zip(self.further, limits, strict=True)):
            raise InvalidValue(
                "further",
                list(self.further),
                f"must be one bound of delta for each further point of the budget, at most {limits}",
                "Make plans with raydp.privacy.calibrate, which solves for the noise.",
            )

    @property
    def epsilon(self) -> Interval:
        """Bounds of epsilon of the whole plan by the plan's own accountant."""
        return self.certificate[self.accountant]

    @property
    def exhausts(self) -> bool:
        """Whether the plan spends its budget up to rounding: no share is wasted, no noise comes from a formula."""
        return self.split == "composed" and all(phase.spec.calibration == "exact" for phase in self.phases)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        return tuple(phase.mechanism for phase in self.phases)

    @property
    def steps(self) -> int:
        """Logical steps of all phases together."""
        return sum(phase.steps for phase in self.phases)

    def phase(self, name: str) -> Phase:
        """The phase of that name. Raises UnknownName."""
        known = {phase.name: phase for phase in self.phases}
        return known[_validate.one_of("phase", name, known)]

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of budget, phases, accountant and split: what a ledger refers to."""
        record = self.to_json()
        del record["certificate"]
        record.pop("further", None)
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form: ``budget``, ``phases``, ``certificate``, ``accountant``, ``split``, any ``further``."""
        record: dict[str, Any] = {
            "budget": self.budget.to_json(),
            "phases": [phase.to_json() for phase in self.phases],
            "certificate": {name: interval.to_json() for name, interval in self.certificate.items()},
            "accountant": self.accountant,
            "split": self.split,
        }
        if self.further:
            record["further"] = list(self.further)
        return record

    def _repr_html_(self) -> str:
        """For notebooks: a row a phase, then the certified bounds."""
        head = ("phase", "noise multiplier σ", "sample rate q", "steps T", "clip norm C", "nominal share of ε")
        rows = [
            (
                phase.name,
                f"{phase.noise_multiplier:.4f}",
                f"{phase.sample_rate:.4g}",
                phase.steps,
                f"{phase.clip_norm:g}",
                "the rest" if phase.spec.share is None else f"{phase.spec.share:g}",
            )
            for phase in self.phases
        ]
        bounds = "; ".join(f"{name} in [{b.lower:.6g}, {b.upper:.6g}]" for name, b in self.certificate.items())
        budget = self.budget
        left = 'style="text-align:left"'  # notebooks align to the right
        return (
            f"<table><thead><tr>{''.join(f'<th scope=col {left}>{name}</th>' for name in head)}</tr></thead><tbody>"
            + "".join(
                f"<tr>{''.join(f'<td {left}>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
            )
            + f"</tbody></table><div>budget: ε = {budget.epsilon:g}, δ = {budget.delta:g}, {budget.adjacency}, "
            f"{self.split}</div><div>certified ε: {html.escape(bounds)}</div>"
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_json`."""
        return cls(
            budget=Budget.from_json(record["budget"]),
            phases=tuple(Phase.from_json(phase) for phase in record["phases"]),
            certificate={name: Interval.from_json(value) for name, value in record["certificate"].items()},
            accountant=record["accountant"],
            split=record["split"],
            further=tuple(record.get("further", ())),
        )
