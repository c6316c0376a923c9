"""Exceptions that people see. Each message names the field, the value, the rule and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


class RaydpError(Exception):
    """Base class of everything that raydp raises on purpose."""


class InvalidValue(RaydpError, ValueError):
    """A field holds a value that breaks its rule.

    Attributes:
        field: the name of the field as the user wrote it.
        value: the refused value.
        rule: what the field must satisfy.
        remedy: what to write instead.
    """

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        self.field, self.value, self.rule, self.remedy = field, value, rule, remedy
        super().__init__(f"{field} = {value!r}: {rule}. {remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, object, str, str]]:
        return type(self), (self.field, self.value, self.rule, self.remedy)


class UnknownName(RaydpError, KeyError):
    """A name (method, data set, hyperparameter, …) that does not exist; near names are suggested."""

    def __init__(self, field: str, value: str, known: Iterable[str]) -> None:
        self.field, self.value, self.known = field, value, tuple(sorted(known))
        near = difflib.get_close_matches(str(value), self.known, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(self.known)}."
        self.message = f"{field} = {value!r} does not exist. {hint}"
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type, tuple[str, str, tuple[str, ...]]]:
        return type(self), (self.field, self.value, self.known)


class Infeasible(RaydpError):
    """No noise multiplier makes this point of the space spend its budget.

    Attributes:
        phase: the phase that is left without a solution.
        reason: one sentence.
        nearest: the nearest split (share by phase name) that would work, or None if there is none.
    """

    def __init__(self, phase: str, reason: str, nearest: dict[str, float] | None = None) -> None:
        self.phase, self.reason, self.nearest = phase, reason, nearest
        hint = ""
        if nearest:
            hint = " Nearest split that works: " + ", ".join(f"{k} = {v:.4g}" for k, v in nearest.items()) + "."
        super().__init__(f"phase {phase!r}: {reason}.{hint}")

    def __reduce__(self) -> tuple[type, tuple[str, str, dict[str, float] | None]]:
        return type(self), (self.phase, self.reason, self.nearest)


class LedgerRefusal(RaydpError):
    """The Plan has no room for the query that was about to run; nothing was spent."""


class CorruptFile(RaydpError):
    """A file that raydp reads (data, ledger, checkpoint, journal) is damaged or of another layout."""


class Diverged(RaydpError):
    """Training left the finite numbers. The trial fails with this reason; the search goes on."""


class WorkerFailed(RaydpError):
    """Another worker of this run ended with an error, so this one ends as well.

    Attributes:
        worker: rank of the one that failed; the lowest, if there are several.
        kind: name of the type of its error.
        reason: what that error says, where it can be told; else empty.
    """

    def __init__(self, worker: int, kind: str, reason: str) -> None:
        self.worker, self.kind, self.reason = worker, kind, reason
        super().__init__(f"worker {worker} ended with {kind}{f': {reason}' if reason else ''}")

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (self.worker, self.kind, self.reason)


class MemoryExhausted(RaydpError):
    """A single example does not fit into memory. Nothing private is in the message."""


class WorkerLost(RaydpError):
    """Another worker of this run is gone without a word: killed, or its machine is lost. The run can be resumed."""


class MissingPackage(RaydpError, ImportError):
    """An optional package is not installed.

    Attributes:
        package: its name.
        purpose: what it is needed for, in the infinitive.
        extra: the extra of this distribution that has it.
    """

    def __init__(self, package: str, *, purpose: str, extra: str) -> None:
        self.package, self.purpose, self.extra = package, purpose, extra
        super().__init__(f"{package} is not installed, and is needed to {purpose}. Run pip install '.[{extra}]'.")

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[type, str, dict[str, str]]]:
        return _with_keywords, (type(self), self.package, {"purpose": self.purpose, "extra": self.extra})


def _with_keywords(kind: Callable[..., Exception], first: str, rest: dict[str, str]) -> Exception:
    return kind(first, **rest)
