"""The geometry: the linear map in which per-example gradients are clipped and noised.

A private step is always ``lift(noise(sum(clip(project(per-example gradients)))))``. The privacy of a step does not
depend on the geometry, as long as it is a function of public data and of earlier private outputs: the vectors that are
clipped are the projected ones, so each example moves the sum by at most C whatever the map is.

Where the map is linear and dear, the step may be taken as ``lift(noise(project(sum(clip(gradients)))))`` with the
lengths of the projected vectors: the same sum, with one projection a step instead of one an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from raydp.geometry.rank_one import ExampleGradients


class Geometry(Protocol):
    """Projects per-example gradients into coordinates, and lifts what was released back.

    Attributes:
        sizes: the number of coordinates of each tensor that is released; noise is drawn on exactly these. A tensor
            holds the coordinates of a parameter, or of a block of several.
        support: None when every parameter entry is trained; else, for each parameter tensor, the sorted flat indices
            (int64) of the entries that are trained. All others stay frozen. The same object as long as nothing
            changes: the optimiser starts anew with another.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def support(self) -> tuple[Tensor, ...] | None: ...

    def project(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Map per-example gradients (n, *shape) to coordinates (n, size), one tensor for each of ``sizes``."""
        ...

    def lift(self, released: Sequence[Tensor]) -> list[Tensor]:
        """Map released averages (size,) to updates of the trained entries, flat, one tensor for each parameter."""
        ...


@runtime_checkable
class MeasuredGeometry(Geometry, Protocol):
    """A geometry whose ``project`` is linear and which finds the lengths of coordinates without building them."""

    @property
    def parameter_sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter tensor."""
        ...

    @property
    def stretches(self) -> tuple[float, float]:
        """The smallest and the largest factor by which ``project`` changes a length."""
        ...

    def lengths(self, gradients: Sequence[ExampleGradients]) -> Tensor:
        """‖project(g_i)‖ over all tensors together, (n,), float64, from per-example gradients.

        Never below the exact length by more than the clipping's own margin: an example is scaled by C over this.
        """
        ...


@runtime_checkable
class SeparableGeometry(Geometry, Protocol):
    """A geometry whose coordinates are some of the entries of each parameter, as they are."""

    def select(self, index: int, entries: Tensor) -> Tensor:
        """The coordinates (n, size) among all entries (n, …) of parameter ``index``."""
        ...

    def weights(self, index: int, shape: tuple[int, int]) -> Tensor | None:
        """1 where an entry of the matrix ``index`` is a coordinate, else 0, (rows, columns); None for all of them."""
        ...


def frozen_parameters(geometry: Geometry) -> frozenset[int]:
    """Positions of the parameters without any trained entry: of these no gradient is needed."""
    return frozenset(index for index, active in enumerate(geometry.support or ()) if not active.numel())
