"""How long a run would take, from one rehearsed micro-batch of each phase on random inputs.

The method's own policy chooses geometry and engine of each phase, and what a phase releases is shown to it, so a
whitened, a sparse or a subspace step is timed as such, with what it does on public examples between steps.
Augmentation, evaluation, checkpoints and pre-training are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from raydp import data
from raydp.geometry.base import frozen_parameters
from raydp.methods import Method, PublicExamples, Setting
from raydp.methods.base import GradientHyperparameters, Hyperparameters
from raydp.privacy.noise import NoiseKey
from raydp.privacy.plan import Plan
from raydp.search.definition import Search
from raydp.training.gradients import PerExampleGradients, average_copies, made_up_example
from raydp.training.step import ClippedSum, release

T = TypeVar("T")


def seconds_of_a_run(
    search: Search,
    method: Method,
    hyperparameters: Hyperparameters,
    *,
    plan: Plan,
    model: nn.Module,
    dataset: data.Dataset,
) -> float:
    """Seconds of all steps of ``plan``, with as many threads as a trial has. Reads public examples only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(search.resources.cpus_per_worker)
    try:
        return _rehearse(search, method, hyperparameters, plan=plan, model=model, dataset=dataset)
    finally:
        torch.set_num_threads(threads)


def engine_of(
    search: Search, hyperparameters: Hyperparameters, *, model: nn.Module, dataset: data.Dataset
) -> PerExampleGradients:
    """What a trial computes per-example gradients by."""
    task = search.target_task
    return PerExampleGradients(
        model,
        task.loss,
        example=made_up_example(task, dataset.private, copies=_views(hyperparameters)),
        engine=search.engine,
        precision=search.precision,
    )


def _views(hyperparameters: Hyperparameters) -> int:
    """Augmented copies of an example, whose gradients are averaged."""
    return hyperparameters.augmentation_multiplicity if isinstance(hyperparameters, GradientHyperparameters) else 1


def _rehearse(
    search: Search,
    method: Method,
    hyperparameters: Hyperparameters,
    *,
    plan: Plan,
    model: nn.Module,
    dataset: data.Dataset,
) -> float:
    private, task = dataset.private, search.target_task
    public = _public(search, dataset)
    policy = method.policy(
        hyperparameters,
        Setting(
            plan=plan,
            model=model,
            seed=search.seed,
            public=public,
            input_shape=private.input_shape,
            task=task,
            num_classes=private.num_classes,
        ),
    )
    gradients = engine_of(search, hyperparameters, model=model, dataset=dataset)
    key, total = NoiseKey.insecure(0), 0.0
    for phase in plan.phases:
        own = policy.engine(phase.name)
        multiplicity = _views(hyperparameters) if own is None else 1
        preferred = gradients.compact_batch if own is None else own.preferred_batch
        size = max(1, min(search.micro_batch, preferred) // multiplicity)
        copies = size * multiplicity
        kind = torch.float32 if private.num_classes is None else torch.long
        shape = (copies,) if private.num_labels is None else (copies, private.num_labels)
        inputs, targets = torch.randn(copies, *private.input_shape), torch.zeros(shape, dtype=kind)
        draw = task.draw(copies, private.input_shape, np.random.default_rng(0))
        # What the first step does on public examples, and what every step does.
        first, geometry = _timed(lambda name=phase.name: policy.geometry(name, 0))  # type: ignore[misc]
        later = 0.0
        if phase.steps > 1 and policy.interval(phase.name) != 1:
            later, geometry = _timed(lambda name=phase.name: policy.geometry(name, 1))  # type: ignore[misc]
        frozen = frozen_parameters(geometry)
        clipped = ClippedSum(
            geometry=geometry,
            clip_norm=phase.clip_norm,
            spacing=phase.spacing,
            shapes=gradients.shapes if own is None else {},
        )

        def examples() -> None:
            vectors = (
                average_copies(
                    gradients.compact(*task.examples(inputs, targets, draw), frozen=frozen),  # noqa: B023
                    multiplicity,  # noqa: B023
                )
                if own is None  # noqa: B023
                else own(inputs, targets)  # noqa: B023
            )
            clipped.add(vectors)  # noqa: B023

        examples()
        batch = statistics.median(_timed(examples)[0] for _ in range(3))
        release(clipped, phase=phase, step=0, key=key)  # the first call is no measure
        closing, released = _timed(lambda c=clipped, p=phase: release(c, phase=p, step=0, key=key))  # type: ignore[misc]
        policy.observe(phase.name, 0, released)
        if policy.trains(phase.name):
            closing += _timed(lambda g=geometry, r=released: g.lift(r))[0]  # type: ignore[misc]
        interval = policy.interval(phase.name)
        refreshes = 1 if interval is None else -(-phase.steps // interval)
        total += refreshes * first + phase.steps * (phase.batch_size / size * batch + later + closing)
    return total


def _public(search: Search, dataset: data.Dataset) -> PublicExamples | None:
    if search.public_source is None:
        return None
    size = search.population()
    found = data.load_public(search.public_source, limit=search.public_limit, seed=search.seed, set_size=size)
    return PublicExamples(
        inputs=dataset.normalization.apply(found.inputs),
        targets=found.targets,
        num_classes=found.num_classes,
        sets=found.sets,
    )


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    begun = time.perf_counter()
    found = call()
    return time.perf_counter() - begun, found
