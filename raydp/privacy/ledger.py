"""The ledger: an append-only record of the private queries that really ran.

A ledger is a text file of JSON lines. The first line is the header, ``{"layout": 2, "plan": digest, "delta": …,
"adjacency": …}``; each further line is one :class:`LedgerEntry`, a run of equal steps of one phase. Every line has a
``chain`` as well, a digest of itself and of the lines before it (:mod:`raydp.privacy.chain`), so that an edited, lost
or moved line is noticed. It holds nothing secret and nothing about the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue, LedgerRefusal, RaydpError
from raydp.privacy import chain
from raydp.privacy.budget import ADJACENCIES, Adjacency
from raydp.privacy.mechanism import Mechanism, Phase
from raydp.privacy.plan import Interval, Plan

LAYOUT = 2
_START = chain.start("raydp ledger")
_LOCK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """``steps`` equal steps of one phase: ``first_step``, ``first_step + 1``, …

    Attributes:
        noise_multiplier, sample_rate, clip_norm: sigma, q and C of each of these steps.
    """

    phase: str
    first_step: int
    steps: int
    noise_multiplier: float
    sample_rate: float
    clip_norm: float

    def __post_init__(self) -> None:
        _validate.name("phase", self.phase)
        object.__setattr__(self, "first_step", _validate.integer("first_step", self.first_step, low=0))
        object.__setattr__(self, "clip_norm", _validate.positive("clip_norm", self.clip_norm))
        mechanism = self.mechanism  # checks the other three
        for key in ("noise_multiplier", "sample_rate", "steps"):
            object.__setattr__(self, key, getattr(mechanism, key))

    @property
    def mechanism(self) -> Mechanism:
        return Mechanism(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate, steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What ran, and the plan under which it ran.

    Attributes:
        plan_digest: :attr:`raydp.privacy.plan.Plan.digest` of that plan.
        delta, adjacency: for which :meth:`epsilon` is stated.
        entries: in the order in which they ran; the steps of one phase are 0, 1, … without a gap.
        head: ``chain`` of the last line of the file that it was read from, if it was: to tell whether that file is
            still the same.
    """

    plan_digest: str
    delta: float
    adjacency: Adjacency
    entries: tuple[LedgerEntry, ...]
    head: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", _validate.between("delta", self.delta, 0, 1, low_open=True, high_open=True))
        _validate.one_of("adjacency", self.adjacency, ADJACENCIES)
        counts: dict[str, int] = {}
        for entry in self.entries:
            _expect_first_step(entry, counts.get(entry.phase, 0))
            counts[entry.phase] = entry.first_step + entry.steps

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read a ledger file.

        A last line without its newline is what a crash leaves in the middle of a write: nothing that depends on it
        was ever visible, so it is ignored.

        Raises:
            CorruptFile: the file cannot be read, or a line of it is damaged; the message names the line.
        """
        path = Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CorruptFile(f"The ledger {path} cannot be read: {error.strerror}.") from error
        return _parse(path, content)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """What accountants compose: neighbouring entries of one phase and equal parameters merged."""
        merged: list[LedgerEntry] = []
        for entry in self.entries:
            if merged and entry == dataclasses.replace(
                merged[-1], first_step=merged[-1].first_step + merged[-1].steps, steps=entry.steps
            ):
                merged[-1] = dataclasses.replace(merged[-1], steps=merged[-1].steps + entry.steps)
            else:
                merged.append(entry)
        return tuple(entry.mechanism for entry in merged)

    def steps(self, phase: str) -> int:
        """How many steps of the phase ran (0 for a phase that did not begin)."""
        return sum(entry.steps for entry in self.entries if entry.phase == phase)

    def epsilon(self, accountant: str = "pld") -> Interval:
        """Certified bounds of epsilon of everything recorded, at the ledger's delta and adjacency."""
        # Here, because the accountants' libraries take seconds to import and a trial only writes its ledger.
        from raydp.privacy import accountants

        return accountants.epsilon(self.mechanisms, delta=self.delta, adjacency=self.adjacency, accountant=accountant)

    def check(self, plan: Plan) -> None:
        """Check that everything recorded is something that the plan allows.

        Raises:
            LedgerRefusal: another plan, delta or adjacency; a phase or a parameter that the plan lacks; a step
                too many; or a phase that began before the one before it was complete.
        """
        if (self.plan_digest, self.delta, self.adjacency) != (plan.digest, plan.budget.delta, plan.budget.adjacency):
            raise LedgerRefusal(
                f"The ledger is of plan {self.plan_digest[:12]} (delta = {self.delta:g}, {self.adjacency}), not of "
                f"plan {plan.digest[:12]} (delta = {plan.budget.delta:g}, {plan.budget.adjacency}). "
                "Give each run its own ledger."
            )
        counts: dict[str, int] = {}
        for entry in self.entries:
            phase = _admit(plan, counts, entry.phase, entry.first_step + entry.steps - 1)
            for key in ("noise_multiplier", "sample_rate", "clip_norm"):
                if getattr(entry, key) != getattr(phase, key):
                    raise LedgerRefusal(
                        f"The ledger records {entry.phase}.{key} = {getattr(entry, key)!r} where the plan says "
                        f"{getattr(phase, key)!r}: what ran is not what was certified."
                    )
            counts[entry.phase] = entry.first_step + entry.steps


