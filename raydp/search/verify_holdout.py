"""Verification of what was released of a private hold-out: ledgers against plans, and both against the budget."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue, LedgerRefusal
from raydp.privacy import accountants, selection
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import delta_at
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval, Plan
from raydp.privacy.selection_budget import released
from raydp.search.holdout import LEDGER, PLAN
from raydp.search.records import FINISHED, TrialRecord
from raydp.search.run_directory import HELD, RunDirectory, read_json_lines, trial_budget
from raydp.search.spending import Composition, ExecutedRun, executed_runs, merged

#: Relative slack above the budget: floating point, not privacy.
_OVER = 1e-12


def verify_holdout(
    opened: RunDirectory, records: Mapping[str, TrialRecord], seeds: int, carried: Sequence[Composition] = ()
) -> dict[str, Any] | None:
    """Check every release of a private hold-out. None for a search without a budget for it and without any release.

    Args:
        carried: what earlier searches released of it, which is composed with the runs.

    Returns:
        ``{"ok", "budget", "runs": [{"key", "seed", "ok", "problem", "reports", "noise_multiplier", "epsilon"}],
        "epsilon": {accountant: interval}, "problems": [str]}``. A run is not ok if its ledger is damaged, is not what
        its plan allows, is not the one with which its trial ended, holds fewer reports than are in metrics.jsonl, or
        overspends; if its plan is missing, not the one in the journal, or of another budget; or if its trial is
        complete and a report is missing.
    """
    found = {(run.key, run.seed): run for run in executed_runs(opened, LEDGER.removesuffix(".jsonl"))}
    stated = opened.definition.get("holdout_budget")
    if stated is None:
        if not found:
            return None
        problems = ["releases of a private hold-out are in ledgers, and the search has no budget for them"]
        return {"ok": False, "budget": None, "runs": [], "epsilon": {}, "problems": problems}
    total = Budget.from_json(stated)
    budget, problems = _of_a_trial(opened, total)
    wanted = set(found)
    for key, each in records.items():
        wanted |= {(key, seed) for seed, path in opened.runs(key) if (path / "metrics.jsonl").exists()}
        wanted |= {(key, int(seed)) for seed in each.holdout_heads if seed.isdecimal()}
        wanted |= {(key, seed) for seed in range(1 if each.final else seeds) if each.state == "complete"}
    runs: list[dict[str, Any]] = []
    spent: list[Mechanism] = [mechanism for each in carried for mechanism in each]
    for key, seed in sorted(wanted):
        run, record = found.get((key, seed)), records.get(key)
        plan, problem = _plan(opened, key, record, budget)
        ledger = None if run is None else run.ledger
        mechanisms = () if ledger is None else ledger.mechanisms
        if run is not None and ledger is None and plan is not None:
            mechanisms = plan.mechanisms  # unknown, and at most that
        spent += mechanisms
        epsilon = _epsilon(merged(mechanisms), budget)
        texts = [problem, *_problems(run, opened.run_path(key, seed), record, seed, plan)]
        if epsilon["pld"].upper > budget.epsilon * (1 + _OVER):
            texts.append(f"overspent: epsilon of the hold-out is {epsilon['pld'].upper:.6g}, of {budget.epsilon:.6g}")
        for at, allowed in budget.further if mechanisms else ():
            spends = delta_at(merged(mechanisms), budget)(at)
            if spends > allowed * (1 + _OVER):
                texts.append(
                    f"overspent: delta of the hold-out is {spends:.6g} at epsilon = {at:.6g}, of {allowed:.6g}"
                )
        told = "; ".join(text for text in texts if text) or None
        runs.append(
            {
                "key": key,
                "seed": seed,
                "ok": told is None,
                "problem": told,
                "reports": sum(mechanism.steps for mechanism in mechanisms),
                "noise_multiplier": mechanisms[0].noise_multiplier if mechanisms else None,
                "epsilon": {name: interval.to_json() for name, interval in epsilon.items()},
            }
        )
    return {
        "ok": not problems and all(entry["ok"] for entry in runs),
        "budget": budget.to_json(),
        "runs": runs,
        "epsilon": {name: interval.to_json() for name, interval in _epsilon(merged(spent), budget).items()},
        "problems": problems,
    }


def _of_a_trial(opened: RunDirectory, total: Budget) -> tuple[Budget, list[str]]:
    """What a trial may release of the hold-out, and what is wrong with that.

    Under random stopping the journal states it, and the search's budget is that of the released result.
    """
    rule = selection.from_json(opened.definition.get("selection") or selection.Composition().to_json())
    if not isinstance(rule, selection.RandomStopping):
        return total, []
    try:
        solved = trial_budget(opened, HELD)
    except CorruptFile:  # a problem of its own, and without a journal no plan is believed
        return total, []
    if solved is None:  # nothing has been released yet
        return total, []
    try:
        bound = released(rule, solved)
    except InvalidValue as error:
        return solved, [str(error)]
    if bound.epsilon <= total.epsilon * (1 + _OVER) and bound.parts["delta"] <= total.delta * (1 + _OVER):
        return solved, []
    return solved, [f"what a trial may release of the hold-out adds up to epsilon = {bound.epsilon:.6g}"]


def _plan(opened: RunDirectory, key: str, record: TrialRecord | None, budget: Budget) -> tuple[Plan | None, str | None]:
    """The plan of the trial's hold-out, and what is wrong with it."""
    if record is None or record.holdout_plan is None:
        return None, "the journal names no plan for what was released of the hold-out"
    try:
        plan = opened.plan(key, PLAN)
    except CorruptFile as error:
        return None, str(error)
    if plan is None:
        return None, f"there is no {PLAN}: nothing allowed these releases"
    if plan.digest != record.holdout_plan:
        return plan, f"{PLAN} has digest {plan.digest[:12]}, the journal says {record.holdout_plan[:12]}"
    if plan.budget != budget:
        return plan, f"{PLAN} is of budget {plan.budget.to_json()}, the search's is {budget.to_json()}"
    return plan, None


def _problems(
    run: ExecutedRun | None, path: Path, record: TrialRecord | None, seed: int, plan: Plan | None
) -> list[str | None]:
    """What is wrong with one run's ledger of the hold-out."""
    try:
        lines = read_json_lines(path / "metrics.jsonl")
        reported = len({_validate.integer("step", line.get("step"), low=0) for line in lines})
    except (CorruptFile, InvalidValue) as error:
        return [f"its reports cannot be read: {error}"]
    if run is None:
        return [f"there is no {LEDGER}, and the run has {reported} reports or should have some"]
    if run.ledger is None:
        return [run.problem]
    found: list[str | None] = []
    if plan is not None:
        try:
            run.ledger.check(plan)
        except LedgerRefusal as refusal:
            found.append(str(refusal))
    held = sum(entry.steps for entry in run.ledger.entries)
    if reported > held:
        found.append(f"it has {reported} reports, and the ledger of the hold-out holds {held}")
    if record is not None and record.state in FINISHED:
        if record.holdout_heads.get(str(seed)) != run.ledger.head:
            found.append("the ledger of the hold-out is not the one with which the trial ended")
        if record.state == "complete" and plan is not None and held < plan.steps:
            found.append(f"complete with {held} of the {plan.steps} reports of the hold-out")
    return found


@functools.lru_cache(maxsize=1024)
def _epsilon(mechanisms: tuple[Mechanism, ...], budget: Budget) -> dict[str, Interval]:
    return {
        name: accountants.epsilon(mechanisms, delta=budget.delta, adjacency=budget.adjacency, accountant=name)
        for name in accountants.ACCOUNTANTS
    }


__all__ = ["verify_holdout"]
