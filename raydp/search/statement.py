"""The privacy statement of a search: what was spent, by which mechanisms, on which assumptions, and what it leaves out.

A statement is a JSON object that ``statement.schema.json`` describes, and can be read as text. It is made from the
ledgers and the journal, not from what was planned, and holds every number that its epsilons follow from: a reader needs
nothing else to compute them again.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydp.privacy import accountants, selection
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.noise import NOISE_CLAIM, NOISE_SOURCE
from raydp.privacy.plan import Interval, Plan
from raydp.privacy.selection_budget import released
from raydp.search import statement_earlier, subsample
from raydp.search.display import upward
from raydp.search.earlier import Earlier, carried, carried_of_holdout, earlier_of
from raydp.search.holdout import LEDGER, NOISED, PLAN
from raydp.search.records import NOT_STATED, TrialRecord
from raydp.search.results import INSECURE
from raydp.search.run_directory import HELD, RunDirectory, atomic_file, trial_budget
from raydp.search.spending import (
    OF_MEMBERS,
    Carried,
    ExecutedRun,
    compositions,
    executed_runs,
    is_family,
    largest,
    merged,
)

VERSION = 1
JSON_FILE, TEXT_FILE = "statement.json", "statement.txt"

_UNIT = "One example of the private training data. Whoever contributes several is protected for each of them alone."
_ADJACENCY = {
    "add_remove": "Neighbouring data sets differ by one example, added or removed; a step's sum has sensitivity C.",
    "replace_one": "Neighbouring data sets differ by one example that is exchanged; a step's sum has sensitivity 2C.",
}
_SAMPLER = (
    "Poisson: in each step every example takes part with probability q, independently of all others and of all other "
    "steps; the sum is divided by the expected batch size. q = 1 is the Gaussian mechanism on all data."
)
_MECHANISM = (
    "Each example's vector is clipped to Euclidean norm C over all coordinates; normal noise of standard deviation "
    "sigma times C is added to every coordinate of the sum, once a step."
)
_EVERYTHING = "The composition of every step of every run that started, also of trials that failed."
_FAMILY = (
    " The private data are a family: the runs of seed i of all trials saw member i alone. Each member's runs are "
    f"composed; {OF_MEMBERS}. The mechanisms listed are those of the largest; those of the others stand at their runs."
)
_ACCOUNTANTS = {
    "pld": "privacy-loss distributions (dp-accounting), lower and upper bound",
    "prv": "privacy random variables (prv-accountant; Gopi, Lee & Wutschitz 2021), lower and upper bound",
    "rdp": "Renyi moments (Opacus; Mironov, Talwar & Zhang 2019), upper bound",
}

_HOLDOUT = (
    "The metric is measured on private examples of other people than the training's, who have a budget of their own "
    "(parallel composition). Each report adds normal noise of standard deviation sigma times the most that one example "
    "contributes to the sum over all of them (q = 1); what it contributes follows from it and the released weights, up "
    "to the rounding of float32. The unit of privacy is one example of the hold-out; under replace_one it is "
    "exchanged for another one of the hold-out."
)

_Intervals = dict[str, dict[str, Any]]


def build(directory: str | os.PathLike[str] | RunDirectory) -> dict[str, Any]:
    """The statement of a search, finished or not, from its run directory; nothing is written.

    Raises:
        InvalidValue: it is no run directory.
        CorruptFile: the journal, a plan or the definition is damaged, or was edited. A damaged ledger counts as its
            whole plan, and is marked.
    """
    opened = directory if isinstance(directory, RunDirectory) else RunDirectory.open(directory)
    definition = opened.definition
    budget = Budget.from_json(definition["budget"])
    chained = opened.chained_events()
    records = opened.records()
    solved = trial_budget(opened)
    trials, spent = _trials(opened, records, solved or budget)
    family, accountant = is_family(definition), str(definition.get("accountant", "pld"))
    earlier = earlier_of(opened)
    before = carried(earlier)
    whole = compositions(spent, family=family, carried=before)
    worst = max(whole, key=lambda each: _interval(each, budget, accountant).upper)
    rule = selection.from_json(definition.get("selection") or selection.Composition().to_json())
    parts = subsample.spent(opened, records) if isinstance(rule, selection.Subsample) else None
    insecure = definition.get("insecure_seed") is not None
    population = _population(rule, records)
    metrics = _metrics(definition, records)
    held = _holdout(opened, earlier)
    return {
        "statement": VERSION,
        "search": {
            "name": definition.get("name"),
            "id": opened.header["id"],
            "created": opened.header.get("created"),
            "finished": bool(records) and all(record.finished for record in records.values()),
            "method": definition.get("method"),
            "journal": {"events": len(chained), "head": chained[-1][1] if chained else None},
        },
        "private": not insecure,
        "unit": _UNIT,
        "budget": budget.to_json(),
        "adjacency": {"name": budget.adjacency, "meaning": _ADJACENCY[budget.adjacency]},
        "data": {
            "private": definition.get("data"),
            "population": population,
            "public": definition.get("public"),
        },
        "sampler": _SAMPLER,
        "mechanism": _MECHANISM,
        "noise": {
            "source": "a known number (insecure_seed): no noise at all to whoever knows it"
            if insecure
            else NOISE_SOURCE,
            "claim": "None." if insecure else NOISE_CLAIM,
            "insecure": insecure,
            "paired": bool(definition.get("paired")),
        },
        "accountants": {"held_against_the_budget": definition.get("accountant", "pld"), "all": _ACCOUNTANTS},
        "selection": {
            "rule": rule.rule,
            "parameters": rule.to_json(),
            "theorem": rule.theorem,
            "released": _released(rule, solved, budget, whole, parts, before),
        },
        "earlier": statement_earlier.entries(earlier, lambda each, name: _interval(each, budget, name)),
        "metrics": metrics,
        "holdout": held,
        "trials": trials,
        "everything": {
            "meaning": _EVERYTHING + (_FAMILY if family else "") + (statement_earlier.MEANING if earlier else ""),
            "runs": sum(bool(run["mechanisms"]) for trial in trials for run in trial["runs"]),
            "mechanisms": [_mechanism(mechanism) for mechanism in worst],
            "epsilon": {
                name: largest(_interval(each, budget, name) for each in whole).to_json()
                for name in accountants.ACCOUNTANTS
            },
        },
        "not_covered": _not_covered(definition, budget, population, metrics, rule, earlier),
        "software": dict(opened.header.get("software") or {}),
    }


def _released(
    rule: selection.Selection,
    solved: Budget | None,
    budget: Budget,
    whole: Sequence[tuple[Mechanism, ...]],
    parts: tuple[Sequence[Mechanism], Sequence[Mechanism]] | None,
    before: Carried,
) -> dict[str, Any]:
    """What the released result costs by the theorem of the selection, and the numbers that it follows from."""
    record: dict[str, Any] = {"epsilon": None, "delta": budget.delta, "trial_budget": None, "parts": {}}
    if isinstance(rule, selection.RandomStopping):
        if solved is None:  # nothing has been released yet
            return record
        bound = released(rule, solved)
        return {**record, "epsilon": bound.epsilon, "trial_budget": solved.to_json(), "parts": bound.parts}
    if isinstance(rule, selection.Public):
        return {**record, "epsilon": 0.0}
    if isinstance(rule, selection.Subsample) and parts is not None:
        bound = subsample.cost(rule, budget, *parts, [mechanism for _, spent in before for mechanism in spent])
        return {**record, "epsilon": bound.epsilon, "parts": bound.parts, "bound": bound.theorem}
    return {**record, "epsilon": largest(_interval(each, budget, "pld") for each in whole).upper}


def _population(rule: selection.Selection, records: Mapping[str, TrialRecord]) -> int | None:
    """N, the number of all private examples, from the plans; None where they do not tell it yet."""
    sizes: dict[bool, set[int]] = {False: set(), True: set()}
    for record in records.values():
        if record.plan:
            sizes[record.final] |= {phase.spec.population for phase in record.plan.phases}
    if not isinstance(rule, selection.Subsample):
        return max(sizes[False], default=None)
    if not sizes[True]:  # trials are planned for what the subsample is expected to hold
        return None
    return max(sizes[True]) + (max(sizes[False]) if rule.final == "rest" else 0)


def write(directory: RunDirectory) -> tuple[Path, Path]:
    """Write ``statement.json`` and ``statement.txt`` into the run directory; their paths. Raises as :func:`build`."""
    statement = build(directory)
    path = directory.write_json(JSON_FILE, statement)
    readable = directory.path / TEXT_FILE
    with atomic_file(readable) as temporary:
        temporary.write_text(text(statement), encoding="utf-8")
    return path, readable


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of statements."""
    content = importlib.resources.files("raydp.search").joinpath("statement.schema.json").read_text(encoding="utf-8")
    record: dict[str, Any] = json.loads(content)
    return record


