"""The private step: ``lift(noise(sum(clip(project(per-example gradients)))))``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raydp.geometry import Geometry
from raydp.geometry.base import MeasuredGeometry
from raydp.geometry.clipping import clip, clip_factors, scale_factors, scaled_sum
from raydp.privacy.mechanism import GRID_CELLS, Phase
from raydp.privacy.noise import NoiseKey

# int32 holds the sum of so many entries below GRID_CELLS in size.
_ROWS = 2**31 // GRID_CELLS - 1
# So many entries at a time: the three passes over them then run in the processor's caches.
_ENTRIES = 2**17
_LARGEST = 2.0**53  # float64 counts up to here; no sum comes near


def clipped_sum(coordinates: Sequence[Tensor], clip_norm: float, spacing: float) -> list[Tensor]:
    """The exact sum over the examples of their clipped vectors on the grid of multiples of ``spacing``.

    Each example's vector is clipped to norm ``clip_norm`` and cut off towards zero to the grid, which can only shorten
    it. The sum is one of integers, so it is exact: neither order nor micro-batches change it, and an example changes it
    by a vector of norm at most ``clip_norm / spacing`` and by nothing else.

    Args:
        coordinates: tensors (n, size) that together hold one vector an example.
        clip_norm: C > 0.
        spacing: a power of two, at least C / GRID_CELLS.

    Returns:
        int64 tensors (size,), in units of ``spacing``.
    """
    factors, finite = clip_factors(coordinates, clip_norm, unit=spacing)
    if not bool(finite.all()):  # such an example contributes zero, as in :func:`clip`
        coordinates = [part.where(finite.unsqueeze(1), 0.0) for part in coordinates]
    return [_units(part, factors) for part in coordinates]


def _units(part: Tensor, factors: Tensor) -> Tensor:
    """Sum over the rows of trunc(part · factor), int64 (size,)."""
    total = torch.zeros(part.shape[1], dtype=torch.int64, device=part.device)
    for rows, scales in zip(part.split(_ROWS), factors.unsqueeze(1).split(_ROWS), strict=True):
        width = _ENTRIES // len(rows) if rows.is_cpu else max(1, part.shape[1])
        for found, columns in zip(total.split(width), rows.split(width, dim=1), strict=True):
            found += (columns * scales).to(torch.int32).sum(dim=0, dtype=torch.int32)  # the conversion cuts off
    return total


@dataclass(kw_only=True)
class ClippedSum:
    """Accumulates the clipped sum of one *logical* batch over its micro-batches (or, later, workers).

    Micro-batches are a performance knob: each example is projected, clipped and put on the grid alone, and the integers
    are added exactly, so how they are cut changes nothing.

    With a :class:`~raydp.geometry.base.MeasuredGeometry` the sum is that of the gradients, each scaled by C over the
    length of its coordinates, and is projected and put on the grid once, at the end. The map is linear, so an example's
    share of the projected sum is its clipped coordinates all the same; but sum and projection are then float32, and the
    sensitivity is C up to their rounding.

    Attributes:
        spacing: of the grid, a power of two.
        total: int64 coordinates in units of ``spacing``, or gradients of a measured geometry; flat tensors.
    """

    geometry: Geometry
    clip_norm: float
    spacing: float
    device: str = "cpu"
    total: list[Tensor] = field(init=False)
    _measured: MeasuredGeometry | None = field(init=False)

    def __post_init__(self) -> None:
        self._measured = self.geometry if isinstance(self.geometry, MeasuredGeometry) else None
        if self._measured is None:
            self.total = [torch.zeros(size, dtype=torch.int64, device=self.device) for size in self.geometry.sizes]
        else:
            self.total = [torch.zeros(size, device=self.device) for size in self._measured.parameter_sizes]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the examples whose per-example gradients (n, *shape) are given."""
        if len(gradients[0]) == 0:
            return
        if self._measured is None:
            parts = clipped_sum(self.geometry.project(gradients), self.clip_norm, self.spacing)
        else:
            factors = scale_factors(self._measured.lengths(gradients), self.clip_norm, gradients[0].dtype)
            parts = scaled_sum([gradient.flatten(1) for gradient in gradients], *factors)
        for total, part in zip(self.total, parts, strict=True):
            total += part

    def units(self) -> list[Tensor]:
        """The clipped sum in the geometry's coordinates, int64, flat, in units of ``spacing``."""
        if self._measured is None:
            return self.total
        # A coordinate of infinite scale is never finite. Examples that have some in it are infinitely long and were
        # left out, so there is nothing in it, whatever the data.
        rows = self.geometry.project([total.unsqueeze(0) for total in self.total])
        finite = [part.squeeze(0).double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for part in rows]
        return [(part / self.spacing).round().clamp(-_LARGEST, _LARGEST).to(torch.int64) for part in finite]

    def coordinates(self) -> list[Tensor]:
        """:meth:`units` as float64 numbers, flat."""
        return [part.double() * self.spacing for part in self.units()]


def release(clipped: ClippedSum, *, phase: Phase, step: int, key: NoiseKey) -> list[Tensor]:
    """Add the step's one noise draw to the sum and divide by the *expected* batch size.

    The draw is addressed by (phase, step, tensor): replaying a step gives the same noise, and no worker, micro-batch or
    augmentation draws its own. It is added to an empty batch too. The realised batch size is private and never enters.
    Sum and noise are integers in units of the grid's spacing, so that adding them is exact and the result is the
    rounding of the Gaussian mechanism's (:mod:`raydp.privacy.noise`); what follows is post-processing.

    Args:
        clipped: the logical batch's clipped sum, on the phase's grid.
        phase: gives sigma, C, B and the grid.
        step: the logical step within the phase.
        key: the secret key of this phase.

    Returns:
        The released average for each tensor of the geometry, flat (size,), of torch's default type.
    """
    # Rounded up, so that no rounding of sigma·C takes from the noise. Dividing by a power of two is exact.
    scale = math.nextafter(phase.noise_std, math.inf) / phase.spacing
    released = []
    for index, total in enumerate(clipped.units()):
        noise = key.rounded_normals(total.numel(), scale, "noise", phase.name, step, index)
        noisy = (total + torch.from_numpy(noise).to(total.device)).double()
        released.append((noisy * (phase.spacing / phase.batch_size)).to(torch.get_default_dtype()))
    return released


def private_gradient(
    batches: Iterable[Sequence[Tensor]],
    *,
    geometry: Geometry,
    phase: Phase,
    step: int,
    key: NoiseKey,
    device: str = "cpu",
) -> list[Tensor]:
    """One private step over micro-batches of per-example gradients: project, clip, sum, noise, divide.

    Returns:
        The released coordinates (before ``geometry.lift``); everything computed from them is post-processing.
    """
    total = ClippedSum(geometry=geometry, clip_norm=phase.clip_norm, spacing=phase.spacing, device=device)
    for gradients in batches:
        total.add(gradients)
    return release(total, phase=phase, step=step, key=key)


__all__ = ["ClippedSum", "clip", "clipped_sum", "private_gradient", "release"]
