"""Verification: recompute from the ledgers what every run of a search spent, with every accountant.

It trusts the budget in raydp.json and nothing else that is a number: epsilons are recomputed from what was executed,
plans are held against the journal, ledgers against the plans.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from raydp import _validate, data
from raydp.errors import CorruptFile, InvalidValue, LedgerRefusal
from raydp.privacy import accountants
from raydp.privacy.budget import Adjacency, Budget
from raydp.privacy.calibration import delta_at
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval, Plan
from raydp.search import subsample
from raydp.search.earlier import Earlier, carried, carried_of_holdout
from raydp.search.records import FINISHED, TrialRecord, fold
from raydp.search.results import INSECURE
from raydp.search.run_directory import RunDirectory, read_json_lines, trial_budget
from raydp.search.spending import Carried, ExecutedRun, compositions, executed_runs, is_family, largest
from raydp.search.verify_earlier import verify_earlier
from raydp.search.verify_holdout import verify_holdout

#: Relative slack above the budget: floating point, not privacy.
OVER = 1e-12
#: A complete run has spent at least epsilon·(1 - UNDER): plans exhaust their budget.
UNDER = 1e-4

_Mechanisms = tuple[Mechanism, ...]
_Intervals = dict[str, Interval]


def verify(directory: str | os.PathLike[str], *, processes: int = 1) -> dict[str, Any]:
    """Check every run of a search against the search's budget. Nothing is written.

    Args:
        directory: the run directory, of a search that is finished, in progress or interrupted.
        processes: how many processes recompute. More than 1 pays from a few hundred different ledgers on, because
            each one has to import the accountants first; equal ledgers are computed once anyway.

    Returns:
        A stable record, ready for JSON::

            {"ok": bool,                        # no run and not the search as a whole has a problem
             "budget": {"epsilon", "delta", "adjacency"}, "accountant": name,
             "plans": [{"key", "config", "certificate": {accountant: interval},
                        "phases": [{"name", "noise_multiplier", "sample_rate", "steps", "clip_norm", …}]}],
             "trials": [{"key", "seed": int | null, "state", "ok", "problem": str | null,
                         "executed": [{"name", "noise_multiplier", "sample_rate", "steps", "clip_norm"}],
                         "epsilon": {accountant: interval}}],         # one entry a run (or for a trial without one)
             "search": {"epsilon": {accountant: interval}, "runs": int,
                        "family": bool},            # the runs of each member composed, the largest of the members
             "released": null | {"epsilon": number, "theorem": str},  # after tuning on a subsample: what it cost
             "earlier": [{…}],                  # see :func:`raydp.search.verify_earlier.verify_earlier`; what the
                                                # counted ones spent is part of "search" and "released"
             "holdout": {…} | null,             # see :func:`raydp.search.verify_holdout.verify_holdout`
             "problems": [str]}                 # what concerns no single run: a damaged or edited journal or
                                                # definition, a statement of another journal, insecure noise

        with interval = ``{"lower", "estimate", "upper", "accountant", "fallback"}``. A run is not ok if

        * the upper bound by the search's accountant is above epsilon (by more than 1e-12 of it), or the *lower* bound
          by any accountant is: then the overspending is proven;
        * its ledger is damaged (also: a line was edited, lost or moved), is not the one with which its trial ended,
          or is not what the plan allows (plan, delta, adjacency, sigma, q, C, steps);
        * its config.json is not what the journal says was proposed;
        * its plan is missing, not the one in the journal, or of another budget than the search, or its certificate
          claims less than is proven;
        * its ledger holds fewer steps than the run reported, or less than the journal says that the trial spent, or
          the run of a seed before it has no ledger: something was lost or deleted;
        * its trial is complete and it has no ledger, executed fewer steps than planned, or spent less than
          epsilon·(1 - 1e-4) (the latter unless the plan
          wastes some of the budget on purpose, by the split ``naive`` or by noise of the classical formula);
        * it ran although the journal does not know its trial, or calls it infeasible.

        A run that is in progress, interrupted, failed or stopped may have spent less.

    Raises:
        InvalidValue, CorruptFile: it is no run directory, or raydp.json is damaged.
    """
    opened = RunDirectory.open(directory)
    budget = Budget.from_json(opened.definition["budget"])
    accountant = _validate.one_of("accountant", opened.definition.get("accountant", "pld"), accountants.ACCOUNTANTS)
    processes = _validate.integer("processes", processes, low=1)
    problems: list[str] = []
    if opened.definition.get("insecure_seed") is not None:
        problems.append(INSECURE)
    problems += _family(opened.definition)
    records, digests, readable = _journal(opened, problems)
    if readable:  # under random stopping, the journal states what was solved for each trial
        budget = trial_budget(opened) or budget
    numbers = {record.number for record in records.values()}
    gaps = sorted(set(range(max(numbers, default=0))) - numbers)
    if gaps:
        problems.append(f"the journal lacks the trials of number {', '.join(map(str, gaps))}, and has later ones")
    if readable:
        problems += _stated(opened)
    runs = executed_runs(opened)
    plans, plan_problems = _plans(opened, digests, {run.key for run in runs}, budget)

    spent = {run.path: run.ledger.mechanisms for run in runs if run.ledger is not None}
    # What ran under a damaged ledger is unknown, and was at most its plan.
    lost = {run.path: plans[run.key].mechanisms for run in runs if run.ledger is None and run.key in plans}
    family = is_family(opened.definition)
    everything = {**spent, **lost}
    earlier, carried_entries = verify_earlier(opened, problems) if readable else ((), [])
    before = _carried(earlier, problems)
    ran = [(run.seed, everything.get(run.path, ())) for run in runs]
    whole = compositions(ran, family=family, carried=before)
    intervals = _recompute({*spent.values(), *whole}, budget.delta, budget.adjacency, processes)

    by_trial: dict[str, list[ExecutedRun]] = {}
    for run in runs:
        by_trial.setdefault(run.key, []).append(run)

    entries = []
    for run in runs:
        record, plan = records.get(run.key), plans.get(run.key)
        epsilon = intervals[spent[run.path]] if run.path in spent else {}
        of_trial = [intervals[spent[each.path]] if each.path in spent else None for each in by_trial[run.key]]
        found = [
            _known(record, run.key in digests) if readable else None,
            run.problem,
            _sealed(record, run),
            _exchanged(opened, record),
            plan_problems.get(run.key) or (None if plan else "there is no plan.json: nothing allowed this run"),
            _fits(run, plan),
            _overspent(epsilon, budget, accountant),
            _over_further_points(run, budget),
            _lost(run, {other.seed for other in by_trial[run.key]}),
            _told(record, of_trial, accountant) if run is by_trial[run.key][0] else None,
            _cut_short(run, plan, epsilon, budget, accountant) if record and record.state == "complete" else None,
        ]
        entries.append(_entry(run.key, run.seed, record, found, epsilon, run))
    problems += _parts(opened.definition, records, plans)
    released = _released(opened, records, budget, problems, before) if readable else None
    seeds = _validate.integer("seeds", opened.definition.get("seeds", 1), low=1)
    entries += _missing(records, runs, seeds, plan_problems, accountant)
    entries.sort(key=lambda entry: (entry["key"], -1 if entry["seed"] is None else entry["seed"]))
    problems += _understated(opened, earlier, max(intervals[each]["pld"].upper for each in whole)) if readable else []
    held = verify_holdout(opened, records, seeds, carried_of_holdout(earlier))
    if held is not None:
        problems += held["problems"]
    return {
        "ok": not problems
        and all(entry["ok"] for entry in (*entries, *carried_entries))
        and (held is None or held["ok"]),
        "budget": budget.to_json(),
        "accountant": accountant,
        "plans": [_plan_entry(key, plan, records.get(key)) for key, plan in sorted(plans.items())],
        "trials": entries,
        "search": {
            "epsilon": {
                name: largest(intervals[each][name] for each in whole).to_json() for name in accountants.ACCOUNTANTS
            },
            "runs": sum(bool(mechanisms) for mechanisms in everything.values()),
            "family": family,
        },
        "released": released,
        "earlier": carried_entries,
        "holdout": held,
        "problems": problems,
    }


def _family(definition: Mapping[str, Any]) -> list[str]:
    """Whether the data are what the definition says, where they are at hand: one private set is not many."""
    source = str(definition.get("data"))
    if not is_family(definition) or data.is_family(source) or not (data.is_named(source) or Path(source).exists()):
        return []
    return [f"raydp.json says that {source} is a family of private sets of different people, and it is not a family"]


def _journal(opened: RunDirectory, problems: list[str]) -> tuple[dict[str, TrialRecord], dict[str, str], bool]:
    """Records and plan digests by trial, and whether the journal is readable: the ledgers can be checked without it."""
    digests: dict[str, str] = {}

    def note(key: str, digest: str) -> Plan | None:
        digests[key] = digest
        return None

    try:
        return fold(opened.events(), note), digests, True
    except CorruptFile as error:
        problems.append(str(error))
        return {}, {}, False


def _stated(opened: RunDirectory) -> list[str]:
    """Whether the journal still holds everything that the privacy statement was made from."""
    file = opened.path / "statement.json"
    try:
        head = _validate.json_object(file.read_text(encoding="utf-8"))["search"]["journal"]["head"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{file.name} is damaged: {error}"]
    if head in {None, *(digest for _, digest in opened.chained_events())}:
        return []
    return [f"{file.name} was made from a journal that is not this one, or of which the end was cut off"]


def _carried(earlier: Sequence[Earlier], problems: list[str]) -> Carried:
    """What earlier searches spent on the same people."""
    try:
        return carried(earlier)
    except CorruptFile as error:
        problems.append(f"what earlier searches spent cannot be added up: {error}")
        return ()


def _understated(opened: RunDirectory, earlier: Sequence[Earlier], upper: float) -> list[str]:
    """Whether the statement of a search that goes on from others names all of them, and composes what they spent."""
    if not earlier:
        return []
    try:
        statement = _validate.json_object((opened.path / "statement.json").read_text(encoding="utf-8"))
        if statement["search"]["journal"]["head"] != opened.chained_events()[-1][1]:
            return []  # made before the search went on
        named = {entry["id"] for entry in statement["earlier"] if entry["counted"]}
        stated = float(statement["everything"]["epsilon"]["pld"]["upper"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return [f"statement.json does not say what earlier searches spent: {error!r}"]
    found = [f"statement.json leaves out {each.name}" for each in earlier if each.counted and each.id not in named]
    if stated < upper * (1 - UNDER):
        found.append(f"statement.json says that everything costs epsilon = {stated:.6g}, the ledgers say {upper:.6g}")
    return found


def _parts(definition: Mapping[str, Any], records: Mapping[str, TrialRecord], plans: Mapping[str, Plan]) -> list[str]:
    """After tuning on a subsample: whether there is one final run at most, and plans are of the expected sizes."""
    rule, finals = subsample.rule_of(definition), [key for key, record in records.items() if record.final]
    if rule is None:
        return [f"{', '.join(finals)}: called final, and the search tunes on no subsample"] if finals else []
    if len(finals) > 1:
        return [f"{', '.join(finals)} are called final, and a search has one final run"]
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for key, record in records.items():
        if key in plans:
            sizes[record.final] |= {phase.spec.population for phase in plans[key].phases}
    if any(len(found) > 1 for found in sizes.values()):
        return [f"plans of one part of the data are for different numbers of examples: {sorted(sizes[False])}"]
    if not sizes[True] or not sizes[False]:
        return []
    (inside,), (final,) = sizes[False], sizes[True]
    whole = inside + final if rule.final == "rest" else final
    if data.part_sizes(whole, rule.fraction)[0] == inside:
        return []
    return [f"trials are planned for {inside} examples, which are no {rule.fraction:g} of {whole}"]


def _released(
    opened: RunDirectory, records: Mapping[str, TrialRecord], budget: Budget, problems: list[str], before: Carried
) -> dict[str, Any] | None:
    """What tuning on a subsample and the final run cost, by the ledgers; the statement must not say less."""
    rule = subsample.rule_of(opened.definition)
    if rule is None:
        return None
    try:
        earlier = [mechanism for _, spent in before for mechanism in spent]
        bound = subsample.cost(rule, budget, *subsample.spent(opened, records), earlier)
    except CorruptFile as error:
        problems.append(str(error))
        return None
    try:
        statement = _validate.json_object((opened.path / "statement.json").read_text(encoding="utf-8"))
        stated = statement["selection"]["released"]["epsilon"]
        current = statement["search"]["journal"]["head"] == opened.chained_events()[-1][1]
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # :func:`_stated` says what is wrong with it
        return {"epsilon": bound.epsilon, "theorem": bound.theorem}
    if current and (stated is None or stated < bound.epsilon * (1 - UNDER)):
        problems.append(
            f"statement.json says that the released result costs epsilon = {stated}, the ledgers {bound.epsilon:.6g}"
        )
    return {"epsilon": bound.epsilon, "theorem": bound.theorem}


def _plans(
    opened: RunDirectory, digests: Mapping[str, str], ran: set[str], budget: Budget
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans by trial, and what is wrong with them."""
    plans: dict[str, Plan] = {}
    problems: dict[str, str] = {}
    for key in sorted({*digests, *ran}):
        try:
            plan = opened.plan(key)
        except CorruptFile as error:
            problems[key] = str(error)
            continue
        if plan is None:
            if key in digests:
                problems[key] = "there is no plan.json, and the journal says that there was one"
            continue
        plans[key] = plan
        if key in digests and plan.digest != digests[key]:
            problems[key] = f"plan.json has digest {plan.digest[:12]}, the journal says {digests[key][:12]}"
        elif plan.budget != budget:
            problems[key] = f"the plan is of budget {plan.budget.to_json()}, the search of {budget.to_json()}"
    return plans, problems