def text(statement: Mapping[str, Any]) -> str:
    """The statement for a reader; it says nothing that its JSON does not say. Epsilons are rounded up."""
    search, data = statement["search"], statement["data"]
    noise, rule, metrics = statement["noise"], statement["selection"], statement["metrics"]
    unfinished = "" if search["finished"] else " NOT FINISHED: it can still spend more."
    lines = [
        f"Privacy statement of the search {search['name']!r} ({search['id']}).{unfinished}",
        "" if statement["private"] else INSECURE,
        f"Unit of privacy: {statement['unit']}",
        f"Adjacency: {statement['adjacency']['name']}. {statement['adjacency']['meaning']}",
        f"Private data: {data['private']}, N = {data['population'] or 'not known yet'}. "
        f"Public data: {data['public'] or 'none'}.",
        _budget_line(statement),
        f"Sampler: {statement['sampler']}",
        f"Mechanism: {statement['mechanism']}",
        f"Noise: {noise['source']}. {noise['claim']}"
        + (" Runs of one seed share the noise of equal phases (paired)." if noise["paired"] else ""),
        f"Selection: {rule['rule']}. {rule['theorem']}",
        _released_line(rule),
        f"Metrics: {', '.join(metrics['names'])}, measured on {'; '.join(metrics['measured_on']) or NOT_STATED}. "
        + _cost_of_metrics(statement),
        *_holdout_lines(statement["holdout"]),
        "",
        "What ran (epsilon is an upper bound at the budget's delta):",
        *(line for trial in statement["trials"] for line in _trial_lines(trial)),
        "",
        f"Everything that ran, composed ({statement['everything']['runs']} runs{_and_earlier(statement)}): "
        f"{_listed(statement['everything']['epsilon'])}",
        statement["everything"]["meaning"],
        *statement_earlier.lines(statement["earlier"]),
        "",
        "What is not covered:",
        *(f"- {item['what']}: {item['why']}" for item in statement["not_covered"]),
        "",
        "Software: " + ", ".join(f"{name} {version}" for name, version in statement["software"].items()),
    ]
    wrapped = (
        textwrap.fill(line, 100, subsequent_indent="  " if line.startswith(("-", " ")) else "", break_long_words=False)
        for line in lines
    )
    return "\n".join(wrapped) + "\n"


