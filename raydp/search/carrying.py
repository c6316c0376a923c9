"""Going on from earlier searches: which are meant, whose people they spent on, what is copied, what is learned.

Whether an earlier search spent on the same people is decided when the new one begins, and never by an edited name:

* the same source of data: counted, without a look at the data;
* another source: counted if a single private example stands in both (a file with one more row has another fingerprint,
  and the same people), or if the earlier data cannot be read. Otherwise it is other people's, and only named;
* where contents cannot be compared (inputs of other shapes, two descriptions of tables): counted, unless the earlier
  search was declared to run on public data.

That no example is shared is a fact about private data that is published without noise, as is every refusal of data that
overlap; fingerprints are compared and never written down.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raydp import data
from raydp.data import Dataset
from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.privacy import selection
from raydp.privacy.selection import Public, RandomStopping
from raydp.search.definition import Search
from raydp.search.earlier import COPIED, EVENT, Earlier, copy_of, earlier_of, spendings
from raydp.search.records import TrialRecord
from raydp.search.run_directory import JOURNAL, RunDirectory
from raydp.search.spending import is_family

#: Samplers that learn from what they are told. The others carry the spending all the same.
LEARNING = ("tpe", "gp")


def found(search: Search) -> tuple[Earlier, ...]:
    """The earlier searches of a definition and those that they went on from, each once; nothing is written.

    Raises:
        InvalidValue: a directory is no run directory, or its spending cannot be composed with this search's.
        CorruptFile: one of them is damaged.
    """
    by_id: dict[str, tuple[RunDirectory, str, bool]] = {}
    for path in search.after_directories:
        try:
            opened = RunDirectory.open(path)
        except InvalidValue as error:
            raise InvalidValue("after", path, "must be the run directory of an earlier search", error.remedy) from error
        _admit(by_id, opened, path, direct=True)
        for each in earlier_of(opened):
            _admit(by_id, each.directory, each.path, direct=False)
    return tuple(_judged(search, opened, path, direct=direct) for opened, path, direct in by_id.values())


def _admit(by_id: dict[str, tuple[RunDirectory, str, bool]], opened: RunDirectory, path: str, *, direct: bool) -> None:
    """Take the search in, or of two states of one search the later."""
    identity = str(opened.header["id"])
    if identity in by_id:
        known, known_path, known_direct = by_id[identity]
        ours, theirs = _heads(opened), _heads(known)
        shorter, longer = sorted((ours, theirs), key=len)
        if longer[: len(shorter)] != shorter:
            raise InvalidValue(
                "after",
                [path, known_path],
                "are two copies of one run directory that went different ways, and what both spent cannot be told "
                "apart trial by trial",
                "Go on from one of them.",
            )
        direct = direct or known_direct
        path = path if direct and not known_direct else known_path
        opened = opened if longer is ours else known
    by_id[identity] = opened, path, direct


def _heads(opened: RunDirectory) -> list[str]:
    return [head for _, head in opened.chained_events()]


def _judged(search: Search, opened: RunDirectory, path: str, *, direct: bool) -> Earlier:
    """Whether what it spent is added, and why."""
    definition = opened.definition
    rule = selection.from_json(definition.get("selection") or selection.Composition().to_json())
    if definition.get("insecure_seed") is not None and search.insecure_seed is None:
        raise InvalidValue(
            "after",
            path,
            "drew its noise from a known number (insecure_seed), so its results are not private, and no choice by them "
            "would be",
            "Go on from a search without insecure_seed.",
        )
    counted, why = _same_people(search, definition, declared_public=isinstance(rule, Public))
    if counted and isinstance(rule, RandomStopping):
        raise InvalidValue(
            "after",
            path,
            "released its result under random stopping on the same people: that costs an (epsilon, delta) by a theorem "
            "that is no composition of runs, and cannot be composed with them exactly",
            "Leave it out. Whoever uses its result all the same adds its epsilon and delta to those of this search.",
        )
    if counted and isinstance(search.rule, Public) and not isinstance(rule, Public):
        raise InvalidValue(
            "selection",
            search.rule.rule,
            f"says that nothing private is looked at, and {path} spent on private examples of the same data",
            "Set selection='composition', or leave out after.",
        )
    chained = opened.chained_events()
    return Earlier(
        id=str(opened.header["id"]),
        name=str(definition.get("name")),
        path=path,
        direct=direct,
        counted=counted,
        why=why,
        members=_same_members(search, definition),
        holdout=_same_holdout(search, definition, path),
        events=len(chained),
        head=chained[-1][1] if chained else None,
        directory=opened,
    )


def _same_people(search: Search, definition: Mapping[str, Any], *, declared_public: bool) -> tuple[bool, str]:
    source = str(definition.get("data"))
    if source == search.data_source:
        return True, "it ran on the same data"
    try:
        shared = shares(search.data_source, search.data_limit, search.seeds, definition)
    except (RaydpError, OSError) as error:
        return True, f"its data {source} cannot be read, so that they may be the same people ({error})"
    if shared is None and declared_public:
        return False, f"its data {source} were declared public"
    if shared is None:
        return True, f"its data {source} cannot be compared with the private ones, and may be the same people's"
    if shared:
        return True, f"its data {source} share examples with the private ones"
    return False, f"its data {source} share no example with the private ones"


def shares(source: str, limit: int | None, seeds: int, definition: Mapping[str, Any]) -> bool | None:
    """Whether a private example of the data stands also in those of an earlier definition; None if that is not told.

    Contents tell nothing where inputs have other shapes, or where two descriptions make numbers of a table's columns.

    Raises:
        RaydpError, OSError: one of them cannot be read.
    """
    theirs = str(definition.get("data"))
    if source.endswith(".toml") and theirs.endswith(".toml"):
        return None
    for member in range(int(definition.get("seeds", 1)) if data.is_family(theirs) else 1):
        other = data.load(theirs, limit=definition.get("data_limit"), member=member).private
        for own in range(seeds if data.is_family(source) else 1):
            private = data.load(source, limit=limit, member=own).private
            if private.input_shape != other.input_shape:
                return None
            if private.shares_with(other):
                return True
    return False


def _same_members(search: Search, definition: Mapping[str, Any]) -> bool:
    """Whether run i of both took the same member of one family; otherwise what was spent concerns every member."""
    same = (definition.get("data"), definition.get("data_limit")) == (search.data_source, search.data_limit)
    return same and is_family(definition) and data.is_family(search.data)


def _same_holdout(search: Search, definition: Mapping[str, Any], path: str) -> bool:
    """Whether what was released of a private hold-out concerns people of this search's hold-out.

    Raises:
        InvalidValue: somebody was trained on in one search and is held out in the other, where one of them pays for it.
    """
    theirs, ours = definition.get("holdout_budget") is not None, search.holdout_budget is not None
    if not (theirs or ours):
        return False
    if (definition.get("data"), definition.get("data_limit")) == (search.data_source, search.data_limit):
        return theirs and ours
    try:
        old = data.load(str(definition.get("data")), limit=definition.get("data_limit"))
        new = data.load(search.data, limit=search.data_limit)
    except (RaydpError, OSError) as error:
        raise InvalidValue(
            "after",
            path,
            f"cannot be gone on from with a holdout_budget: its data cannot be read ({error}), so nobody knows who is "
            "in which part",
            "Restore the data, or leave out after.",
        ) from error
    if (theirs and new.private.shared_with(old.holdout)) or (ours and old.private.shared_with(new.holdout)):
        raise InvalidValue(
            "after",
            path,
            "trained on people whom the other search holds out, or the other way round: they would pay from both "
            "budgets, and each is stated alone",
            "Use the same parts in both searches, or leave out after.",
        )
    return theirs and ours and bool(_hashes(old) & _hashes(new))


def _hashes(dataset: Dataset) -> set[bytes]:
    return {hashlib.sha256(one.tobytes()).digest() for one in dataset.holdout.inputs.contiguous().numpy()}


def take_over(search: Search, directory: RunDirectory) -> None:
    """Copy what earlier searches spent into a new run directory, durably, before anything is proposed; once.

    Raises:
        InvalidValue: as :func:`found`.
        CorruptFile: an earlier directory is damaged, or this one has trials and does not say what it carries.
    """
    if not search.after:
        return
    events = directory.events()
    if any(event["event"] == EVENT for event in events):
        return
    if any(event["event"] in ("proposed", "infeasible") for event in events):
        raise CorruptFile(
            f"{directory.path} goes on from earlier searches and has trials, and its journal does not say what those "
            "spent. Restore the directory."
        )
    searches = []
    for each in found(search):
        copy = _copy(each.directory, copy_of(directory, each.id))
        chained = copy.chained_events()
        if each.counted:
            list(spendings(copy))  # what cannot be added up is said before anything is spent
        head = chained[-1][1] if chained else None
        searches.append(replace(each, events=len(chained), head=head, directory=copy))
    os.sync()
    directory.append({"event": EVENT, "searches": [each.to_json() for each in searches]})


def _copy(source: RunDirectory, target: Path) -> RunDirectory:
    """A copy of what tells the spending; one that a crash cut short is made anew.

    The journal is read first: a trial that it calls finished has all of its ledgers by then. Ledgers of others go on
    being written, and are not needed: such a trial counts as its plan.
    """
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    journal = (source.path / JOURNAL).read_bytes() if (source.path / JOURNAL).exists() else b""
    (target / JOURNAL).write_bytes(journal[: journal.rfind(b"\n") + 1])
    shutil.copyfile(source.path / "raydp.json", target / "raydp.json")
    copy = RunDirectory.open(target)
    events = copy.events()
    proposed = {str(event["key"]) for event in events if event["event"] == "proposed"}
    finished = {str(event["key"]) for event in events if event["event"] == "finished"}
    for pattern in COPIED[2:]:
        for path in source.path.glob(pattern):
            relative = path.relative_to(source.path)
            if relative.parts[1] in (finished if path.suffix == ".jsonl" else proposed):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / relative)
    return RunDirectory.open(target)


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """What a sampler can be told of earlier searches.

    Attributes:
        trials: (config of the new space, the objectives' values) of each trial that fits.
        passed_over: why trials do not fit -> how many.
    """

    trials: tuple[tuple[dict[str, Any], tuple[float, ...]], ...] = ()
    passed_over: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def summary(self, sampler: str) -> str:
        """In words, for whoever watches."""
        if sampler not in LEARNING:
            return f"the sampler {sampler!r} learns nothing from earlier trials; what they spent counts all the same"
        told = len(self.trials)
        text = f"the sampler learns from {told} finished trial{'' if told == 1 else 's'} of earlier searches"
        if not self.passed_over:
            return text
        reasons = "; ".join(f"{count} {why}" for why, count in self.passed_over.items())
        return f"{text}; {sum(self.passed_over.values())} do not fit: {reasons}"


def lessons(search: Search, searches: Sequence[Earlier]) -> Lessons:
    """The complete trials of earlier searches, as points of this one's space, in their order.

    A hyperparameter that the earlier search held fixed, or left at its default, has that value. Those that this space
    does not propose may differ: what they did to the score, the sampler takes for noise.
    """
    if search.sampler not in LEARNING:
        return Lessons()
    trials, passed = [], Counter[str]()
    for each in searches:
        for record in each.directory.records().values():
            if record.state != "complete" or record.final:
                continue
            values = tuple(value for metric in search.metrics if (value := record.mean(metric)) is not None)
            config = _config(search, each.definition, record)
            if config is None:
                passed["of another method"] += 1
            elif len(values) != len(search.metrics):
                passed[f"without {' and '.join(search.metrics)}"] += 1
            elif not _fits(search, config):
                passed["outside of the space"] += 1
            else:
                trials.append((config, values))
    return Lessons(trials=tuple(trials), passed_over=dict(passed))


def _config(search: Search, definition: Mapping[str, Any], record: TrialRecord) -> dict[str, Any] | None:
    """All hyperparameters of an earlier trial by name; None if its method is none of the search's."""
    name = record.config.get("method", definition.get("method"))
    chosen = next((method for method in search.methods if method.name == name), None)
    if chosen is None:
        return None
    defaults = {
        item.name: item.default
        for item in dataclasses.fields(chosen.hyperparameters)
        if item.default is not dataclasses.MISSING
    }
    whole = {**defaults, **(definition.get("fixed") or {}), **record.config, "method": name}
    return {name: whole[name] for name in search.point_space.names if name in whole}


def _fits(search: Search, config: Mapping[str, Any]) -> bool:
    try:
        search.point_space.replay(config)
    except (InvalidValue, KeyError):
        return False
    return True


__all__ = ["LEARNING", "Lessons", "found", "lessons", "shares", "take_over"]
