"""The budget: what a trial may spend, and for which adjacency that is stated."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raydp import _validate
from raydp.errors import InvalidValue

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
        further: more (epsilon, delta) at which the trial must be private as well, each with epsilon >= 0. A search
            under random stopping needs two points of a trial's privacy profile; for every other one this is empty.

    Raises:
        InvalidValue: a field is out of range or not finite.
        UnknownName: the adjacency does not exist.

    >>> from raydp import Budget
    >>> Budget(epsilon=3.0, delta=1e-5)
    Budget(epsilon=3.0, delta=1e-05, adjacency='add_remove', further=())
    >>> Budget(epsilon=-1.0, delta=1e-5)
    Traceback (most recent call last):
        ...
    raydp.errors.InvalidValue: epsilon = -1.0: must lie in (0, 1000]. Choose epsilon inside (0, 1000].
    """

    epsilon: float
    delta: float
    adjacency: Adjacency = "add_remove"
    further: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.between("epsilon", self.epsilon, 0, 1000, low_open=True))
        object.__setattr__(self, "delta", _validate.between("delta", self.delta, 0, 1, low_open=True, high_open=True))
        _validate.one_of("adjacency", self.adjacency, ADJACENCIES)
        if not isinstance(self.further, tuple | list) or any(not _is_pair(point) for point in self.further):
            raise InvalidValue(
                "further", self.further, "must be pairs (epsilon, delta)", "Write further=((0.4, 1e-2),)."
            )
        points = [
            (
                _validate.between("further.epsilon", epsilon, 0, 1000),
                _validate.between("further.delta", delta, 0, 1, low_open=True, high_open=True),
            )
            for epsilon, delta in self.further
        ]
        object.__setattr__(self, "further", tuple(points))

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
        """The stable JSON form: ``epsilon``, ``delta``, ``adjacency``, and ``further`` where there is more.

        >>> from raydp import Budget
        >>> Budget(epsilon=3.0, delta=1e-5).to_json()
        {'epsilon': 3.0, 'delta': 1e-05, 'adjacency': 'add_remove'}
        """
        record: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency}
        if self.further:
            record["further"] = [list(point) for point in self.further]
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Budget:
        """Inverse of :meth:`to_json`."""
        return cls(
            epsilon=record["epsilon"],
            delta=record["delta"],
            adjacency=record["adjacency"],
            further=tuple(tuple(point) for point in record.get("further", ())),
        )


def _is_pair(point: object) -> bool:
    return isinstance(point, tuple | list) and len(point) == 2