def _and_earlier(statement: Mapping[str, Any]) -> str:
    runs = sum(each["runs"] for each in statement["earlier"] if each["counted"])
    return f", and {runs} of earlier searches" if runs else ""


def _budget_line(statement: Mapping[str, Any]) -> str:
    budget, accountant = statement["budget"], statement["accountants"]["held_against_the_budget"]
    rule = statement["selection"]["rule"]
    of = {"random_stopping": "the released result", "subsample": "each trial and of the final run"}.get(
        rule, "each trial"
    )
    return f"Budget of {of}: epsilon = {budget['epsilon']:g} at delta = {budget['delta']:g}, by {accountant}."


def _released_line(rule: Mapping[str, Any]) -> str:
    """The released result's epsilon, and under random stopping the two points that it follows from."""
    found = rule["released"]
    if found["epsilon"] is None:
        return "Released result: nothing yet."
    line = f"Released result: epsilon = {upward(found['epsilon'], 6)} at delta = {found['delta']:g}."
    if rule["rule"] == selection.Subsample.rule:
        where, parts = rule["parameters"], ", ".join(f"{name} = {value:.6g}" for name, value in found["parts"].items())
        return (
            f"{line} That is all trials, on a secret Poisson subsample of {where['fraction']:g} of them, and the final "
            f"run on {'the rest' if where['final'] == 'rest' else 'all examples'}; by {found['bound']} ({parts}). What "
            "stands beside a trial below is what it costs those who are in the subsample."
        )
    if found["trial_budget"] is None:
        return line
    runs, points = rule["parameters"]["runs"], _points(found["trial_budget"])
    numbers = ", ".join(f"{name} = {value:.6g}" for name, value in runs.items() if name != "name")
    return f"{line} Every trial satisfies {points}. Number of trials: {runs['name']}, {numbers}; drawn in secret."