class LedgerRecorder:
    """Counts the steps of one run of a plan, and refuses what the plan has no room for. It writes nothing.

    All workers of a run but the first have one that follows the first one's :class:`LedgerWriter`: each refuses a step
    whatever the others do, before it reads an example.

    Args:
        path: of the ledger's file.
        plan: that is run.
        existing: what ran before.
    """

    def __init__(self, path: Path, plan: Plan, existing: Ledger) -> None:
        self.path = path
        self.plan = plan
        existing.check(plan)
        self._entries = list(existing.entries)
        self._counts = {phase.name: existing.steps(phase.name) for phase in plan.phases}
        self._pending: list[LedgerEntry] = []

    @property
    def ledger(self) -> Ledger:
        """Everything recorded so far, durable or not yet."""
        return Ledger(
            plan_digest=self.plan.digest,
            delta=self.plan.budget.delta,
            adjacency=self.plan.budget.adjacency,
            entries=(*self._entries, *self._pending),
        )

    def record(self, phase: str, step: int) -> None:
        """Note that a step is about to run. A step that is recorded already is a replay and counts once.

        Raises:
            LedgerRefusal: the plan has no such phase or step, or an earlier step is missing; nothing is recorded.
        """
        step = _validate.integer("step", step, low=0)
        self._require_open()
        planned = _admit(self.plan, self._counts, phase, step)
        count = self._counts[phase]
        if step < count:
            return
        if step > count:
            raise LedgerRefusal(
                f"Step {step} of phase {phase!r} follows step {count - 1}: steps run in order, 0, 1, …; "
                f"next is step {count}. Nothing was recorded."
            )
        self._counts[phase] = step + 1
        if self._pending and self._pending[-1].phase == phase:
            self._pending[-1] = dataclasses.replace(self._pending[-1], steps=self._pending[-1].steps + 1)
        else:
            self._pending.append(
                LedgerEntry(
                    phase=phase,
                    first_step=step,
                    steps=1,
                    noise_multiplier=planned.noise_multiplier,
                    sample_rate=planned.sample_rate,
                    clip_norm=planned.clip_norm,
                )
            )

    def _require_open(self) -> None:
        """Raises LedgerRefusal: no step may run any more."""