def _known(record: TrialRecord | None, has_plan: bool) -> str | None:
    """Whether the journal says that this run was to be."""
    if record is None:
        return "the journal does not know this trial"
    if record.state == "infeasible":
        return "the journal calls the trial infeasible, and it ran"
    return None if has_plan else "the journal names no plan for this trial"


def _fits(run: ExecutedRun, plan: Plan | None) -> str | None:
    """Whether what ran is what the plan allows."""
    if plan is None or run.ledger is None:
        return None
    try:
        run.ledger.check(plan)
    except LedgerRefusal as refusal:
        return str(refusal)
    return None


def _sealed(record: TrialRecord | None, run: ExecutedRun) -> str | None:
    """Whether the ledger of a finished trial is the one with which it ended."""
    if record is None or record.state not in FINISHED - {"infeasible"} or run.ledger is None:
        return None
    noted = record.heads.get(str(run.seed))
    if noted == run.ledger.head:
        return None
    if noted is None:
        return "the journal does not know a readable ledger of this run, and its trial is finished"
    return "the ledger is not the one with which the trial ended: it was cut, went on, or was written anew"


def _exchanged(opened: RunDirectory, record: TrialRecord | None) -> str | None:
    """Whether config.json is another config than the one in the journal."""
    if record is None:
        return None
    path = opened.trial_directory(record.key) / "config.json"
    try:
        config = _validate.json_object(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # a copy for readers; nothing depends on it
        return None
    except (OSError, ValueError) as error:
        return f"config.json cannot be read: {error}"
    if config == {**(opened.definition.get("fixed") or {}), **record.config}:
        return None
    return "config.json is not the config that the journal says was proposed: one of them was exchanged"


def _overspent(epsilon: _Intervals, budget: Budget, accountant: str) -> str | None:
    limit = budget.epsilon * (1 + OVER)
    if epsilon and epsilon[accountant].upper > limit:
        upper = epsilon[accountant].upper
        return f"overspent: epsilon by {accountant} is up to {upper:.6g}, the budget is {budget.epsilon:.6g}"
    for name, interval in epsilon.items():
        if interval.lower > limit:
            return f"overspent: epsilon is at least {interval.lower:.6g} by {name}, the budget is {budget.epsilon:.6g}"
    return None


def _over_further_points(run: ExecutedRun, budget: Budget) -> str | None:
    """Whether what ran exceeds the budget's further points, which a search under random stopping rests on."""
    if not budget.further or run.ledger is None or not run.ledger.mechanisms:
        return None
    profile = delta_at(run.ledger.mechanisms, budget)
    for at, allowed in budget.further:
        if profile(at) > allowed * (1 + OVER):
            return f"overspent: delta is {profile(at):.6g} at epsilon = {at:.6g}, the selection allows {allowed:.6g}"
    return None


def _lost(run: ExecutedRun, seeds: set[int]) -> str | None:
    """Whether more ran than the ledgers hold: by the run's reports, and by the seeds, which run one after the other."""
    missing = sorted(set(range(run.seed)) - seeds)
    if missing:
        return f"the runs of the seeds {missing} come before this one, and have no ledger"
    if run.ledger is None:
        return None
    try:
        reports = read_json_lines(run.path.parent / "metrics.jsonl")
        step = max((_validate.integer("step", report.get("step"), low=0) for report in reports), default=0)
    except (CorruptFile, InvalidValue) as error:
        return f"its reports cannot be read: {error}"
    recorded = sum(entry.steps for entry in run.ledger.entries)
    return f"it reported step {step}, and its ledger holds {recorded} steps" if step > recorded else None


def _told(record: TrialRecord | None, runs: Sequence[_Intervals | None], accountant: str) -> str | None:
    """Whether the ledgers of a trial's runs add up to less than the journal says its costliest run spent."""
    if record is None or accountant not in record.epsilon or None in runs:  # a damaged ledger is a problem of its own
        return None
    told = record.epsilon[accountant].upper
    found = max((run[accountant].upper for run in runs if run is not None), default=0.0)
    if found >= told * (1 - UNDER):
        return None
    return f"the journal says that a run spent epsilon = {told:.6g} by {accountant}, the ledgers say {found:.6g}"


def _cut_short(run: ExecutedRun, plan: Plan | None, epsilon: _Intervals, budget: Budget, accountant: str) -> str | None:
    """Whether a complete run executed less than its plan, or its plan less than the budget."""
    if plan is None or run.ledger is None:
        return None
    for phase in plan.phases:
        steps = run.ledger.steps(phase.name)
        if steps < phase.steps:
            return f"complete with {steps} of the {phase.steps} steps of phase {phase.name!r}"
    for name, claimed in plan.certificate.items():
        if epsilon[name].lower > claimed.upper * (1 + OVER):
            return (
                f"the plan's certificate claims epsilon <= {claimed.upper:.6g} by {name}, and at least "
                f"{epsilon[name].lower:.6g} was spent"
            )
    upper = epsilon[accountant].upper
    further = zip(plan.further, budget.further, strict=True)
    exact = any(spent >= allowed * (1 - UNDER) for spent, (_, allowed) in further)
    if plan.exhausts and not exact and upper < budget.epsilon * (1 - UNDER):
        return f"complete with epsilon = {upper:.6g} by {accountant}: less than the budget of {budget.epsilon:.6g}"
    return None


def _missing(
    records: Mapping[str, TrialRecord],
    runs: Sequence[ExecutedRun],
    seeds: int,
    plan_problems: Mapping[str, str],
    accountant: str,
) -> list[dict[str, Any]]:
    """Entries for trials without any run, and for runs that a complete trial must have and has not."""
    ran = {(run.key, run.seed) for run in runs}
    entries: list[dict[str, Any]] = []
    for key, record in records.items():
        had = {int(seed) for seed in record.heads if seed.isdecimal()}
        had |= set(range(1 if record.final else seeds)) if record.state == "complete" else set()
        lost = [seed for seed in sorted(had) if (key, seed) not in ran]
        if lost:
            none = not any(run.key == key for run in runs)
            missing: list[str | None] = [f"the trial is {record.state}, and this run has no ledger"]
            missing += [_told(record, [], accountant)] if none else []
            entries += [_entry(key, seed, record, missing, {}) for seed in lost]
        elif not any(run.key == key for run in runs):
            entries.append(_entry(key, None, record, [plan_problems.get(key), _told(record, [], accountant)], {}))
    return entries


def _entry(
    key: str,
    seed: int | None,
    record: TrialRecord | None,
    found: Sequence[str | None],
    epsilon: _Intervals,
    run: ExecutedRun | None = None,
) -> dict[str, Any]:
    problem = "; ".join(text for text in found if text) or None
    executed = [
        {
            "name": entry.phase,
            "noise_multiplier": entry.noise_multiplier,
            "sample_rate": entry.sample_rate,
            "steps": entry.steps,
            "clip_norm": entry.clip_norm,
        }
        for entry in (run.ledger.entries if run and run.ledger else ())
    ]
    return {
        "key": key,
        "seed": seed,
        "state": record.state if record else "unknown",
        "ok": problem is None,
        "problem": problem,
        "executed": _joined(executed),
        "epsilon": {name: interval.to_json() for name, interval in epsilon.items()},
    }


def _joined(executed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ledger lines of equal parameters that follow each other, as one: a long run has thousands of them."""
    joined: list[dict[str, Any]] = []
    for entry in executed:
        if joined and {**joined[-1], "steps": 0} == {**entry, "steps": 0}:
            joined[-1]["steps"] += entry["steps"]
        else:
            joined.append(entry)
    return joined


def _plan_entry(key: str, plan: Plan, record: TrialRecord | None) -> dict[str, Any]:
    content = plan.to_json()
    config = dict(record.config) if record else None
    return {"key": key, "config": config, "phases": content["phases"], "certificate": content["certificate"]}


def _recompute(
    compositions: set[_Mechanisms], delta: float, adjacency: Adjacency, processes: int
) -> dict[_Mechanisms, _Intervals]:
    """Epsilon of each composition by each accountant."""
    jobs = sorted(compositions, key=lambda mechanisms: -len(mechanisms))  # the whole search, the longest, first
    job = partial(_by_all, delta=delta, adjacency=adjacency)
    if processes == 1 or len(jobs) < 2 * processes:
        return dict(zip(jobs, map(job, jobs), strict=True))
    # spawn: a fork of a process with threads (numpy, a tracker) can hang.
    with ProcessPoolExecutor(max_workers=processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(job, jobs, chunksize=4), strict=True))


def _by_all(mechanisms: _Mechanisms, *, delta: float, adjacency: Adjacency) -> _Intervals:
    return {
        name: accountants.epsilon(mechanisms, delta=delta, adjacency=adjacency, accountant=name)
        for name in accountants.ACCOUNTANTS
    }
