"""Trial records: what the journal of a search says about each trial.

The journal is a list of events (see :mod:`raydp.search.run_directory`); :func:`fold` turns it into one
:class:`TrialRecord` a trial. Events and the fields that are read here:

===========  ==========================================================================================
event        fields
===========  ==========================================================================================
proposed     ``key number config plan holdout_plan`` (``plan``, ``holdout_plan``: digests of
             trials/<key>/plan.json and holdout-plan.json, or null)
infeasible   ``key number config reason``
started      ``key attempt``
finished     ``key state reason metrics seconds epsilon measured_on heads holdout_heads`` (``metrics``: name ->
             one value a seed; ``epsilon``: accountant -> interval of the costliest run, from its ledger;
             ``heads``: seed -> chain digest of the last line of its ledger, ``holdout_heads``: of its hold-out's)
===========  ==========================================================================================

Events of other names belong to whoever wrote them and are skipped, so that the journal can hold more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue
from raydp.privacy.plan import Interval, Plan

STATES = ("proposed", "running", "complete", "failed", "diverged", "infeasible", "stopped")
#: States after which the runner has nothing left to do for a trial.
FINISHED = frozenset({"complete", "failed", "diverged", "infeasible", "stopped"})
NOT_STATED = "not stated"


def key_of(number: int) -> str:
    """The key of the trial of that number: 0 -> ``t0000``."""
    return f"t{_validate.integer('number', number, low=0):04d}"


@dataclass(frozen=True, kw_only=True, repr=False)
class TrialRecord:
    """One trial as the journal knows it.

    Attributes:
        key: ``t0000``, ``t0001``, …
        number: position in the order of proposals, from 0.
        state: one of ``proposed running complete failed diverged infeasible stopped``. A trial that was proposed
            or started and not finished is unfinished, whatever became of its process.
        reason: why the trial is failed, diverged, infeasible or stopped; None otherwise.
        config: the hyperparameters, flat.
        metrics: name -> one value for each finished seed; None where a value is missing or not finite.
        plan: what the trial was allowed to run; None for infeasible trials.
        attempts: how often the trial was started (2 or more after a crash).
        seconds: wall-clock time of the trial, or None before it finished.
        epsilon: accountant -> bounds of epsilon of the trial's costliest run, from its ledger; empty if nothing ran.
        measured_on: what the metrics were measured on.
        heads: seed, as text, -> chain digest of the last line of its ledger when the trial was finished; None for a
            damaged ledger.
        holdout_plan: digest of the plan under which a private hold-out is measured; None where it is not.
        holdout_heads: as ``heads``, of the ledgers of the hold-out.
        final: the run with the best config after tuning on a subsample, and no trial of the tuning.

    Raises:
        InvalidValue, UnknownName: a field breaks its rule.
    """

    key: str
    number: int
    state: str
    reason: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    plan: Plan | None = None
    attempts: int = 0
    seconds: float | None = None
    epsilon: Mapping[str, Interval] = field(default_factory=dict)
    measured_on: str = NOT_STATED
    heads: Mapping[str, str | None] = field(default_factory=dict)
    holdout_plan: str | None = None
    holdout_heads: Mapping[str, str | None] = field(default_factory=dict)
    final: bool = False

    def __post_init__(self) -> None:
        _validate.name("key", self.key)
        _validate.integer("number", self.number, low=0)
        _validate.one_of("state", self.state, STATES)
        _validate.integer("attempts", self.attempts, low=0)
        values = {name: tuple(finite(value) for value in series) for name, series in self.metrics.items()}
        object.__setattr__(self, "metrics", values)
        object.__setattr__(self, "config", dict(self.config))
        object.__setattr__(self, "epsilon", dict(self.epsilon))
        object.__setattr__(self, "heads", dict(self.heads))
        object.__setattr__(self, "holdout_heads", dict(self.holdout_heads))

    def __repr__(self) -> str:
        """One line, without the plan and the accountants' bounds, which are attributes."""
        scores = " ".join(f"{name}={mean:.4g}" for name in self.metrics if (mean := self.mean(name)) is not None)
        config = " ".join(f"{n}={v:.4g}" if isinstance(v, float) else f"{n}={v}" for n, v in self.config.items())
        parts = (f"{self.key} {self.state}", self.reason, scores, config)
        return f"<Trial {' | '.join(part for part in parts if part)}>"

    @property
    def finished(self) -> bool:
        """Whether the trial has reached a terminal state."""
        return self.state in FINISHED

    def mean(self, metric: str) -> float | None:
        """Mean of the metric over the seeds; None unless every seed has a finite value."""
        values = self._values(metric)
        return statistics.fmean(values) if values else None

    def std(self, metric: str) -> float | None:
        """Sample standard deviation (ddof = 1) over the seeds; None for fewer than two, or if a value is missing."""
        values = self._values(metric)
        return statistics.stdev(values) if len(values) > 1 else None

    def _values(self, metric: str) -> list[float]:
        """All values, or none if one is missing: a mean over the seeds that survived would flatter the trial."""
        series = self.metrics.get(metric, ())
        values = [value for value in series if value is not None]
        return values if len(values) == len(series) else []

    def to_json(self) -> dict[str, Any]:
        """A JSON form for ``--json`` output: every field, the plan in full, mean and std of each metric."""
        return {
            "key": self.key,
            "number": self.number,
            "state": self.state,
            "reason": self.reason,
            "config": dict(self.config),
            "metrics": {
                name: {"mean": self.mean(name), "std": self.std(name), "values": list(values)}
                for name, values in self.metrics.items()
            },
            "plan": self.plan.to_json() if self.plan else None,
            "attempts": self.attempts,
            "seconds": self.seconds,
            "epsilon": {name: interval.to_json() for name, interval in self.epsilon.items()},
            "measured_on": self.measured_on,
            "final": self.final,
        }