def _points(budget: Mapping[str, Any]) -> str:
    """All points of a budget, in words."""
    return "; ".join(
        f"epsilon = {epsilon:.6g} at delta = {delta:.6g}"
        for epsilon, delta in [(budget["epsilon"], budget["delta"]), *budget.get("further", ())]
    )


def _trial_lines(trial: Mapping[str, Any]) -> list[str]:
    final = " (the final run)" if trial["final"] else ""
    lines = [f"  {trial['key']}{final} {trial['state']}" + ("" if trial["runs"] else ": nothing ran")]
    for run in trial["runs"]:
        damaged = " (its ledger is damaged: its whole plan is counted)" if run["damaged"] else ""
        lines.append(f"    seed {run['seed']}: {_listed(run['epsilon'])}{damaged}")
        lines += [
            f"      {m['phase']}: sigma = {m['noise_multiplier']:.6g}, q = {m['sample_rate']:.6g}, T = {m['steps']}, "
            f"C = {m['clip_norm']:g}"
            for m in run["mechanisms"]
        ]
    return lines


def _listed(intervals: _Intervals) -> str:
    return ", ".join(f"{name} {upward(interval['upper'], 6)}" for name, interval in intervals.items())


def _trials(
    opened: RunDirectory, records: Mapping[str, TrialRecord], budget: Budget
) -> tuple[list[dict[str, Any]], list[tuple[int, tuple[Mechanism, ...]]]]:
    """The entries of all trials; and of every run the position of its seed and what it executed."""
    runs: dict[str, list[ExecutedRun]] = {key: [] for key in records}
    for run in executed_runs(opened):
        runs.setdefault(run.key, []).append(run)
    entries: list[dict[str, Any]] = []
    spent: list[tuple[int, tuple[Mechanism, ...]]] = []
    for key, found in sorted(runs.items()):
        record = records.get(key)
        plan = record.plan if record else opened.plan(key)
        listed = []
        for run in found:
            mechanisms = _composed(run, plan)
            spent.append((run.seed, mechanisms))
            listed.append(_run(run, mechanisms, plan, budget))
        state, config = (record.state, dict(record.config)) if record else ("unknown to the journal", {})
        final = record is not None and record.final
        entries.append({"key": key, "state": state, "final": final, "config": config, "runs": listed})
    return entries, spent


def _composed(run: ExecutedRun, plan: Plan | None) -> tuple[Mechanism, ...]:
    """What a run executed; what ran under a damaged ledger was at most its plan."""
    if run.ledger is not None:
        return run.ledger.mechanisms
    return () if plan is None else plan.mechanisms


def _run(run: ExecutedRun, mechanisms: Sequence[Mechanism], plan: Plan | None, budget: Budget) -> dict[str, Any]:
    phases: list[dict[str, Any]] = []
    if run.ledger is not None:
        for entry in run.ledger.entries:
            fields = {"phase": entry.phase, **_mechanism(entry.mechanism), "clip_norm": entry.clip_norm}
            if phases and {**phases[-1], "steps": 0} == {**fields, "steps": 0}:
                phases[-1]["steps"] += entry.steps
            else:
                phases.append(fields)
    elif plan is not None:
        phases = [
            {"phase": phase.name, **_mechanism(phase.mechanism), "clip_norm": phase.clip_norm} for phase in plan.phases
        ]
    return {
        "seed": run.seed,
        "damaged": run.ledger is None,
        "ledger_head": run.ledger.head if run.ledger else None,
        "mechanisms": phases,
        "epsilon": _epsilon_of_run(tuple(mechanisms), plan, budget),
    }


