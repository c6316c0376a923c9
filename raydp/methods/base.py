"""What a method is: phases, a geometry for each step, and what happens between the phases.

A method never sees the data. It asks for phases (pure), and gives a *policy*, which is told what every step released
and
answers which geometry the next step uses. So nothing that steers training can touch an un-noised private quantity.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from raydp import _validate
from raydp._workers import ALONE, Workers
from raydp.errors import InvalidValue, UnknownName
from raydp.geometry import Geometry
from raydp.privacy.mechanism import PhaseSpec
from raydp.privacy.plan import Plan
from raydp.tasks import TASKS, Task

OPTIMIZERS = ("sgd", "adam")
#: In which the passes through a model can be computed; clipping and noise are always float32 and exact.
ENGINES = ("auto", "materialized", "vmap")  # how per-example gradients come about
PRECISIONS = ("float32", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine", "warmup_cosine")

Scalar = str | int | float | bool | None
Config = Mapping[str, Scalar]


def option(default: Scalar, help: str) -> Any:
    """A hyperparameter: its default and one line of help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What every method has."""

    clip_norm: float = option(1.0, "C, one L2 norm over everything that is summed of an example")

    def __post_init__(self) -> None:
        _validate.positive("clip_norm", self.clip_norm)


@dataclass(frozen=True, kw_only=True)
class GradientHyperparameters(Hyperparameters):
    """Hyperparameters that every gradient method shares. Times are in epochs of floor(N/B) logical steps."""

    learning_rate: float = option(0.5, "step size; the update is the noisy sum divided by the expected batch size")
    epochs: int = option(10, "passes over the data, of floor(N/B) logical steps each")
    steps: int | None = option(None, "logical steps in all; none takes those of the epochs")
    batch_size: int = option(256, "expected logical batch size B = q·N; the divisor of every update")
    clip_norm: float = option(1.0, "C, one L2 norm over all trained coordinates of an example")
    optimizer: str = option("sgd", "sgd or adam, fed with the private gradient")
    momentum: float = option(0.0, "momentum of sgd, on the private gradient; reset when the support changes")
    weight_decay: float = option(0.0, "added to the private gradient of the trained coordinates")
    schedule: str = option("constant", "learning-rate schedule over all steps: constant, linear, cosine, warmup_cosine")
    ema_decay: float = option(0.0, "decay of the weight average used for evaluation; 0 evaluates the last weights")
    augmentation: str = option("none", "none, crop (pad and crop) or crop_flip, on each private example")
    augmentation_multiplicity: int = option(1, "K augmented copies whose gradients are averaged before clipping")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.positive("learning_rate", self.learning_rate)
        _validate.integer("epochs", self.epochs, low=1)
        if self.steps is not None:
            _validate.integer("steps", self.steps, low=1)
            refuse_unused(self, ("epochs",), because="steps")
        _validate.integer("batch_size", self.batch_size, low=1)
        _validate.one_of("optimizer", self.optimizer, OPTIMIZERS)
        _validate.between("momentum", self.momentum, 0, 1, high_open=True)
        _validate.between("weight_decay", self.weight_decay, 0, 1)
        _validate.one_of("schedule", self.schedule, SCHEDULES)
        _validate.between("ema_decay", self.ema_decay, 0, 1, high_open=True)
        _validate.one_of("augmentation", self.augmentation, ("none", "crop", "crop_flip"))
        _validate.integer("augmentation_multiplicity", self.augmentation_multiplicity, low=1)
        if self.augmentation == "none" and self.augmentation_multiplicity > 1:
            raise InvalidValue(
                "augmentation_multiplicity",
                self.augmentation_multiplicity,
                "has no effect with augmentation = 'none'",
                "Set augmentation, or leave the multiplicity at 1.",
            )
        if self.optimizer == "adam" and self.momentum:
            raise InvalidValue("momentum", self.momentum, "is not used by optimizer = 'adam'", "Leave momentum at 0.")

    def steps_per_epoch(self, population: int) -> int:
        """floor(N/B), at least 1. Steps are integers; the sample rate is derived from the sizes, never the reverse."""
        return max(1, population // self.batch_size)

    def total_steps(self, population: int) -> int:
        """Logical steps of all phases together."""
        return self.epochs * self.steps_per_epoch(population) if self.steps is None else self.steps

    def total_epochs(self, population: int) -> int:
        """Epochs that have begun by the last step."""
        return -(-self.total_steps(population) // self.steps_per_epoch(population))


def refuse_unused(hyperparameters: Hyperparameters, names: Sequence[str], *, because: str) -> None:
    """Refuse hyperparameters that were changed from their defaults but have no effect.

    Raises:
        InvalidValue: naming the first of ``names`` that was changed; ``because`` says under which setting it is unused.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(hyperparameters)}
    for name in names:
        value = getattr(hyperparameters, name)
        if value != defaults[name]:
            raise InvalidValue(name, value, f"has no effect with {because}", f"Leave {name} out.")