def finite(value: Any) -> float | None:
    """The value as a float, or None if it is missing, NaN, infinite or no number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def fold(events: Iterable[Mapping[str, Any]], plan_of: Callable[[str, str], Plan | None]) -> dict[str, TrialRecord]:
    """The records that the events add up to, in the order of the trials' numbers.

    Args:
        events: in the order in which they were written.
        plan_of: (trial key, plan digest) -> the trial's plan, or None if there is none.

    Raises:
        CorruptFile: an event lacks a field, has a value that breaks its rule, or speaks of a trial that was never
            proposed; the event's position (from 1) and the event are named.
    """
    records: dict[str, TrialRecord] = {}
    for position, event in enumerate(events, start=1):
        try:
            _apply(records, event, plan_of)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            # InvalidValue is a ValueError, UnknownName a KeyError; a bare KeyError is a field or trial that is missing.
            what = f"missing {error}" if type(error) is KeyError else str(error)
            raise CorruptFile(f"journal event {position} cannot be understood ({what}): {dict(event)!r}") from error
    return dict(sorted(records.items(), key=lambda item: (item[1].number, item[0])))


def _apply(
    records: dict[str, TrialRecord], event: Mapping[str, Any], plan_of: Callable[[str, str], Plan | None]
) -> None:
    kind = event["event"]
    if kind == "proposed":
        key, digest = event["key"], event.get("plan")
        plan = plan_of(key, digest) if digest else None
        records[key] = TrialRecord(
            key=key,
            number=event["number"],
            state="proposed",
            config=event["config"],
            plan=plan,
            holdout_plan=event.get("holdout_plan"),
            final=event.get("final") is True,
        )
    elif kind == "infeasible":
        key = event["key"]
        records[key] = TrialRecord(
            key=key, number=event["number"], state="infeasible", config=event["config"], reason=event["reason"]
        )
    elif kind == "started":
        record = records[event["key"]]
        attempt = _validate.integer("attempt", event.get("attempt", record.attempts + 1), low=1)
        # A trial that is started again after it had finished has no result any more, but its attempts count.
        records[record.key] = replace(
            record,
            state="running",
            reason=None,
            attempts=max(attempt, record.attempts + 1),
            metrics={},
            seconds=None,
            heads={},
            holdout_heads={},
        )
    elif kind == "finished":
        record = records[event["key"]]
        if event["state"] not in FINISHED:
            raise InvalidValue("state", event["state"], f"must be one of {sorted(FINISHED)}", "Repair the event.")
        intervals = {name: Interval.from_json(value) for name, value in (event.get("epsilon") or {}).items()}
        records[record.key] = replace(
            record,
            state=event["state"],
            reason=event.get("reason"),
            metrics={name: tuple(values) for name, values in (event.get("metrics") or {}).items()},
            seconds=finite(event.get("seconds")),
            epsilon=intervals,
            measured_on=event.get("measured_on") or record.measured_on,
            heads=event.get("heads") or {},
            holdout_heads=event.get("holdout_heads") or {},
        )