class LedgerWriter(LedgerRecorder):
    """Appends to the ledger of one run of a plan. A context manager; one writer a file at a time.

    ``record`` comes before the query reads data and refuses what the plan has no room for; ``commit`` makes the
    recorded steps durable and comes before anything that depends on them is visible. A crash in between loses only
    steps of which nothing was visible, and their replay draws the same batch and the same noise.

    Leaving the ``with`` block commits, after an exception as well: that training failed, and where, is an output of
    the steps too. If that commit fails, its failure replaces the exception of the block, which stays its context: the
    outcome must not be told while the ledger lacks the steps that led to it.

    Raises:
        LedgerRefusal: the file is the ledger of another plan, or another process is writing to it.
        CorruptFile: the file is damaged before its last line.
        RaydpError: the file cannot be written.

    >>> import tempfile
    >>> from raydp.privacy import Budget, Ledger, LedgerWriter, PhaseSpec, calibrate
    >>> spec = PhaseSpec(name="train", steps=2, batch_size=50, population=500, clip_norm=1.0)
    >>> plan = calibrate(budget=Budget(epsilon=1.0, delta=1e-5), phases=[spec], cross_check=())
    >>> path = f"{tempfile.mkdtemp()}/ledger.jsonl"
    >>> with LedgerWriter(path, plan) as ledger:
    ...     for step in range(2):
    ...         ledger.record("train", step)
    >>> Ledger.read(path).epsilon().upper == plan.epsilon.upper
    True
    >>> with LedgerWriter(path, plan) as ledger:
    ...     ledger.record("train", 2)
    Traceback (most recent call last):
        ...
    raydp.errors.LedgerRefusal: Phase 'train' has 2 steps in its plan; step 2 (counted from 0) would overspend. ...
    """

    def __init__(self, path: str | os.PathLike[str], plan: Plan) -> None:
        path = Path(path)
        self.path = path
        header = {
            "layout": LAYOUT,
            "plan": plan.digest,
            "delta": plan.budget.delta,
            "adjacency": plan.budget.adjacency,
        }
        with _explained(self.path):
            if not self.path.exists():
                _create(self.path, chain.link(header, _START)[0])
            # A file object, because it closes itself when a trial process forgets it; written through os.write.
            self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115
        try:
            _lock(self.path, self._file.fileno())
            content = self._file.readall()
            existing = _parse(self.path, content)
            super().__init__(path, plan, existing)
            self._size = content.rfind(b"\n") + 1
            if self._size < len(content):
                self._cut()  # the torn line of a crash
        except BaseException:
            self._file.close()
            raise
        self._head = existing.head or _START

    def commit(self) -> None:
        """Write the pending steps, one line a phase, and return when they are durable.

        Raises:
            RaydpError: the disk is full or fails. The file is cut back to what it was, the steps stay pending, and
                nothing that depends on them may be released.
        """
        self._require_open()
        if not self._pending:
            return
        lines, head = b"", self._head
        for entry in self._pending:
            line, head = chain.link(dataclasses.asdict(entry), head)
            lines += line
        with _explained(self.path):
            try:
                _write(self._file.fileno(), lines)
                os.fsync(self._file.fileno())
            except OSError:
                self._cut()
                raise
        self._size, self._head = self._size + len(lines), head
        self._entries += self._pending
        self._pending = []

    def close(self) -> None:
        """Commit and close. Closing twice is fine."""
        if not self._file.closed:
            try:
                self.commit()
            finally:
                self._file.close()  # gives the lock back as well

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RaydpError as failure:
            if error is None or isinstance(error, Exception):
                raise
            error.add_note(f"The ledger could not be completed either: {failure}")  # an interrupt tells no outcome

    def _require_open(self) -> None:
        if self._file.closed:
            raise LedgerRefusal(f"The ledger {self.path} is closed: no step may run. Open a new LedgerWriter.")

    def _cut(self) -> None:
        """Cut the file back to its last whole line; a writer that cannot do so writes no more."""
        try:
            os.ftruncate(self._file.fileno(), self._size)
            os.lseek(self._file.fileno(), self._size, os.SEEK_SET)
            os.fsync(self._file.fileno())
        except OSError:
            self._file.close()
            raise


def _admit(plan: Plan, counts: dict[str, int], name: str, step: int) -> Phase:
    """The phase of that name, if the plan has room for this step of it after the steps counted."""
    for phase in plan.phases:
        if phase.name == name:
            if step >= phase.steps:
                raise LedgerRefusal(
                    f"Phase {name!r} has {phase.steps} steps in its plan; step {step} (counted from 0) would "
                    "overspend. Nothing was recorded."
                )
            return phase
        if counts.get(phase.name, 0) < phase.steps:
            if all(other.name != name for other in plan.phases):
                break
            raise LedgerRefusal(
                f"Phase {name!r} comes after phase {phase.name!r}, of which only {counts.get(phase.name, 0)} of "
                f"{phase.steps} steps have run. Nothing was recorded."
            )
    names = ", ".join(phase.name for phase in plan.phases)
    raise LedgerRefusal(f"The plan has no phase {name!r}; it has: {names}. Nothing was recorded.")


