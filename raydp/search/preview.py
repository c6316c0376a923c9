"""What a search would do, without training: noise, steps, epsilon, resources, time and memory.

No private example is read: the time of a step is measured on random inputs of the data's shape.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raydp import data, models
from raydp.errors import Infeasible, InvalidValue
from raydp.privacy import accountants, gaussian
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Plan
from raydp.privacy.selection import RandomStopping, Subsample
from raydp.privacy.selection_budget import released
from raydp.search import carrying, selection_preview
from raydp.search.capacity import Node, fit
from raydp.search.definition import Search
from raydp.search.earlier import Earlier, carried, carried_of_holdout
from raydp.search.runner import check
from raydp.search.sampling import Sampling
from raydp.search.spending import Carried, Composition, compositions, largest, merged
from raydp.search.timing import engine_of, seconds_of_a_run

_BYTES = 4  # of a float32


def preview(search: Search, proposals: int = 3) -> dict[str, Any]:
    """Plans at the centre and the corners of the space and at the first proposals, and what the search would cost.

    Args:
        search: the definition.
        proposals: how many of the sampler's first proposals are planned.

    Returns:
        The documented JSON form: ``budget`` (``epsilon``, ``delta``, ``adjacency``), ``plans`` (each with ``point``,
        ``config``, ``phases``, ``certificate``, or ``reason`` where there is no plan; where all noise is Gaussian on
        all data, ``epsilon_by_adjacency``: what the same noise spends seen by either adjacency),
        ``resources``, ``cost``, ``earlier`` (None, or what earlier searches spent, which is part of the cost),
        ``holdout`` (None, or what is released of a private hold-out, and at what cost)
        and ``selection`` (:func:`raydp.search.selection_preview.describe`).
    """
    check(search)
    earlier = carrying.found(search)
    lessons = carrying.lessons(search, earlier)
    space = search.point_space
    points: list[tuple[str, Mapping[str, Any]]] = [("centre", space.centre())]
    points += [(f"corner {index}", config) for index, config in enumerate(space.corners(), start=1)]
    sampling = Sampling(
        space=space,
        sampler=search.sampler,
        seed=search.seed,
        directions=search.modes,
        warm_start=search.warm_start,
    )
    if lessons.trials:
        sampling.learn(lessons.trials)
    for index in range(1, proposals + 1):
        proposal = sampling.ask()
        if proposal is not None:
            points.append((f"proposal {index}", proposal.config))
    plans, solved, before = [], [], carried(earlier)
    for point, config in points:
        entry: dict[str, Any] = {"point": point, "config": dict(config)}
        try:
            plan = search.plan_for(config)
        except (Infeasible, InvalidValue) as error:
            plans.append({**entry, "phases": [], "certificate": {}, "reason": str(error)})
            continue
        solved.append((config, plan))
        record = plan.to_json()
        planned = {**entry, "phases": record["phases"], "certificate": record["certificate"]}
        if len(plan.phases) == 1 and plan.phases[0].sample_rate == 1.0:
            only = plan.phases[0]
            planned["epsilon_by_adjacency"] = gaussian.by_adjacency(
                only.noise_multiplier, delta=search.budget.delta, steps=only.steps
            )
        plans.append(planned)
    resources, cost, selected = _resources(search), {}, {}
    held = None
    if solved:
        held = _holdout(search, solved[0][1], carried_of_holdout(earlier))
        selected = selection_preview.describe(search, solved[0][1], solved[0][0], before=before)
        concurrent = resources["trials_at_once_on_this_machine"]
        cost = _cost(search, solved[0][0], solved[0][1], concurrent=concurrent, before=before)
    return {
        "budget": search.budget.to_json(),
        "plans": plans,
        "resources": resources,
        "cost": cost,
        "selection": selected,
        "holdout": held,
        "earlier": _earlier(search, earlier, lessons),
    }


def _earlier(search: Search, searches: Sequence[Earlier], lessons: carrying.Lessons) -> dict[str, Any] | None:
    """Which earlier searches the search would go on from, and what they spent; None where there are none."""
    if not searches:
        return None
    before, budget = carried(searches), search.budget
    alone = [
        accountants.epsilon(each, delta=budget.delta, adjacency=budget.adjacency, accountant=search.accountant)
        for each in compositions([], family=data.is_family(search.data), carried=before)
    ]
    return {
        "searches": [each.to_json() for each in searches],
        "sampler": lessons.summary(search.sampler),
        "runs": len(before),
        "epsilon_already_spent_on_these_people": largest(alone).upper if before else 0.0,
    }


def _holdout(search: Search, plan: Plan, before: Sequence[Composition]) -> dict[str, Any] | None:
    """What is released of a private hold-out through noise, and at what cost to its people."""
    held = search.holdout_plan_for(plan)
    if held is None:
        return None
    (phase,), rule = held.phases, search.rule
    record: dict[str, Any] = {
        "metric": search.metrics[0],
        "examples": phase.spec.population,
        "reports_a_run": phase.steps,
        "sigma": phase.noise_multiplier,
        f"standard_deviation_of_{search.metrics[0]}": phase.noise_std / phase.spec.population,
        "epsilon_of_a_run": held.epsilon.upper,
        "delta": held.budget.delta,
    }
    if isinstance(rule, RandomStopping):
        return {**record, "epsilon_of_the_released_result": released(rule, held.budget).epsilon}
    runs = search.trials * search.seeds + isinstance(rule, Subsample)
    own = Mechanism(noise_multiplier=phase.noise_multiplier, sample_rate=1.0, steps=phase.steps * runs)
    whole = accountants.epsilon(
        merged([own, *(mechanism for released in before for mechanism in released)]),
        delta=held.budget.delta,
        adjacency=held.budget.adjacency,
        accountant=held.accountant,
    )
    return {**record, "runs": runs, "epsilon_of_the_search_if_all_runs_finish": whole.upper}


def _resources(search: Search) -> dict[str, Any]:
    wanted = search.resources
    machine = Node(cpus=wanted.total_cpus or os.cpu_count() or 1, gpus=torch.cuda.device_count())
    try:
        found = fit([machine], wanted)
        trials, arithmetic = found.trials, found.arithmetic
    except InvalidValue as error:  # it may fit the cluster that the search is meant for
        trials, arithmetic = 0, str(error)
    return {
        "num_workers": wanted.num_workers,
        "cpus_per_worker": wanted.cpus_per_worker,
        "gpus_per_worker": wanted.gpus_per_worker,
        "cpus_on_this_machine": int(machine.cpus),
        "gpus_on_this_machine": int(machine.gpus),
        "trials_at_once_on_this_machine": trials,
        "arithmetic": arithmetic,
    }


def _cost(search: Search, config: Mapping[str, Any], plan: Plan, *, concurrent: int, before: Carried) -> dict[str, Any]:
    """Time, memory and privacy of the whole search, for trials like this one."""
    method, hyperparameters, _ = search.point(config)
    dataset = data.load(search.data, limit=search.data_limit)
    model = models.build_model(
        search.model_name(),
        input_shape=dataset.private.input_shape,
        outputs=dataset.private.outputs,
        seed=search.seed,
    )
    coordinates = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seconds = seconds_of_a_run(search, method, hyperparameters, plan=plan, model=model, dataset=dataset)
    rule = search.rule
    runs = math.ceil(rule.runs.mean) if isinstance(rule, RandomStopping) else search.trials * search.seeds
    everything = [
        Mechanism(noise_multiplier=phase.noise_multiplier, sample_rate=phase.sample_rate, steps=phase.steps * runs)
        for phase in plan.phases
    ]
    # Of a family, as of one set: an upper bound, which the search itself states member by member.
    whole = accountants.epsilon(
        merged([*everything, *(mechanism for _, spent in before for mechanism in spent)]),
        delta=search.budget.delta,
        adjacency=search.budget.adjacency,
        accountant=search.accountant,
    )
    engine = engine_of(search, hyperparameters, model=model, dataset=dataset)
    held = min(search.micro_batch, engine.compact_batch) * engine.numbers_held
    images = (len(dataset.private) + len(dataset.holdout)) * int(torch.tensor(dataset.private.input_shape).prod())
    return {
        "coordinates": coordinates,
        "steps_a_run": plan.steps,
        "seconds_a_run": float(f"{seconds:.3g}"),
        "seconds_for_the_search": float(f"{seconds * runs / max(1, concurrent):.3g}"),
        "seconds_measured_with": f"one worker of {search.resources.cpus_per_worker} thread(s), random inputs, the "
        "method's own steps, without pre-training and evaluation",
        "megabytes_a_trial": round((images + 2 * held + 6 * coordinates) * _BYTES / 1e6, 1),
        "gradients": engine.describe(),
        "epsilon_of_the_search_if_all_runs_finish": whole.upper,
        "runs": runs,
    }