def _epsilon_of_run(mechanisms: tuple[Mechanism, ...], plan: Plan | None, budget: Budget) -> _Intervals:
    """Of a whole plan: its certificate, which took seconds to compute. (``raydp verify`` trusts no certificate.)"""
    if plan is not None and mechanisms == plan.mechanisms and set(accountants.ACCOUNTANTS) <= set(plan.certificate):
        return {name: plan.certificate[name].to_json() for name in accountants.ACCOUNTANTS}
    return _epsilon(merged(mechanisms), budget)


def _mechanism(mechanism: Mechanism) -> dict[str, Any]:
    return {
        "noise_multiplier": mechanism.noise_multiplier,
        "sample_rate": mechanism.sample_rate,
        "steps": mechanism.steps,
    }


def _epsilon(mechanisms: tuple[Mechanism, ...], budget: Budget) -> _Intervals:
    return {name: _interval(mechanisms, budget, name).to_json() for name in accountants.ACCOUNTANTS}


@functools.lru_cache(maxsize=1024)
def _interval(mechanisms: tuple[Mechanism, ...], budget: Budget, accountant: str) -> Interval:
    return accountants.epsilon(mechanisms, delta=budget.delta, adjacency=budget.adjacency, accountant=accountant)


def _metrics(definition: Mapping[str, Any], records: Mapping[str, TrialRecord]) -> dict[str, Any]:
    measured_on = sorted({record.measured_on for record in records.values() if record.measured_on != NOT_STATED})
    return {
        "names": _names(definition),
        "measured_on": measured_on,
        "covered": bool(measured_on) and all("public benchmark" in place or NOISED in place for place in measured_on),
    }


def _names(definition: Mapping[str, Any]) -> list[str]:
    names = definition.get("metric", ["accuracy"])
    return [names] if isinstance(names, str) else list(names)


def _holdout(opened: RunDirectory, earlier: Sequence[Earlier]) -> dict[str, Any] | None:
    """What was released of a private hold-out through noise; None where the search has no budget for it."""
    definition = opened.definition
    if definition.get("holdout_budget") is None:
        return None
    stated, solved = Budget.from_json(definition["holdout_budget"]), trial_budget(opened, HELD)
    budget = solved or stated
    runs: list[dict[str, Any]] = []
    spent: list[Mechanism] = [mechanism for each in carried_of_holdout(earlier) for mechanism in each]
    before = merged(spent)
    populations: set[int] = set()
    for run in executed_runs(opened, LEDGER.removesuffix(".jsonl")):
        plan = opened.plan(run.key, PLAN)
        populations |= {phase.spec.population for phase in plan.phases} if plan else set()
        mechanisms = _composed(run, plan)
        spent += mechanisms
        runs.append({"key": run.key, **_run(run, mechanisms, plan, budget)})
    return {
        "meaning": _HOLDOUT,
        "metric": _names(definition)[0],
        "population": max(populations, default=None),
        "budget": stated.to_json(),
        "released": _released_of_holdout(definition, solved),
        "runs": runs,
        "earlier_reports": sum(mechanism.steps for mechanism in before),
        "mechanisms": [_mechanism(mechanism) for mechanism in merged(spent)],
        "epsilon": _epsilon(merged(spent), budget),
    }


def _released_of_holdout(definition: Mapping[str, Any], solved: Budget | None) -> dict[str, Any] | None:
    """Under random stopping, what the released result costs someone of the hold-out; else None: the runs compose."""
    if solved is None:
        return None
    rule = selection.from_json(definition["selection"])
    assert isinstance(rule, selection.RandomStopping)
    bound = released(rule, solved)
    return {"epsilon": bound.epsilon, "trial_budget": solved.to_json(), "parts": bound.parts}


def _holdout_lines(held: Mapping[str, Any] | None) -> list[str]:
    if held is None:
        return []
    budget = held["budget"]
    before = f" and {held['earlier_reports']} reports of earlier searches" if held["earlier_reports"] else ""
    composed = "; ".join(f"sigma = {m['noise_multiplier']:.6g}, T = {m['steps']}" for m in held["mechanisms"])
    if (found := held["released"]) is not None:
        return [
            f"Private hold-out: {held['meaning']} N = {held['population'] or 'not known yet'}. Budget of the released "
            f"result: epsilon = {budget['epsilon']:g} at delta = {budget['delta']:g}. It costs "
            f"{upward(found['epsilon'], 6)}, for every trial satisfies {_points(found['trial_budget'])}. The released "
            f"trial: {composed}."
        ]
    return [
        f"Private hold-out: {held['meaning']} N = {held['population'] or 'not known yet'}. Budget of each run: epsilon "
        f"= {budget['epsilon']:g} at delta = {budget['delta']:g}. All {len(held['runs'])} runs{before} composed "
        f"({composed}): {_listed(held['epsilon'])}."
    ]


