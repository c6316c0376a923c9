"""A private hold-out in a search: what its budget asks for, what a trial may release, how metrics are labelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raydp import data, tasks
from raydp.data import Dataset
from raydp.errors import InvalidValue
from raydp.privacy.budget import Budget
from raydp.privacy.plan import Plan
from raydp.privacy.selection import Public, RandomStopping
from raydp.privacy.selection_budget import trial_budget
from raydp.training.holdout import phase_of, reports_of

if TYPE_CHECKING:
    from raydp.search.definition import Search

PLAN = "holdout-plan.json"
LEDGER = "holdout-ledger.jsonl"
#: How metrics that cost the hold-out's budget are labelled.
NOISED = "private hold-out, through noise"
_UNNOISED = "private hold-out, without noise: NOT private"


def check_definition(search: Search) -> None:
    """Refuse what a hold-out's budget cannot cover, as far as the definition tells.

    Raises:
        InvalidValue: names the field, and says why.
    """
    if search.holdout_budget is None:
        return
    rules = (
        (
            "paired",
            search.paired,
            not search.paired,
            "would share noise between runs, and two metrics of a hold-out under the same noise differ by none",
            "Set paired=False, or leave out holdout_budget.",
        ),
        (
            "metric",
            search.metrics,
            len(search.metrics) == 1,
            "must be one metric where a private hold-out is measured through noise: that one is released",
            "Name one metric, or leave out holdout_budget.",
        ),
        (
            "selection",
            search.rule.rule,
            not isinstance(search.rule, Public),
            "says that nothing private is looked at, and holdout_budget that a private hold-out is",
            "Set selection='composition', or leave out holdout_budget.",
        ),
        (
            "holdout_budget.further",
            search.holdout_budget.further,
            not search.holdout_budget.further,
            "is solved by random stopping",
            "Leave it out.",
        ),
        (
            "holdout_budget.adjacency",
            search.holdout_budget.adjacency,
            search.holdout_budget.adjacency == search.budget.adjacency,
            f"must be that of the budget, {search.budget.adjacency!r}: one statement speaks of one adjacency",
            "Use the same adjacency in both.",
        ),
    )
    for name, value, holds, rule, remedy in rules:
        if not holds:
            raise InvalidValue(name, value, rule, remedy)
    phase_of(search.target_task, search.metrics[0], reports=1, population=1)


def check_data(search: Search, dataset: Dataset) -> None:
    """Refuse a hold-out that a budget of its own does not fit.

    Raises:
        InvalidValue: the hold-out is not private, or holds examples that are trained on.
    """
    if search.holdout_budget is None:
        return
    if dataset.holdout_visibility != "private hold-out":
        raise InvalidValue(
            "holdout_budget",
            search.holdout_budget.epsilon,
            f"has no meaning for {dataset.name!r}, whose hold-out is no private one ({dataset.holdout_visibility})",
            "Leave it out: measuring costs no privacy there.",
        )
    if data.is_family(search.data):
        raise InvalidValue(
            "holdout_budget",
            search.holdout_budget.epsilon,
            f"is for one private set, and {search.data!r} is a family of them, whose hold-outs may share people",
            "Leave it out.",
        )
    if dataset.private.shared_with(dataset.holdout):
        raise InvalidValue(
            "holdout_budget",
            search.holdout_budget.epsilon,
            f"needs a hold-out of other people, and the one of {dataset.name!r} holds examples that are trained on: "
            "they would pay from both budgets, and each states only its own",
            "Remove them from one of the two files, or leave out holdout_budget.",
        )
    search.holdout_budget.warn_if_delta_is_large(len(dataset.holdout))


def budget_of_run(search: Search) -> Budget | None:
    """What one run may release of the hold-out; None without a budget.

    Under random stopping ``holdout_budget`` is that of the released result, and a run's is solved from it. A trial with
    its noised metric is then the mechanism that is repeated: to someone of the training, the metric is post-processing
    of the trained weights; to someone of the hold-out, the weights are fixed and the metric is a release of a Gaussian
    mechanism. The score that chooses is that metric. So the theorem holds for both, each with the profile of their own
    plan, and since nobody is in both parts, each pays for one.
    """
    if search.holdout_budget is None or not isinstance(search.rule, RandomStopping):
        return search.holdout_budget
    return trial_budget(search.rule, search.holdout_budget)


def plan_for(search: Search, plan: Plan, budget: Budget | None = None) -> Plan | None:
    """The certified plan of one run's releases of the hold-out, given the run's own plan; None without a budget.

    Args:
        budget: of the run; None takes :func:`budget_of_run`.
    """
    if search.holdout_budget is None:
        return None
    from raydp.privacy.cache import PlanCache
    from raydp.privacy.calibration import calibrate

    phase = phase_of(
        tasks.task(search.task_name),
        search.metrics[0],
        reports=reports_of(search.reports, plan.steps),
        population=len(data.load(search.data, limit=search.data_limit).holdout),
    )
    # On all data, this accountant is exact: the analytic Gaussian mechanism.
    budget = budget or budget_of_run(search)
    assert budget is not None
    return calibrate(budget=budget, phases=[phase], accountant="pld", cache=PlanCache())


def label(search: Search, dataset: Dataset) -> str:
    """What a search's metrics are measured on, and whether that is private."""
    where: str = dataset.holdout_visibility
    if where == "private hold-out":
        where = _UNNOISED if search.holdout_budget is None else NOISED
    return f"{dataset.name} ({where}, {len(dataset.holdout)} examples)"


__all__ = ["LEDGER", "NOISED", "PLAN", "budget_of_run", "check_data", "check_definition", "label", "plan_for"]
