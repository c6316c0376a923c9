"""One run: a plan executed once, under one seed and one secret key, resumable at any point.

:func:`execute` is a generator: each report it yields is already durable, in this order: ledger, checkpoint, metrics. So
nothing of a step is visible before the ledger counts it, and what a crash destroys was never seen by anyone.

A run may be executed by several processes (:mod:`raydp.training.workers`). All of them draw the same batches, read
parts of them, and release the same noisy sums, so all have the same weights; the first alone writes files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raydp import _validate, data, models
from raydp._workers import ALONE, Workers, gather, own_part
from raydp.data import Batch, Dataset, Part
from raydp.data.augmentation import Augmentation, apply, draw
from raydp.errors import CorruptFile, Diverged, InvalidValue, RaydpError
from raydp.geometry import Geometry
from raydp.geometry.base import frozen_parameters
from raydp.geometry.rank_one import ExampleGradients
from raydp.methods import Method, PublicExamples, Setting, method
from raydp.methods.base import Config, Engine, GradientHyperparameters, Hyperparameters, Policy
from raydp.methods.hypernetwork_training import digest_of
from raydp.privacy.ledger import Ledger, LedgerEntry, LedgerRecorder, LedgerWriter
from raydp.privacy.mechanism import Phase
from raydp.privacy.noise import NoiseKey
from raydp.privacy.plan import Plan
from raydp.tasks import HeldOut, Task, task
from raydp.training import checkpoint, replay
from raydp.training.discretion import discreet
from raydp.training.gradients import PerExampleGradients, average_copies, equal_parts, made_up_example
from raydp.training.holdout import HoldoutQuery, fingerprint, phase_of, reports_of
from raydp.training.memory import Batches, MicroBatch
from raydp.training.optimizer import CoordinateOptimizer, WeightAverage, all_finite, learning_rate_factor
from raydp.training.step import private_gradient
from raydp.training.workers import as_one


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run executes and where it keeps its state.

    Attributes:
        directory: holds the ledger, the metrics and the checkpoints of this run.
        key_file: the run's secret key (mode 0600); made when absent, destroyed when the run is done.
        pairing_file: None, or a secret that several runs share on purpose: each phase then draws its noise by the
            lineage that leads to it, so runs share a phase's noise exactly when it is the same computation.
        insecure_seed: None, or the seed of a debugging run whose noise anyone can recompute. Never private.
        method, config: which method, with which hyperparameters.
        plan: the certified plan. Every noise multiplier comes from here.
        data, data_limit: the data set by name or path, and how many private examples are used at most.
        member: which private data set of a family.
        part: a secret part of the private examples, whose expected size the plan is made for; None takes all.
        task: what the model is for; None for what the data set says.
        public, public_limit: the public data set, if the method wants one, and how many of its examples are drawn.
        model: a model's name, or the file of a denoiser.
        seed: initial weights and public randomness. Never the noise.
        holdout_plan: the certified plan under which a private hold-out is measured through noise; None measures
            without noise, and then the metrics are public or labelled non-private.
        metric: what is released of a private hold-out; has a meaning with ``holdout_plan`` only.
        reports: how often the run evaluates, checkpoints and reports, at least once.
        micro_batch: at most so many gradients are held at once, and half of them where memory runs out; changes speed
            and memory, nothing else.
        engine: how per-example gradients come about; speed and memory only.
        precision: of forward and backward passes, float32 or bfloat16; clipping and noise are as ever.
        device: ``cpu`` or ``cuda``.
    """

    directory: Path
    key_file: Path
    method: str
    config: Config
    plan: Plan
    data: str
    model: str
    seed: int
    data_limit: int | None = None
    member: int = 0
    part: Part | None = None
    task: str | None = None
    public: str | None = None
    public_limit: int | None = None
    pairing_file: Path | None = None
    insecure_seed: int | None = None
    holdout_plan: Plan | None = None
    metric: str | None = None
    reports: int = 10
    micro_batch: int = 1024
    engine: str = "auto"
    precision: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        _validate.integer("reports", self.reports, low=1)
        _validate.integer("micro_batch", self.micro_batch, low=1)
        if self.holdout_plan is not None and self.pairing_file is not None:
            raise InvalidValue(
                "pairing_file",
                str(self.pairing_file),
                "would share the noise of a private hold-out between runs, whose metrics would differ by no noise",
                "Give the run a key of its own.",
            )

    @property
    def ledger_file(self) -> Path:
        return self.directory / "ledger.jsonl"

    @property
    def holdout_ledger_file(self) -> Path:
        return self.directory / "holdout-ledger.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.directory / "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became visible at a report.

    Attributes:
        step: logical steps done, of ``steps``.
        metrics: on the hold-out set, by the weights that the trial would release; of a private hold-out with a plan,
            the one metric, noised.
        diagnostics: numbers about the policy; functions of released quantities.
    """

    step: int
    steps: int
    metrics: Mapping[str, float]
    diagnostics: Mapping[str, float]

    @property
    def done(self) -> bool:
        return self.step == self.steps


def execute(spec: RunSpec, workers: Workers = ALONE) -> Iterator[Report]:
    """Run the plan, or what is left of it, yielding a report at each release.

    Every worker calls this with the same specification and iterates to the end; all get the same reports. Whatever ends
    one of them, its consumer's leaving included, ends the others. The directory, the key file and the data lie where
    every worker finds them.

    Raises:
        Diverged: the weights left the finite numbers; the steps so far are in the ledger.
        LedgerRefusal: the plan has no room for a step.
        WorkerFailed, WorkerLost: another worker ended with an error, or without a word.
        RaydpError: the state on disk does not allow to go on (for example, the key is gone or the data changed), a
            private step failed, or the workers do not have the same weights.
    """
    last: Report | None = None
    with as_one(workers), closing(_reports(spec, workers)) as reports:
        for report in reports:
            if report.done:  # the others are done as well, so nobody is left if the consumer stops here
                last = report
            else:
                yield report
    if last is not None:
        yield last


def _reports(spec: RunSpec, workers: Workers) -> Generator[Report, None, None]:
    """All reports that are left."""
    first = workers.rank == 0
    last = _shared(_last_report(spec) if first else None, workers)
    if last is not None and last.done:  # finished before; only the news of it was lost
        yield last
        return
    # The ledger is locked first: a process that was about to die may still be at work on this run. Leaving the block
    # commits also when an exception is about to make an outcome visible.
    with ExitStack() as ledgers:
        writer = held = None
        if first:
            spec.directory.mkdir(parents=True, exist_ok=True)
            writer = ledgers.enter_context(LedgerWriter(spec.ledger_file, spec.plan))
            if spec.holdout_plan is not None:
                held = ledgers.enter_context(LedgerWriter(spec.holdout_ledger_file, spec.holdout_plan))
        ledger = _followed(spec, writer, workers)
        seen = 0 if last is None else last.step
        yield from _Run(spec, ledger, held, seen=seen, workers=workers).reports()


def _followed(spec: RunSpec, writer: LedgerWriter | None, workers: Workers) -> LedgerRecorder:
    """The first worker's ledger, or one that follows it."""
    entries = workers.share(None if writer is None else [dataclasses.asdict(entry) for entry in writer.ledger.entries])
    if writer is not None:
        return writer
    assert entries is not None
    budget = spec.plan.budget
    existing = Ledger(
        plan_digest=spec.plan.digest,
        delta=budget.delta,
        adjacency=budget.adjacency,
        entries=tuple(LedgerEntry(**entry) for entry in entries),
    )
    return LedgerRecorder(spec.ledger_file, spec.plan, existing)


