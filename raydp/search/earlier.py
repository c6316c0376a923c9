"""Earlier searches that a search goes on from: what is kept of them, and what they have already spent.

A search with ``after`` chooses its trials by the results of earlier ones, so what those spent on the same people is
part of what it costs. At its start it copies from each of them what a reader needs to compute that again: the
definition, the journal, configs, plans and ledgers, into ``earlier/<id>/``, which is a run directory that can be read,
and has neither keys nor checkpoints. One event of the journal, ``carried``, names the copies and the digest at which
each one's journal stood. So the spending stands when the earlier directories are gone, and a changed copy is found.

What those copied had carried themselves is carried as well; a search that is reached over several ways counts once, by
its id. How the copies come about: :mod:`raydp.search.carrying`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydp.errors import CorruptFile
from raydp.privacy.ledger import Ledger
from raydp.privacy.plan import Plan
from raydp.search.holdout import LEDGER, PLAN
from raydp.search.records import TrialRecord
from raydp.search.run_directory import DEFINITION, EARLIER, JOURNAL, RunDirectory
from raydp.search.spending import Carried, Composition

EVENT = "carried"
#: What is copied of an earlier run directory: patterns below it.
COPIED = (
    DEFINITION,
    JOURNAL,
    "trials/*/config.json",
    "trials/*/plan.json",
    f"trials/*/{PLAN}",
    "trials/*/seed-*/ledger*.jsonl",
    "trials/*/seed-*/holdout-ledger*.jsonl",
)


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """One earlier search whose results a search was told.

    Attributes:
        id, name: of the earlier search.
        path: where its run directory was.
        direct: the definition names it; else another earlier search brought it along.
        counted: its spending is added, for it ran on the same people's data, or may have.
        why: it is counted or is not.
        members: the private data are the same family, so that its run i is charged to member i alone.
        holdout: what it released of a private hold-out is added too.
        events, head: how many lines of its journal were taken over, and the digest of the last one.
        directory: the copy.
    """

    id: str
    name: str
    path: str
    direct: bool
    counted: bool
    why: str
    members: bool
    holdout: bool
    events: int
    head: str | None
    directory: RunDirectory = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """What the journal keeps: everything but the copy."""
        return {name: getattr(self, name) for name in _WRITTEN}

    @property
    def definition(self) -> dict[str, Any]:
        """The definition of the earlier search."""
        return self.directory.definition

    def spent(self) -> list[tuple[int, Composition]]:
        """(position of the seed, what was spent) of every run that is charged to people of the training."""
        return [(seed, spent) for _, seed, spent in spendings(self.directory)]

    def released_of_holdout(self) -> list[Composition]:
        """What each run released of a private hold-out through noise."""
        return [spent for _, _, spent in spendings(self.directory, holdout=True)]


_WRITTEN = tuple(name for name in Earlier.__dataclass_fields__ if name != "directory")


def earlier_of(directory: RunDirectory) -> tuple[Earlier, ...]:
    """The earlier searches of a run directory, as its journal names them; none for a search that goes on from none.

    Raises:
        CorruptFile: the journal, or a copy's definition, is damaged or missing.
    """
    event = next((event for event in directory.events() if event["event"] == EVENT), None)
    if event is None:
        return ()
    try:
        return tuple(_read(directory, entry) for entry in event["searches"])
    except (KeyError, TypeError) as error:
        raise CorruptFile(f"{directory.path}: its journal's event {EVENT!r} is damaged ({error}).") from error


def _read(directory: RunDirectory, entry: Mapping[str, Any]) -> Earlier:
    path = copy_of(directory, entry["id"])
    if not (path / "raydp.json").is_file():
        raise CorruptFile(
            f"{path} is gone, and with it what the earlier search {entry['name']!r} spent. Restore the directory."
        )
    return Earlier(**{name: entry[name] for name in _WRITTEN}, directory=RunDirectory.open(path))


def copy_of(directory: RunDirectory, identity: object) -> Path:
    """Where the copy of the earlier search of that id lies. Raises CorruptFile."""
    if not isinstance(identity, str) or not re.fullmatch("[0-9a-f]{8,64}", identity):
        raise CorruptFile(f"{directory.path}: {identity!r} is no id of an earlier search.")
    return directory.path / EARLIER / identity


def carried(searches: Sequence[Earlier]) -> Carried:
    """What is to be added to a search's own runs: (member, or None for everybody; what was spent)."""
    return tuple(
        (seed if each.members else None, spent) for each in searches if each.counted for seed, spent in each.spent()
    )


def carried_of_holdout(searches: Sequence[Earlier]) -> tuple[Composition, ...]:
    """What is to be added to a search's own releases of a private hold-out."""
    return tuple(spent for each in searches if each.holdout for spent in each.released_of_holdout())


def spendings(directory: RunDirectory, *, holdout: bool = False) -> Iterator[tuple[TrialRecord, int, Composition]]:
    """(trial, position of the seed, what was spent at most) of every run that an earlier search may have made.

    Of a finished trial: its ledgers, if each is the one with which the trial ended. A trial that was not finished when
    the journal was read can still execute all of its plan, and counts as that, once for each seed; so does a run whose
    ledger is missing, damaged or another one.

    Raises:
        CorruptFile: the journal or a plan is damaged or missing.
    """
    seeds = int(directory.definition.get("seeds", 1))
    for record in directory.records().values():
        if record.state == "infeasible":
            continue
        plan = _plan(directory, record, holdout=holdout)
        if plan is None:
            continue
        heads = record.holdout_heads if holdout else record.heads
        name = LEDGER if holdout else "ledger.jsonl"
        for seed in range(1 if record.final else seeds):
            spent = plan.mechanisms
            if record.finished:
                path = directory.run_path(record.key, seed) / name
                spent = _executed(path, heads, str(seed), plan, complete=record.state == "complete")
            yield record, seed, spent


def _plan(directory: RunDirectory, record: TrialRecord, *, holdout: bool) -> Plan | None:
    if not holdout:
        if record.plan is None:
            raise CorruptFile(f"{directory.path}: there is no plan of {record.key}, which bounds what it spent.")
        return record.plan
    if record.holdout_plan is None:
        return None
    plan = directory.plan(record.key, PLAN)
    if plan is None or plan.digest != record.holdout_plan:
        raise CorruptFile(f"{directory.path}: {PLAN} of {record.key} is not the one in the journal, or is gone.")
    return plan


def _executed(path: Path, heads: Mapping[str, str | None], seed: str, plan: Plan, *, complete: bool) -> Composition:
    """What the run of a finished trial executed; its whole plan where that is not certain."""
    if seed not in heads and not path.exists():  # the trial ended before this run began
        return plan.mechanisms if complete else ()
    try:
        ledger = Ledger.read(path)
    except (CorruptFile, OSError):
        return plan.mechanisms
    return ledger.mechanisms if ledger.head == heads.get(seed) else plan.mechanisms


__all__ = ["COPIED", "EVENT", "Earlier", "carried", "carried_of_holdout", "copy_of", "earlier_of", "spendings"]
