"""The budget: what a trial may spend, and for which adjacency that is stated."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raydp import _validate

Adjacency = Literal["add_remove", "replace_one"]
ADJACENCIES: tuple[str, ...] = get_args(Adjacency)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The target (epsilon, delta) of every trial, under one adjacency.

    Attributes:
        epsilon: in (0, 1000].
        delta: in (0, 1). It should be well below 1/N; see :meth:`warn_if_delta_is_large`.
        adjacency: ``add_remove`` (data sets differ by one added or removed example: the sum of clipped
            vectors has sensitivity C) or ``replace_one`` (one example exchanged: sensitivity 2C). The two
            epsilons are not on the same footing and are never compared without saying so.

    Raises:
        InvalidValue: a field is out of range or not finite.
        UnknownName: the adjacency does not exist.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency = "add_remove"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.between("epsilon", self.epsilon, 0, 1000, low_open=True))
        object.__setattr__(self, "delta", _validate.between("delta", self.delta, 0, 1, low_open=True, high_open=True))
        _validate.one_of("adjacency", self.adjacency, ADJACENCIES)

    def warn_if_delta_is_large(self, population: int) -> None:
        """Warn when delta >= 1/N: releasing one example at random would then satisfy the definition."""
        if self.delta >= 1 / population:
            warnings.warn(
                f"delta = {self.delta:g} is not below 1/N = {1 / population:.3g} (N = {population}): a mechanism that "
                "publishes one random example would satisfy it. "
                f"Choose delta well below 1/N, such as {0.1 / population:.0e}.",
                stacklevel=2,
            )

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form: ``epsilon``, ``delta``, ``adjacency``."""
        return {"epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Budget:
        """Inverse of :meth:`to_json`."""
        return cls(epsilon=record["epsilon"], delta=record["delta"], adjacency=record["adjacency"])