def _shared(report: Report | None, workers: Workers) -> Report | None:
    """The first worker's report, on all of them."""
    plain = workers.share(None if report is None else dataclasses.asdict(report))
    return None if plain is None else Report(**plain)


def _last_report(spec: RunSpec) -> Report | None:
    """The last report that became durable, or None. A torn last line (a crash while writing) is not a report."""
    if not spec.metrics_file.exists():
        return None
    lines = spec.metrics_file.read_bytes().split(b"\n")[:-1]
    if not lines:
        return None
    try:
        record = _validate.json_object(lines[-1])
        step = _validate.integer("step", record["step"], low=0, high=spec.plan.steps)
        metrics = {name: math.nan if value is None else value for name, value in record["metrics"].items()}
        return Report(step=step, steps=spec.plan.steps, metrics=metrics, diagnostics={})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"the last line of {spec.metrics_file} is damaged: {error}. Restore the file.") from error


class _Run:
    """The mutable state of a run: model, optimiser, average, policy and position."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: LedgerRecorder,
        holdout_ledger: LedgerWriter | None = None,
        *,
        seen: int = 0,
        workers: Workers = ALONE,
    ) -> None:
        self.spec = spec
        self.ledger = ledger
        self.workers = workers
        self.seen = seen  # steps whose outcome has been reported
        self.method: Method = method(spec.method)
        self.hyperparameters: Hyperparameters = self.method.parse(spec.config)
        self.dataset: Dataset = data.load(spec.data, limit=spec.data_limit, member=spec.member)
        if spec.part is not None:
            self.dataset = spec.part.of(self.dataset)
        self.task: Task = task(spec.task or self.dataset.task)
        self._check_plan()
        self._check_task()
        self._check_holdout_plan()
        private = self.dataset.private
        self.model: nn.Module = models.build_model(
            spec.model, input_shape=private.input_shape, outputs=private.outputs, seed=spec.seed
        ).to(spec.device)
        models.validate_model(self.model)
        # How the weights move; None for a method whose phases only observe.
        self.recipe = self.hyperparameters if isinstance(self.hyperparameters, GradientHyperparameters) else None
        self.augmentation = Augmentation()
        if self.recipe is not None:
            self.augmentation = Augmentation(
                kind=self.recipe.augmentation, multiplicity=self.recipe.augmentation_multiplicity
            )
        probe = models.public_probe(spec.model, private.input_shape)
        self.gradients = PerExampleGradients(
            self.model,
            self.task.loss,
            probe=None if probe is None else probe.to(spec.device),
            example=made_up_example(self.task, private, copies=self.augmentation.multiplicity, device=spec.device),
            engine=spec.engine,
            precision=spec.precision,
        )
        self.parameters = self.gradients.parameters
        self.public = self._public()
        setting = Setting(
            plan=spec.plan,
            model=self.model,
            seed=spec.seed,
            public=self.public,
            input_shape=private.input_shape,
            task=self.task,
            num_classes=private.num_classes if self.task.classes else None,
            workers=workers,
        )
        self.policy: Policy = self.method.policy(self.hyperparameters, setting)
        self.geometry: Geometry | None = None  # of the last step that trained, and where that was
        self.geometry_at: tuple[str, int] | None = None
        self.optimizer: CoordinateOptimizer | None = None
        self.step = 0  # logical steps done, over all phases
        self.conditions = replay.conditions(
            device=spec.device,
            micro_batch=spec.micro_batch,
            engine=spec.engine,
            precision=spec.precision,
            config=spec.config,
            public=None if self.public is None else self.public.digest(),
            model=models.model_digest(spec.model),
            workers=workers.count,
        )
        self.conditions = replay.agreed(gather(workers, self.conditions))
        # A worker whose memory ran out may have halved its own; a run that goes on takes the smallest of all.
        self.micro_batch = MicroBatch(spec.micro_batch, spec.directory / f"micro-batch-{workers.rank}")
        self.first_size = self.micro_batch.size = min(gather(workers, self.micro_batch.size))
        self.conditions["micro_batch"] = self.first_size
        root = self._root_key()
        self.keys = self._keys(root)
        self.holdout = None if holdout_ledger is None else self._holdout(holdout_ledger, root)
        mark = private.fingerprint if spec.holdout_plan is None else fingerprint(private.fingerprint, self.dataset)
        self.data_mark = replay.data_mark(root, mark)
        if workers.share(self.data_mark) != self.data_mark:
            raise RaydpError(
                f"the private data of worker {workers.rank}, or its key, are not those of worker 0. Give all workers "
                "the same files."
            )
        state = workers.share(checkpoint.load_latest(spec.directory, device=spec.device) if workers.rank == 0 else None)
        replay.check(state, seen=self.seen, data_mark=self.data_mark, conditions=self.conditions, where=spec.directory)
        if state is None:
            self.policy.prepare()
            workers.spread(list(self.model.state_dict().values()))  # machines may differ in the last bit
        decay = 0.0 if self.recipe is None else self.recipe.ema_decay
        self.average = WeightAverage(self.parameters, decay) if decay else None  # starts from the prepared weights
        if state is not None:
            self._restore(state)

    def _public(self) -> PublicExamples | None:
        """The search's public examples, of the shape of the private ones and disjoint from them."""
        if self.spec.public is None:
            return None
        public = data.load_public(
            self.spec.public,
            limit=self.spec.public_limit,
            seed=self.spec.seed,
            set_size=len(self.dataset.private),
        )
        data.check_public(public, self.dataset.private)
        return PublicExamples(
            inputs=self.dataset.normalization.apply(public.inputs).to(self.spec.device),
            targets=public.targets.to(self.spec.device),
            num_classes=public.num_classes if self.task.classes else None,
            sets=None if public.sets is None else public.sets.to(self.spec.device),
        )

    def _check_task(self) -> None:
        """Method, data and task must suit each other."""
        private = self.dataset.private
        self.method.check_task(self.task)
        self.task.check(
            self.dataset.name,
            input_shape=private.input_shape,
            num_classes=private.num_classes,
            num_labels=private.num_labels,
        )

    def _check_plan(self) -> None:
        """The plan's sizes must be the data's: q = B/N is only true for this N."""
        population = len(self.dataset.private)
        for phase in self.spec.plan.phases:
            if phase.spec.population != population:
                raise InvalidValue(
                    f"{phase.name}.population",
                    phase.spec.population,
                    f"must equal the number of private examples in {self.dataset.name!r}, N = {population}",
                    "Make the plan for this data set.",
                )
        wanted = self.method.phases(self.hyperparameters, population=population)
        if tuple(phase.spec for phase in self.spec.plan.phases) != wanted:
            raise InvalidValue(
                "plan",
                self.spec.plan.digest,
                "does not have the phases that the method asks for with this config",
                "Make the plan from the same config.",
            )

    def _check_holdout_plan(self) -> None:
        """A hold-out's plan must be one of exactly this run's reports."""
        spec = self.spec
        if spec.holdout_plan is None:
            return
        wanted = phase_of(self.task, spec.metric or "", reports=len(self.marks), population=len(self.dataset.holdout))
        if tuple(phase.spec for phase in spec.holdout_plan.phases) != (wanted,):
            raise InvalidValue(
                "holdout_plan",
                spec.holdout_plan.digest,
                f"must be one of {len(self.marks)} reports of {spec.metric!r} on the {len(self.dataset.holdout)} "
                f"hold-out examples of {self.dataset.name!r}",
                "Make the plan for this data set.",
            )

    def _holdout(self, ledger: LedgerWriter, root: NoiseKey) -> HoldoutQuery:
        examples = held_out_of(self.dataset, seed=self.spec.seed)
        return HoldoutQuery(ledger, task=self.task, metric=self.spec.metric or "", examples=examples, key=root)

    def _root_key(self) -> NoiseKey:
        """The secret that all of the run's draws follow from."""
        spec = self.spec
        if spec.insecure_seed is not None:
            return NoiseKey.insecure(spec.insecure_seed).derive(spec.seed)
        if spec.pairing_file is not None:
            return NoiseKey.load(spec.pairing_file)
        if self.workers.rank == 0 and not spec.key_file.exists():
            if self.ledger.ledger.entries:
                raise RaydpError(
                    f"{spec.ledger_file} records steps, but the key {spec.key_file} is gone, so they cannot be "
                    "replayed with the noise that was spent. The run is over; start a new trial."
                )
            NoiseKey.generate().save(spec.key_file)
        self.workers.wait()
        if not spec.key_file.exists():
            raise RaydpError(
                f"worker {self.workers.rank} does not find the key {spec.key_file} that worker 0 has. All workers need "
                "the run's directory and key under the same path: use storage that they share."
            )
        return NoiseKey.load(spec.key_file)

    def _keys(self, root: NoiseKey) -> dict[str, NoiseKey]:
        """The secret key of each phase."""
        if self.spec.pairing_file is not None and self.spec.insecure_seed is None:
            return {name: root.derive("lineage", digest) for name, digest in self._lineages().items()}
        return {phase.name: root for phase in self.spec.plan.phases}

    def _lineages(self) -> dict[str, str]:
        """Digest of everything that decides what a phase releases, chained over the phases before it."""
        spec = self.spec
        origin = {
            "data": self.dataset.private.fingerprint,
            "model": spec.model,
            "seed": spec.seed,
            "task": self.task.name,
            "steps": spec.plan.steps,
            "adjacency": spec.plan.budget.adjacency,
            # The public examples among them. Sums that differ in their last bits only must not have equal noise either.
            "conditions": {name: value for name, value in self.conditions.items() if name != "config"},
        }
        digest, chain = json.dumps(origin, sort_keys=True), {}
        for phase in spec.plan.phases:
            record = {"phase": phase.to_json(), "config": self.method.lineage(self.hyperparameters, phase.name)}
            digest = hashlib.sha256((digest + json.dumps(record, sort_keys=True)).encode()).hexdigest()
            chain[phase.name] = digest
        return chain

    @property
    def marks(self) -> list[int]:
        """The steps after which the run reports, the last one included."""
        steps = self.spec.plan.steps
        count = reports_of(self.spec.reports, steps)
        return [round(steps * (index + 1) / count) for index in range(count)]

    def reports(self) -> Iterator[Report]:
        """What is left of the plan, step by step, yielding at each release."""
        marks = self.marks
        if self.step > self.seen:  # a crash between a checkpoint and its metrics
            yield self._release()
        for phase, step in self._steps_left():
            self._advance(phase, step)
            if self.step in marks:
                yield self._release()

    def _steps_left(self) -> Iterator[tuple[Phase, int]]:
        everything = [(phase, step) for phase in self.spec.plan.phases for step in range(phase.steps)]
        yield from everything[self.step :]

    def _advance(self, phase: Phase, step: int) -> None:
        """One logical step."""
        geometry = self.policy.geometry(phase.name, step)
        key = self.keys[phase.name]
        with discreet(f"step {step} of phase {phase.name!r}", such_as=", such as the size of the batch"):
            released = self._query(phase, step, geometry, key)
        self.policy.observe(phase.name, step, released)
        if self.policy.trains(phase.name):
            self._train(geometry, released, phase, step)
        self.step += 1
        if not all_finite(self.parameters):
            raise Diverged(f"the weights are not finite after step {self.step} of {self.spec.plan.steps}")

    def _query(self, phase: Phase, step: int, geometry: Geometry, key: NoiseKey) -> list[Tensor]:
        """All of a step that touches private examples; what it returns is noised."""
        batch = self.dataset.private.sample(key=key, phase=phase, step=step, ledger=self.ledger)
        engine = self.policy.engine(phase.name)

        def shrink() -> None:
            preferred = self.gradients.compact_batch if engine is None else engine.preferred_batch
            self.micro_batch.halve(min(self.micro_batch.size, preferred))
            self.conditions["micro_batch"] = self.micro_batch.size

        def vectors() -> Iterator[Sequence[ExampleGradients]]:
            if engine is None:
                return self._gradients(batch, phase, step, key, geometry)
            return self._vectors(engine, batch)

        return private_gradient(
            Batches(vectors),
            geometry=geometry,
            phase=phase,
            step=step,
            key=key,
            device=self.spec.device,
            workers=self.workers,
            shapes=self.gradients.shapes if engine is None else {},
            shrink=shrink,
        )

    def _train(self, geometry: Geometry, released: list[Tensor], phase: Phase, step: int) -> None:
        """Move the weights along what a step released."""
        assert self.recipe is not None  # only gradient methods train
        if self.optimizer is None or self.geometry is None or geometry.support is not self.geometry.support:
            # A new optimiser: momentum of another support would move coordinates that are frozen now. A geometry that
            # changes without its support (a new curvature) lifts into the same coordinates, so momentum goes on.
            self.optimizer = self._new_optimizer(self.recipe, geometry)
        self.geometry, self.geometry_at = geometry, (phase.name, step)
        updates = self._updates(self.step)
        rate = self.method.learning_rate(self.hyperparameters, phase.name)
        rate *= learning_rate_factor(self.recipe.schedule, updates, self._updates(self.spec.plan.steps))
        self.optimizer.step(self.policy.direction(phase.name, step, geometry.lift(released)), rate)
        if self.average is not None:
            self.average.update(updates)

    def _updates(self, steps: int) -> int:
        """How many of the first logical steps move the weights; schedules and the average go by these."""
        updates = 0
        for phase in self.spec.plan.phases:
            inside = min(steps, phase.steps)
            updates += inside if self.policy.trains(phase.name) else 0
            steps -= inside
        return updates

    def _new_optimizer(self, recipe: GradientHyperparameters, geometry: Geometry) -> CoordinateOptimizer:
        return CoordinateOptimizer(
            self.parameters,
            geometry.support,
            kind=recipe.optimizer,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )

    def _gradients(
        self, batch: Batch, phase: Phase, step: int, key: NoiseKey, geometry: Geometry
    ) -> Iterator[list[ExampleGradients]]:
        """Per-example gradients of this worker's part of the logical batch, a micro-batch at a time: of each example's
        augmented copies, as the task randomises them, averaged. What is drawn is drawn for the whole batch."""
        n, multiplicity = len(batch), self.augmentation.multiplicity
        views = draw(self.augmentation, n, key.generator("augment", phase.name, step))
        shape = self.dataset.private.input_shape
        noise = self.task.draw(n * multiplicity, shape, key.generator("task", phase.name, step))
        frozen = frozen_parameters(geometry)
        for part in self._own_parts(n, self.gradients.compact_batch, multiplicity):
            inputs, targets = self._placed(batch, part)
            if len(shape) == 3:
                inputs = apply(inputs, views[part])
            copies = slice(part.start * multiplicity, part.stop * multiplicity)
            targets = targets.repeat_interleave(multiplicity, dim=0)
            inputs, targets = self.task.examples(inputs, targets, None if noise is None else noise[copies])
            yield average_copies(self.gradients.compact(inputs, targets, frozen=frozen), multiplicity)

    def _vectors(self, engine: Engine, batch: Batch) -> Iterator[list[Tensor]]:
        """What an engine of the policy's own computes of this worker's examples themselves, a micro-batch at a time."""
        for part in self._own_parts(len(batch), engine.preferred_batch):
            yield engine(*self._placed(batch, part))

    def _own_parts(self, count: int, preferred: int, multiplicity: int = 1) -> list[slice]:
        """This worker's micro-batches of a logical batch of ``count`` examples; it may have none.

        All workers cut the batch alike, at the size that they began with. Whose memory ran out cuts its own parts on.
        """
        first, now = (max(1, min(n, preferred) // multiplicity) for n in (self.first_size, self.micro_batch.size))
        parts = equal_parts(count, first, workers=self.workers.count)
        return [
            slice(part.start + piece.start, part.start + piece.stop)
            for part in parts[own_part(len(parts), self.workers)]
            for piece in equal_parts(part.stop - part.start, now)
        ]

    def _placed(self, batch: Batch, part: slice) -> tuple[Tensor, Tensor]:
        """Normalised inputs and targets of a part of a batch, on the device."""
        inputs = self.dataset.normalization.apply(batch.inputs[part].to(self.spec.device))
        return inputs, batch.targets[part].to(self.spec.device)

    def _release(self) -> Report:
        """The release barrier: ledger, checkpoint, metrics, and only then the report, on all workers."""
        self._check_equal_weights()
        report = _shared(self._published() if self.workers.rank == 0 else None, self.workers)
        assert report is not None
        return report

    def _published(self) -> Report:
        """The report, once it is durable: the first worker's part of the release."""
        assert isinstance(self.ledger, LedgerWriter)
        self.ledger.commit()
        checkpoint.save(self.spec.directory, self.step, self._state())
        report = Report(
            step=self.step,
            steps=self.spec.plan.steps,
            metrics=self._evaluate(done=self.step == self.spec.plan.steps),
            diagnostics=self.policy.diagnostics(),
        )
        # NaN is not JSON; null stands for what is not finite.
        found = {**report.metrics, **report.diagnostics}.items()
        told = {name: value if math.isfinite(value) else None for name, value in found}
        line = json.dumps({"step": report.step, "metrics": told}, allow_nan=False)
        if report.done:
            torch.save(self._released_weights(), self.spec.directory / "weights.pt")
        _append_durably(self.spec.metrics_file, line)
        if report.done:
            checkpoint.remove(self.spec.directory)
            NoiseKey.destroy(self.spec.key_file)
        return report

    def _check_equal_weights(self) -> None:
        """All workers computed the same weights, before anything of them is kept.

        Raises:
            RaydpError: this one did not. WorkerFailed: another one did not.
        """
        if self.workers.count == 1:
            return
        own = digest_of({}, self.model.state_dict())
        if self.workers.share(own) != own:
            raise RaydpError(
                f"the weights of worker {self.workers.rank} are not those of worker 0 after step {self.step} of "
                f"{self.spec.plan.steps}: equal sums moved them differently. Nothing was released since the last "
                "report. Use machines of one kind, or a single worker."
            )
        self.workers.wait()

    def _released_weights(self) -> dict[str, Tensor]:
        """State of the model that the metrics were measured on: the averaged weights where there is an average."""
        state = dict(self.model.state_dict())
        if self.average is not None:
            state.update(zip(self.gradients.names, self.average.values, strict=True))
        return state

    @contextmanager
    def _released(self) -> Iterator[None]:
        """The model with the weights that would be released: the averaged ones where there is an average."""
        if self.average is None:
            yield
            return
        current = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.average.values, strict=True):
                parameter.copy_(value)
            yield
            for parameter, value in zip(self.parameters, current, strict=True):
                parameter.copy_(value)

    def _evaluate(self, *, done: bool) -> dict[str, float]:
        if self.holdout is not None:
            with self._released():
                return self.holdout.release(self.model, self.marks.index(self.step))
        held_out = held_out_of(self.dataset, seed=self.spec.seed)
        with self._released():
            metrics = self.task.evaluate(self.model, held_out)
            if done:
                self.task.keep(self.model, held_out, self.spec.directory)
        return metrics

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "plan": self.spec.plan.digest,
            "data": self.data_mark,
            "conditions": self.conditions,
            "model": self.model.state_dict(),
            "policy": self.policy.state_dict(),
            "geometry_at": None if self.geometry_at is None else list(self.geometry_at),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.values,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state["plan"] != self.spec.plan.digest:
            raise RaydpError(f"the checkpoint in {self.spec.directory} belongs to another plan; start a new trial.")
        self.step = int(state["step"])
        self.model.load_state_dict(state["model"])
        self.policy.load_state_dict(state["policy"])
        if self.average is not None:
            self.average.values = state["average"]
        if state["optimizer"] is not None and self.recipe is not None:
            phase, step = state["geometry_at"]
            self.geometry, self.geometry_at = self.policy.geometry(phase, step), (phase, step)
            self.optimizer = self._new_optimizer(self.recipe, self.geometry)
            self.optimizer.load_state_dict(state["optimizer"])


def held_out_of(dataset: Dataset, *, seed: int = 0) -> HeldOut:
    """The data set's hold-out as a task measures on it; the set is public, or the metrics are stated as private."""
    held = dataset.holdout
    return HeldOut(
        inputs=held.inputs,
        targets=held.targets,
        normalize=dataset.normalization.apply,
        num_classes=held.num_classes,
        truth=held.truth,
        seed=seed,
    )


def _append_durably(path: Path, line: str) -> None:
    """Append one line and fsync; a torn line left by a crash is cut off first."""
    with open(path, "ab+") as file:
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


__all__ = ["Report", "RunSpec", "execute", "held_out_of"]