def _expect_first_step(entry: LedgerEntry, count: int) -> None:
    if entry.first_step != count:
        raise InvalidValue(
            "first_step",
            entry.first_step,
            f"must be {count}, the step that follows the entries of phase {entry.phase!r} before it",
            "The ledger lost or repeats a line.",
        )


def _parse(path: Path, content: bytes) -> Ledger:
    lines = content.split(b"\n")[:-1]  # what follows the last newline is torn
    if not lines:
        raise CorruptFile(
            f"The ledger {path} has no header. A ledger is created with it, so the file was damaged later; "
            "what ran under it is unknown, so do not delete it and go on, but count its whole plan as spent."
        )
    _require_layout(path, lines[0])
    fields = {"layout": int, "plan": str, "delta": float, "adjacency": str}
    header, head = _decode(path, 1, lines[0], fields, _START)
    types: dict[str, type] = {field: object for field in LedgerEntry.__dataclass_fields__}
    entries: list[LedgerEntry] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=2):
        record, head = _decode(path, number, line, types, head)
        try:
            entry = LedgerEntry(**record)
            _expect_first_step(entry, counts.get(entry.phase, 0))
        except InvalidValue as error:
            raise CorruptFile(f"Line {number} of the ledger {path} is damaged: {error}") from error
        counts[entry.phase] = entry.first_step + entry.steps
        entries.append(entry)
    try:
        return Ledger(
            plan_digest=header["plan"],
            delta=header["delta"],
            adjacency=header["adjacency"],
            entries=tuple(entries),
            head=head,
        )
    except RaydpError as error:
        raise CorruptFile(f"Line 1 of the ledger {path} is damaged: {error}") from error


def _require_layout(path: Path, line: bytes) -> None:
    """Before anything else is asked of the header: another layout is no damage."""
    try:
        layout = _validate.json_object(line)["layout"]
    except (ValueError, KeyError):
        return  # damage, which is named where the line is decoded
    if layout != LAYOUT:
        raise CorruptFile(
            f"The ledger {path} has layout {layout!r}, this raydp reads layout {LAYOUT}. "
            "Read it with the version that wrote it."
        )


def _decode(
    path: Path, number: int, line: bytes, types: Mapping[str, type], previous: str
) -> tuple[dict[str, Any], str]:
    """The record of a line, and the line's digest in the chain."""
    try:
        record, head = chain.follow(line, previous)
    except chain.BrokenChain as error:
        raise CorruptFile(f"Line {number} of the ledger {path} is not the one that was written: {error}.") from error
    except ValueError as error:
        raise CorruptFile(f"Line {number} of the ledger {path} is not JSON: {error}") from error
    if set(record) != set(types):
        raise CorruptFile(f"Line {number} of the ledger {path} must be a JSON object with {', '.join(types)}.")
    for key, kind in types.items():
        if not isinstance(record[key], kind):
            raise CorruptFile(f"Line {number} of the ledger {path}: {key} = {record[key]!r} has the wrong type.")
    return record, head


def _create(path: Path, header: bytes) -> None:
    """Create the file with its header at once: a ledger without a header is damaged, never merely young."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write(descriptor, header)
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(scratch, path)  # unlike a rename, a link never replaces the ledger of a faster process
    finally:
        os.close(descriptor)
        os.unlink(scratch)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write(descriptor: int, content: bytes) -> None:
    """One write call; a short one (a disk about to be full) is an error, not a reason to go on."""
    written = os.write(descriptor, content)
    if written != len(content):
        raise OSError(errno.ENOSPC, f"only {written} of {len(content)} bytes were written")


def _lock(path: Path, descriptor: int) -> None:
    """Exclusive for the life of the open file. Waits a little: a killed process may still be on its way out."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerRefusal(
                    f"The ledger {path} is being written by another process: the run is still going on somewhere. "
                    "Wait for it or end it."
                ) from None
            time.sleep(0.1)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal into an error that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = (
            "Free space on that disk and resume the run"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Make its directory exist and writable, and resume the run"
        )
        raise RaydpError(
            f"The ledger {path} cannot be written: {error.strerror or error}. Nothing of the steps not yet in it was "
            f"released. {remedy}: those steps are replayed with the same batches and the same noise."
        ) from error
