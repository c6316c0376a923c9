"""Verification of what a search carries of earlier ones: copies against journal, plans, ledgers and originals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydp import data
from raydp.errors import CorruptFile, InvalidValue, LedgerRefusal, RaydpError
from raydp.privacy.ledger import Ledger
from raydp.privacy.plan import Plan
from raydp.search import carrying
from raydp.search.earlier import EVENT, Earlier, earlier_of
from raydp.search.holdout import LEDGER, PLAN
from raydp.search.records import TrialRecord
from raydp.search.run_directory import RunDirectory


def verify_earlier(opened: RunDirectory, problems: list[str]) -> tuple[tuple[Earlier, ...], list[dict[str, Any]]]:
    """Check every earlier search that the run directory carries; what concerns no single one goes to ``problems``.

    Returns:
        The earlier searches, and for each ``{"id", "name", "path", "counted", "why", "events", "head", "ok",
        "problems": [str], "original": str, "people": str}``: ``original`` says whether the earlier run directory was
        held against the copy (``rechecked``), went on since, or is gone; ``people``, whether the data of one that is
        not counted were compared again. An entry is not ok if its copy is damaged, is not the one whose digest the
        journal holds, lacks a ledger, has one with which no trial ended or that its plan does not allow, or names
        earlier searches that are not carried; if another journal stands at its place; or if its data share examples
        that the entry denies.
    """
    wanted = [str(path) for path in opened.definition.get("after") or ()]
    try:
        searches = earlier_of(opened)
        begun = any(event["event"] in ("proposed", "infeasible") for event in opened.events())
    except CorruptFile as error:
        problems.append(f"earlier searches: {error}")
        return (), []
    named = {each.path for each in searches if each.direct}
    if begun and (lacking := [path for path in wanted if path not in named]):
        problems.append(f"the search goes on from {', '.join(lacking)}, and its journal does not say what that spent")
    if foreign := sorted(named - set(wanted)):
        problems.append(f"the journal carries {', '.join(foreign)}, and the definition does not go on from it")
    known = {each.id for each in searches}
    return searches, [_entry(opened, each, known) for each in searches]


def _entry(opened: RunDirectory, each: Earlier, known: set[str]) -> dict[str, Any]:
    found: list[str] = []
    original = people = "not checked"
    try:
        chained = each.directory.chained_events()
        records = each.directory.records()
    except CorruptFile as error:
        found.append(str(error))
    else:
        head = chained[-1][1] if chained else None
        if each.directory.header["id"] != each.id or len(chained) != each.events or head != each.head:
            found.append("its copy is not the one that was taken over: id, length or digest of the journal differ")
        found += [problem for record in records.values() for problem in _trial(each.directory, record)]
        brought = [entry["id"] for event, _ in chained if event["event"] == EVENT for entry in event["searches"]]
        if missing := sorted(set(brought) - known):
            found.append(f"it went on from {', '.join(missing)} itself, and that is not carried")
        original, problem = _original(each, [head for _, head in chained])
        found += [problem] if problem else []
        people, problem = _people(opened, each)
        found += [problem] if problem else []
    return {
        **{name: getattr(each, name) for name in ("id", "name", "path", "counted", "why", "events", "head")},
        "ok": not found,
        "problems": found,
        "original": original,
        "people": people,
    }


def _trial(copy: RunDirectory, record: TrialRecord) -> list[str]:
    """What is wrong with the ledgers of one trial. Of one that was not finished, none is believed."""
    if record.state == "infeasible":
        return []
    if record.plan is None:
        return [f"{record.key}: its plan is gone"]
    if not record.finished:
        return []
    found = _ledgers(copy, record, record.heads, "ledger.jsonl", record.plan)
    if record.holdout_plan is not None:
        try:
            plan = copy.plan(record.key, PLAN)
        except CorruptFile as error:
            return [*found, str(error)]
        if plan is None or plan.digest != record.holdout_plan:
            return [*found, f"{record.key}: {PLAN} is gone, or is not the one in the journal"]
        found += _ledgers(copy, record, record.holdout_heads, LEDGER, plan)
    return found


def _ledgers(
    copy: RunDirectory, record: TrialRecord, heads: Mapping[str, str | None], file: str, plan: Plan
) -> list[str]:
    found = []
    there = {str(seed): path / file for seed, path in copy.runs(record.key) if (path / file).exists()}
    if record.state == "complete":
        missing = {"0"} if record.final else {str(seed) for seed in range(int(copy.definition.get("seeds", 1)))}
    else:
        missing = set()
    for seed in sorted({*heads, *there, *missing}):
        name = f"{record.key} seed {seed}"
        if seed not in there:
            found.append(f"{name}: {file} is gone")
            continue
        try:
            ledger = Ledger.read(there[seed])
            ledger.check(plan)
        except (CorruptFile, LedgerRefusal) as error:
            found.append(f"{name}: {error}")
            continue
        if ledger.head != heads.get(seed):
            found.append(f"{name}: {file} is not the one with which the trial ended")
    return found


def _original(each: Earlier, heads: Sequence[str]) -> tuple[str, str | None]:
    """Whether the earlier directory still says what was taken over from it."""
    try:
        there = RunDirectory.open(each.path)
        now = [head for _, head in there.chained_events()]
    except InvalidValue:
        return "gone", None
    except CorruptFile as error:
        return "damaged", f"its original is damaged: {error}"
    if there.header["id"] != each.id:
        return "gone; another search is there", None
    if now[: len(heads)] != list(heads):
        return "differs", f"{each.path} holds another journal than the one that was taken over"
    more = len(now) - len(heads)
    return f"rechecked; it went on by {more} lines since" if more else "rechecked", None


def _people(opened: RunDirectory, each: Earlier) -> tuple[str, str | None]:
    """Whether the data of a search that is not counted are still other people's, where they are at hand."""
    if each.counted:
        return "counted", None
    source, definition = str(opened.definition.get("data")), each.definition
    theirs = str(definition.get("data"))
    if not all(data.is_named(one) or Path(one).exists() for one in (source, theirs)):
        return "the data are not at hand", None
    try:
        limit, seeds = opened.definition.get("data_limit"), int(opened.definition.get("seeds", 1))
        shared = carrying.shares(source, limit, seeds, definition)
    except (RaydpError, OSError) as error:
        return f"the data cannot be read ({error})", None
    if shared:
        return "compared", f"it is called other people's, and {theirs} shares examples with {source}"
    return "compared" if shared is False else "cannot be compared; declared public", None


__all__ = ["verify_earlier"]