def _cost_of_metrics(statement: Mapping[str, Any]) -> str:
    if not statement["metrics"]["covered"]:
        return "They are NOT private: no budget covers them."
    return "They cost no privacy." if statement["holdout"] is None else "They carry noise, and cost what follows."


def _not_covered(
    definition: Mapping[str, Any],
    budget: Budget,
    population: int | None,
    metrics: Mapping[str, Any],
    rule: selection.Selection,
    earlier: Sequence[Earlier],
) -> list[dict[str, str]]:
    """What a reader must not take the numbers for. The first ones hold for every search."""
    found = {
        "choices outside this search": "Hyperparameters, models, methods or earlier searches (other than those that "
        "are listed) that were settled with a look at the private data are not in these numbers.",
        "timing": "How long a trial takes depends on the sizes of its batches, and is shown (seconds, progress).",
        "public constants": "The number N of private examples, their size, the number and names of classes, and "
        "constants of normalisation are taken to be public.",
        "computational assumption": "Noise and samples come from a pseudo-random generator. " + NOISE_CLAIM,
        "the machine": "Whoever reads its memory, the private data, the key directory or the checkpoints of a run that "
        "is not finished sees more than was released.",
    }
    if not metrics["covered"]:
        found["metrics on a private hold-out"] = (
            "Every reported metric is computed from hold-out examples and labels without noise, and steers which trial "
            "is taken. The hold-out is as private as the rest and is not protected."
        )
    if definition.get("holdout_budget") is not None:
        found["people in both parts"] = (
            "Training and hold-out are taken to be different people, so that each pays for one part. They are checked "
            "to share no example, and nothing else is checked: whoever has examples in both pays in both."
        )
    if definition.get("public") is not None:
        found["public data"] = (
            "Examples declared public are not protected. They are checked to share no image with the private ones, and "
            "nothing else is checked."
        )
    if population is not None and budget.delta >= 1 / population:
        found["delta"] = (
            f"delta = {budget.delta:g} is not below 1/N = {1 / population:.3g}: a mechanism that publishes one random "
            "example would satisfy it."
        )
    elif population is None or budget.delta * population > 0.1:
        found["delta"] = "delta should be well below 1/N; here it is not, or N is not known."
    if any(each.get("sampler") in ("tpe", "gp") for each in (definition, *(one.definition for one in earlier))):
        found["adaptive composition"] = (
            "The sampler chose later plans by earlier results. The composition is that of the plans that came about, "
            "not a bound over all that could have."
        )
    found.update(statement_earlier.not_covered(earlier))
    if is_family(definition):
        found["people in several members"] = (
            "The members of the family are taken to be different people, who share no example. Whoever is in several "
            "is protected by the composition of all their runs, which is not stated here."
        )
    if rule.rule == selection.RandomStopping.rule:
        found["the number of trials"] = (
            "The bound holds for those who know neither how many trials ran nor how the others did. Whoever watches "
            "the machine or the clock while the search runs, or reads its private store, can know it."
        )
    if rule.rule == selection.Subsample.rule:
        found["who is in the subsample"] = (
            "The bound holds for those who do not know it: for an example that is known to be in the subsample, the "
            "trials are not amplified, and everything that ran counts. It is drawn from a key that is destroyed after "
            "the final run. Its size is as secret; the sample rates are those of its expected size."
        )
        found["the config of the final run"] = (
            "It was chosen by the trials' results. The bound is that of the final plan that came about, not one over "
            "all that could have."
        )
    if definition.get("paired"):
        found["paired noise"] = (
            "Runs of one seed share the noise of a phase where they are the same computation up to there. It is "
            "released once and charged to each; comparisons between such runs are not independent."
        )
    if definition.get("insecure_seed") is not None:
        found["everything"] = "All noise came from a known number: nothing here is private."
    return [{"what": what, "why": why} for what, why in found.items()]