@dataclass(frozen=True, kw_only=True)
class PublicExamples:
    """Public examples as a method sees them.

    Attributes:
        inputs: (n, C, H, W) or (n, d), float, normalised like the private ones.
        targets: (n,): classes of the public label set, which may differ from the private one, or numbers.
        num_classes: of the public label set; None where targets are numbers.
        sets: None, or (M, m), the positions of the examples of M public data sets.
    """

    inputs: Tensor
    targets: Tensor
    num_classes: int | None = None
    sets: Tensor | None = None

    def digest(self) -> str:
        """SHA-256 (hex) of the examples: what was computed from them depends on nothing else public."""
        found = hashlib.sha256(repr((tuple(self.inputs.shape), self.num_classes)).encode())
        for tensor in (self.inputs, self.targets, *(() if self.sets is None else (self.sets,))):
            found.update(tensor.cpu().contiguous().numpy().data)
        return found.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a policy is told about the run that it works in. Nothing in it is an un-noised private quantity.

    Attributes:
        plan: the certified plan.
        model: the model in training; its weights are private *outputs*, so whatever is computed from them and from
            public data is post-processing.
        seed: drives public randomness only.
        public: public examples, or None where the search names none.
        input_shape: (C, H, W) of the images or (d,) of the features, a public constant; None where there are none.
        task: what the model is for: its loss.
        num_classes: of the private targets, a public constant; None where they are numbers.
        workers: the processes of the run, which may share out what is computed from public examples. All have a policy,
            and all of these must stay the same.
    """

    plan: Plan
    model: nn.Module
    seed: int
    public: PublicExamples | None = None
    input_shape: tuple[int, ...] | None = None
    task: Task = TASKS["classification"]
    num_classes: int | None = None
    workers: Workers = ALONE

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trainable parameters, in the order of every list of tensors."""
        return tuple(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each trainable parameter."""
        return tuple(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)


class Engine(Protocol):
    """What a phase computes of each private example: the vector that is projected, clipped and summed.

    Each example's vector must be a function of that example and of released or public quantities alone: one that
    depended on the other examples of the batch (their number, its place among them) would break the sensitivity.

    Attributes:
        preferred_batch: so many examples at a time are fast; a larger batch costs memory.
    """

    preferred_batch: int

    def __call__(self, inputs: Tensor, targets: Tensor, /) -> list[Tensor]:
        """Tensors (n, …) for normalised inputs (n, …) and targets (n,), n >= 0."""
        ...


class Policy(ABC):
    """A method at work in one run: chooses the geometry of each step from what earlier steps released."""

    def prepare(self) -> None:
        """Before the first step of a new run (not on a resume): change the model by public means only."""

    @abstractmethod
    def geometry(self, phase: str, step: int) -> Geometry:
        """The geometry of this step. The same object as long as nothing changes."""

    def engine(self, phase: str) -> Engine | None:
        """What this phase computes of each example; None for the gradients of its loss."""
        return None

    def direction(self, phase: str, step: int, released: list[Tensor]) -> list[Tensor]:
        """What the optimiser is given for a step: the released average, lifted, or a function of it and public data.

        Args:
            released: flat, the trained entries of each parameter.
        """
        return released

    def interval(self, phase: str) -> int | None:
        """Steps between two estimates on public examples, the first at step 0; None if there is one at most."""
        return None

    def trains(self, phase: str) -> bool:
        """Whether the steps of this phase move the weights. Where not, what they release is only observed."""
        return True

    def observe(self, phase: str, step: int, released: Sequence[Tensor]) -> None:
        """See what a step released: the noisy average in the step's coordinates, one flat tensor a parameter."""

    def diagnostics(self) -> dict[str, float]:
        """Numbers about the policy that are functions of released quantities, so private-safe to log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after a crash (tensors and plain values)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""


class Method(ABC):
    """Phases + a geometry for each + what happens between them.

    Attributes:
        name, summary: for people.
        hyperparameters: the dataclass of its hyperparameters. Where it is no :class:`GradientHyperparameters`, no phase
            may train: there would be no learning rate.
        tasks: names of the tasks that it can train; None for all.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    hyperparameters: ClassVar[type[Hyperparameters]]
    tasks: ClassVar[tuple[str, ...] | None] = None

    def check_task(self, task: Task) -> None:
        """Raises InvalidValue: the method is not for this task."""
        if self.tasks is not None and task.name not in self.tasks:
            raise InvalidValue(
                "task",
                task.name,
                f"is none that {self.name} can train, which needs {' or '.join(self.tasks)}",
                "Choose another method, or data of that task.",
            )

    def parse(self, config: Config) -> Hyperparameters:
        """Check a config against the method's hyperparameters and fill in the defaults.

        Raises:
            UnknownName: the config names a parameter that the method lacks (a knob is never silently ignored).
            InvalidValue: a value has the wrong type or breaks its rule.
        """
        types = hyperparameter_types(self.hyperparameters)
        for name in config:
            if name not in types:
                raise UnknownName(f"hyperparameter of {self.name}", name, types)
        values: dict[str, Any] = {name: coerce(name, value, types[name]) for name, value in config.items()}
        return self.hyperparameters(**values)

    def phases(self, hyperparameters: Any, *, population: int) -> tuple[PhaseSpec, ...]:
        """The phases for N = ``population`` private examples, noise unsolved. Pure; spends nothing.

        Unless a method says otherwise: one phase, ``train``, with the budget to itself.
        """
        return (
            PhaseSpec(
                name="train",
                steps=hyperparameters.total_steps(population),
                batch_size=hyperparameters.batch_size,
                population=population,
                clip_norm=hyperparameters.clip_norm,
            ),
        )

    @abstractmethod
    def policy(self, hyperparameters: Any, setting: Setting) -> Policy:
        """The method at work in one run."""

    def uses_public(self, hyperparameters: Any) -> bool:
        """Whether a run with these hyperparameters needs public examples."""
        return False

    def learning_rate(self, hyperparameters: Any, phase: str) -> float:
        """The base learning rate of a phase that trains, before the schedule."""
        return float(hyperparameters.learning_rate)

    def lineage(self, hyperparameters: Any, phase: str) -> dict[str, Scalar]:
        """Everything of the config that decides what this phase releases, given what the earlier phases released.

        Runs that are paired on purpose share noise in a phase exactly when the lineages up to it are equal, so that the
        phase is the same computation run twice; whatever differs gets independent noise.
        """
        return {"method": self.name, **dataclasses.asdict(hyperparameters)}


def hyperparameter_types(cls: type) -> dict[str, Any]:
    """Name -> annotated type of a hyperparameter dataclass."""
    hints = get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def coerce(name: str, value: Scalar, annotation: Any) -> Scalar:
    """Check a value's type; an int is taken where a float is asked, nothing else is converted."""
    allowed = get_args(annotation) if get_origin(annotation) in (Union, type(int | None)) else (annotation,)
    if value is None and type(None) in allowed:
        return None
    if type(value) in allowed:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
        return _validate.real(name, value)
    wanted = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
    raise InvalidValue(name, value, f"must be {wanted}, not {type(value).__name__}", f"Write {name} as {wanted}.")
