"""Linear-regression tasks with few directions that matter: the case study of DP-DeepSets (arXiv 2606.26772, section 4).

A task is a weight vector w. Its coordinates are independent, w_i = α_i·Unif(-1, 1) with α_i = i^-γ: few directions
matter, and which ones is public. Its examples are x, uniform on the sphere of radius √d, and y = wᵀx + z with
z ~ N(0, s²).

Each *member* of the family is one such task: a private data set of different people. Members are independent, so a
release on one says nothing about another: epsilons of different members do not add up (each person is in one of them).
Public tasks are drawn from the same family, and are never a member.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from raydp import _validate
from raydp.data.types import PrivateData, PublicData
from raydp.errors import InvalidValue, UnknownName

NAME = "regression"
POINTS = 512  # private examples where no limit says how many
PUBLIC_TASKS = 1000  # public tasks where no limit says how many
_PRIVATE, _PUBLIC, _HELD_OUT = 1, 2, 3  # addresses of randomness


@dataclass(frozen=True, kw_only=True)
class LinearTasks:
    """A family of tasks.

    Attributes:
        dimension: d.
        gamma: γ >= 0; the larger, the fewer directions matter (the theory needs γ > 1/2).
        noise_std: s of the observation noise.
        holdout: fresh examples of a member's task on which its model is measured.
    """

    dimension: int = 64
    gamma: float = 1.0
    noise_std: float = 1.0
    holdout: int = 2000

    def __post_init__(self) -> None:
        _validate.integer(f"{NAME}.dimension", self.dimension, low=1)
        _validate.between(f"{NAME}.gamma", self.gamma, 0, 100)
        _validate.between(f"{NAME}.noise_std", self.noise_std, 0, 1e6)
        _validate.integer(f"{NAME}.holdout", self.holdout, low=1)

    @property
    def scales(self) -> np.ndarray:
        """α, (d,)."""
        return np.arange(1, self.dimension + 1, dtype=np.float64) ** -self.gamma

    @property
    def energy(self) -> float:
        """E‖w‖² = Σ α_i²/3: the error of the answer 0."""
        return float((self.scales**2).sum() / 3)

    def weights(self, tasks: int, generator: np.random.Generator) -> np.ndarray:
        """w of each task, float64 (tasks, d)."""
        return self.scales * generator.uniform(-1, 1, (tasks, self.dimension))

    def examples(
        self, weights: np.ndarray, points: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """x float32 (tasks, points, d) and y float32 (tasks, points) for weights (tasks, d)."""
        x = generator.standard_normal((len(weights), points, self.dimension), dtype=np.float32)
        x *= np.sqrt(self.dimension) / np.linalg.norm(x, axis=2, keepdims=True)
        y = np.einsum("tnd,td->tn", x, weights.astype(np.float32))
        return x, y + self.noise_std * generator.standard_normal(y.shape, dtype=np.float32)

    def private(self, member: int, points: int) -> tuple[PrivateData, PublicData]:
        """A member's private examples, and fresh ones of its task with the true weights."""
        weights = self.weights(1, np.random.default_rng([_PRIVATE, member]))
        x, y = self.examples(weights, points, np.random.default_rng([_PRIVATE, member, points]))
        held_x, held_y = self.examples(weights, self.holdout, np.random.default_rng([_HELD_OUT, member]))
        private = PrivateData(name=f"{NAME} member {member}", inputs=x[0], targets=y[0])
        held = PublicData(
            name=f"{NAME} member {member} hold-out",
            inputs=held_x[0],
            targets=held_y[0],
            truth=weights[0].astype(np.float32),
        )
        return private, held

    def public(self, tasks: int, points: int) -> PublicData:
        """Fresh tasks of the family as public data sets; the same ones for every run, so that runs share what they
        learn from them."""
        generator = np.random.default_rng([_PUBLIC, tasks, points])
        x, y = self.examples(self.weights(tasks, generator), points, generator)
        return PublicData(
            name=f"{NAME}, {tasks} public tasks",
            inputs=x.reshape(-1, self.dimension),
            targets=y.reshape(-1),
            sets=np.arange(tasks * points, dtype=np.int64).reshape(tasks, points),
        )


def is_regression(name: str) -> bool:
    """Whether a data set's name means this family."""
    return name == NAME or name.startswith(f"{NAME}:")


def family(name: str) -> LinearTasks:
    """The family that a name means: ``regression``, or ``regression:dimension=16,gamma=2``.

    Raises:
        UnknownName: an option that the family lacks. InvalidValue: a value that is no number or breaks its rule.
    """
    fields = {item.name: float if isinstance(item.default, float) else int for item in dataclasses.fields(LinearTasks)}
    found: dict[str, float | int] = {}
    for part in name.partition(":")[2].split(",") if ":" in name else ():
        key, _, text = part.partition("=")
        if key not in fields:
            raise UnknownName(f"option of {NAME}", key, fields)
        try:
            found[key] = fields[key](text)
        except ValueError:
            raise InvalidValue(
                f"{NAME}.{key}", text, f"must be a number ({fields[key].__name__})", f"Write {key}=<number>."
            ) from None
    return LinearTasks(**found)  # type: ignore[arg-type]
